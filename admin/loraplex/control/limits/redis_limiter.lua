-- The limits of all servers on one Redis. Every call is one step: Redis runs nothing beside a script.
--
-- KEYS[1]: the hash tag that every key begins with. ARGV[1]: the operation; ARGV[2]: what it is given, in msgpack as
-- the answer is. Times are microseconds of Redis' own clock.
--
-- A rate window is what `gcra.py` describes, in whole numbers: with L the limit a minute, a point of time is
-- (microseconds since the window's base) * L, and a token or a request is 60e6, so that what flows back in a
-- microsecond is L. That is exact up to L = 1.5e8, and beyond it to a millionth of a token.
--
-- A charge c at time t makes the theoretical arrival time (TAT) max(TAT, t) + c. Those that may still be given back
-- are kept as a list of (t, c, C, D): what was charged after this one and before the next, and is final, makes the TAT
-- max(TAT + C, D). To give back is to go through the list once more. Charging does not touch it but at its end.
--
--   TAG:rate:OWNER:WHAT   limit, base, TAT before the first held charge, TAT     gone when it has flowed back
--   TAG:held:OWNER:WHAT   the list                                               the same
--   TAG:busy:OWNER        requests that run
--   TAG:sequences:OWNER   sequences that they run
--   TAG:live:REPLICA      request -> what it holds
--   TAG:born              a name for this set of data: another one tells that it was lost
--   TAG:joined            replica -> the number of its joining, which every call names
--   TAG:seen              replica -> when it was last heard of
--   TAG:parts             replica -> the fewest replicas that it may believe there are
--   TAG:owed:REPLICA      window -> how much of what was spent without Redis is charged; '' -> the batch that it is of
--   TAG:awaited, :told    after a loss of data or a long outage: how many replicas there were, and those that have told
--                         what they knew
--
-- A replica that cannot reach this Redis spends its share of each limit by itself: from SILENCE after it was last heard
-- of, beginning with nothing, at the limit over the number of replicas. Just that much is kept back here from all others
-- until it is heard of again, or forgotten. So all together never let pass more than the limit.

local PERIOD = 60e6
local LEASE = 15e6
local SLACK = 1e6
local SILENCE = 1e6
local TAG = KEYS[1]
local JOINED, SEEN, BORN, PARTS = TAG .. ':joined', TAG .. ':seen', TAG .. ':born', TAG .. ':parts'
local AWAITED, TOLD = TAG .. ':awaited', TAG .. ':told'
local given = cmsgpack.unpack(ARGV[2])
local clock = redis.call('TIME')
local now = clock[1] * 1e6 + clock[2]

local function pack_held(t, cost, sum, floor, id)
  return struct.pack('<dddd', t, cost, sum, floor) .. id
end

local function unpack_held(raw)
  local t, cost, sum, floor = struct.unpack('<dddd', raw)
  return t, cost, sum, floor, string.sub(raw, 33)
end

-- What is spent, of PERIOD * limit.
local function spent(window)
  return math.max(0, window.tat - (now - window.base) * window.limit)
end

local function save(window)
  local ttl = math.ceil((spent(window) / window.limit + SLACK) / 1000)
  local raw = struct.pack('<dddd', window.limit, window.base, window.head, window.tat)
  redis.call('SET', window.key, raw, 'PX', string.format('%.0f', ttl))
  redis.call('PEXPIRE', window.held, string.format('%.0f', ttl))
end

-- A limit that was changed keeps the part of the minute that is spent.
local function rescale(window, limit)
  local by = limit / window.limit
  window.limit, window.head, window.tat = limit, window.head * by, window.tat * by
  local list = redis.call('LRANGE', window.held, 0, -1)
  redis.call('DEL', window.held)
  for _, raw in ipairs(list) do
    local t, cost, sum, floor, id = unpack_held(raw)
    redis.call('RPUSH', window.held, pack_held(t * by, cost * by, sum * by, floor * by, id))
  end
end

-- `limit` nil: as it is; nil is returned where nothing is spent. Nothing is written for a window that is only read.
local function open(name, limit)
  local window = { key = TAG .. ':rate:' .. name, held = TAG .. ':held:' .. name }
  local raw = redis.call('GET', window.key)
  if raw then
    window.limit, window.base, window.head, window.tat = struct.unpack('<dddd', raw)
    if spent(window) > (PERIOD + SLACK) * window.limit then
      -- No charge does that: the clock was set back, or a debt of more than a minute was reported.
      -- All of it comes before what is held from now on.
      window.base, window.head, window.tat = now - PERIOD, 2 * PERIOD * window.limit, 2 * PERIOD * window.limit
      save(window)
      redis.call('DEL', window.held)
    end
    if spent(window) > 0 then
      if limit and limit ~= window.limit then window.rescaled = limit end
      return window
    end
  end
  if not limit then return nil end
  -- What was charged before now makes no difference any more, given back or not.
  window.limit, window.base, window.head, window.tat, window.fresh = limit, now - PERIOD, 0, 0, true
  return window
end

local function begin_write(window)
  if window.fresh then redis.call('DEL', window.held) end
  if window.rescaled then rescale(window, window.rescaled) end
  window.fresh, window.rescaled = nil, nil
end

local function point(window, at)
  return math.max(0, (at - window.base) * window.limit)
end

local function charge(window, cost, at, id)
  begin_write(window)
  local t, units = point(window, at), cost * PERIOD
  window.tat = math.max(window.tat, t) + units
  redis.call('RPUSH', window.held, pack_held(t, units, 0, 0, id))
  save(window)
end

-- What was charged elsewhere, for good: the TAT becomes max(TAT + sum, floor). Nobody ends it.
local function charge_for_good(window, sum, floor)
  begin_write(window)
  redis.call('RPUSH', window.held, pack_held(0, sum, 0, floor, ''))
  window.tat = math.max(window.tat + sum, floor)
  save(window)
end

-- Before all that is held here it was spent until then.
local function raise(window, seen)
  begin_write(window)
  window.head = math.max(window.head, seen)
  window.tat = window.head
  for _, raw in ipairs(redis.call('LRANGE', window.held, 0, -1)) do
    local t, cost, sum, floor = unpack_held(raw)
    window.tat = math.max(math.max(window.tat, t) + cost + sum, floor)
  end
  save(window)
end

-- End held charges; the microseconds that are spent then. `kept`: request -> the part of its charge that stays, 0 to 1.
local function end_held(name, kept)
  local window = open(name)
  if not window then return 0 end
  local tat, stays, changed, gone = window.head, {}, {}, {}
  for index, raw in ipairs(redis.call('LRANGE', window.held, 0, -1)) do
    local t, cost, sum, floor, id = unpack_held(raw)
    local part = kept[id]
    cost = cost * (part or 1)
    tat = math.max(math.max(tat, t) + cost + sum, floor)
    if part == nil then
      stays[#stays + 1] = { index - 1, t, cost, sum, floor, id }
    else
      gone[#gone + 1] = raw
      local before = stays[#stays]
      if before then
        before[4], before[5] = before[4] + cost + sum, math.max(math.max(before[5], t) + cost + sum, floor)
        changed[#stays] = before
      else
        window.head = tat
      end
    end
  end
  if #gone == 0 then return spent(window) / window.limit end
  if #gone == 1 then
    for _, held in pairs(changed) do
      redis.call('LSET', window.held, held[1], pack_held(held[2], held[3], held[4], held[5], held[6]))
    end
    redis.call('LREM', window.held, 1, gone[1])
  else
    redis.call('DEL', window.held)
    for _, held in ipairs(stays) do
      redis.call('RPUSH', window.held, pack_held(held[2], held[3], held[4], held[5], held[6]))
    end
  end
  window.tat = tat
  save(window)
  return spent(window) / window.limit
end

local function count_down(key, by)
  if by > 0 and redis.call('DECRBY', key, by) <= 0 then redis.call('DEL', key) end
end

-- What a server of an earlier release holds counts no sequences.
local function free_places(holds)
  for _, owner in ipairs(holds.places) do
    count_down(TAG .. ':busy:' .. owner, 1)
    count_down(TAG .. ':sequences:' .. owner, holds.sequences or 0)
  end
end

-- `ended`: request -> tokens that it used, -1 where nothing came of it. What this replica does not hold is left out.
-- Window -> the microseconds that are spent then.
local function settle(replica, ended)
  local live, by_window = TAG .. ':live:' .. replica, {}
  for id, used in pairs(ended) do
    local raw = redis.call('HGET', live, id)
    if raw then
      -- First, as it needs no memory: a script that has written once is not stopped by `maxmemory`.
      redis.call('HDEL', live, id)
      local holds = cmsgpack.unpack(raw)
      for _, rate in ipairs(holds.rates) do
        local part = 1
        if used < 0 then
          part = 0
        elseif rate.tokens then
          part = rate.cost > 0 and math.min(used, rate.cost) / rate.cost or 0
        end
        by_window[rate.name] = by_window[rate.name] or {}
        by_window[rate.name][id] = part
      end
      free_places(holds)
    end
  end
  for name, kept in pairs(by_window) do by_window[name] = end_held(name, kept) end
  return by_window
end

local function hold(replica, request)
  local rates, places = {}, {}
  for i, rate in ipairs(request.rates) do
    rates[i] = { name = rate.name, cost = rate.cost, tokens = rate.tokens }
  end
  for i, place in ipairs(request.places) do places[i] = place.owner end
  -- The first write of a decision: here a Redis without memory stops it.
  local holds = { rates = rates, places = places, sequences = request.sequences }
  redis.call('HSET', TAG .. ':live:' .. replica, request.id, cmsgpack.pack(holds))
  for _, owner in ipairs(places) do
    redis.call('INCR', TAG .. ':busy:' .. owner)
    redis.call('INCRBY', TAG .. ':sequences:' .. owner, request.sequences)
  end
end

local function forget(replica)
  local ended = {}
  for _, id in ipairs(redis.call('HKEYS', TAG .. ':live:' .. replica)) do ended[id] = -1 end
  settle(replica, ended)
  redis.call('HDEL', JOINED, replica)
  redis.call('ZREM', SEEN, replica)
  redis.call('HDEL', PARTS, replica)
end

-- `at`: when it sent this, by its knowledge of our clock. It may lie about for long before it is done.
local function heard_of(replica, at)
  redis.call('ZADD', SEEN, string.format('%.17g', math.min(at, now)), replica)
end

-- How many replicas live, and how many of them come before this one, which believed in `replicas` until now.
local function count(replica, replicas)
  for _, silent in ipairs(redis.call('ZRANGEBYSCORE', SEEN, '-inf', string.format('%.17g', now - LEASE))) do
    if silent ~= replica then forget(silent) end
  end
  local all, before = redis.call('ZRANGE', SEEN, 0, -1), 0
  for _, other in ipairs(all) do
    if other < replica then before = before + 1 end
  end
  -- This answer may be lost.
  redis.call('HSET', PARTS, replica, replicas > 0 and math.min(replicas, #all) or #all)
  return { status = 'ok', now = now, replicas = #all, rank = before }
end

-- How much of a limit the others may be spending by themselves: a function of the limit.
local function kept_back(replica)
  local silent = {}
  local since = '(' .. string.format('%.17g', now - SILENCE)
  local found = redis.call('ZRANGEBYSCORE', SEEN, '-inf', since, 'WITHSCORES')
  for i = 1, #found, 2 do
    if found[i] ~= replica then
      local parts = tonumber(redis.call('HGET', PARTS, found[i]) or 1)
      silent[#silent + 1] = { parts, now - SILENCE - tonumber(found[i + 1]) }
    end
  end
  return function(limit)
    local sum = 0
    for _, one in ipairs(silent) do sum = sum + math.ceil(limit / one[1]) * one[2] end
    return sum
  end
end

-- Nobody was heard of for a lease: none of them is dead for that, and all may have spent their shares.
local function was_away()
  local last = redis.call('ZREVRANGE', SEEN, 0, 0, 'WITHSCORES')
  return last[2] ~= nil and tonumber(last[2]) <= now - LEASE + SLACK
end

-- After a loss of data, or when all were away, nobody decides here before all have told what they know, or had LEASE
-- for it.
local function await_all(replicas)
  local awaited = tonumber(redis.call('GET', AWAITED) or 0)
  if awaited > 0 then
    redis.call('SET', AWAITED, math.max(awaited, replicas), 'KEEPTTL')
  else
    redis.call('SET', AWAITED, replicas, 'PX', string.format('%.0f', LEASE / 1000))
  end
end

local function has_told(replica)
  redis.call('SADD', TOLD, replica)
  redis.call('PEXPIRE', TOLD, string.format('%.0f', LEASE / 1000))
end

local function have_all_told()
  local awaited = tonumber(redis.call('GET', AWAITED) or 0)
  if redis.call('SCARD', TOLD) < awaited then return false end
  redis.call('DEL', AWAITED, TOLD)
  return true
end

-- What was spent here before, if this Redis lost its data; if it did not it knows better, as what was seen may have been
-- given back since. And what was spent without it, of which some may have been told before, in the same batch, by a call
-- whose answer was lost.
local function report(replica, batch, rates, has_lost)
  local owed = TAG .. ':owed:' .. replica
  for _, rate in ipairs(rates) do
    local window = open(rate.name, rate.limit)
    local fresh = window.fresh
    if fresh then window.base = math.min(window.base, rate.seen) end
    -- A window that is gone had flowed back, as far as anybody saw.
    if has_lost or fresh then raise(window, point(window, rate.seen)) end
    if rate.sum > 0 then
      if redis.call('HGET', owed, '') ~= batch then
        redis.call('DEL', owed)
        redis.call('HSET', owed, '', batch)
      end
      local more = rate.sum - tonumber(redis.call('HGET', owed, rate.name) or 0)
      if more > 0 then charge_for_good(window, more * PERIOD, point(window, rate.floor)) end
      redis.call('HSET', owed, rate.name, rate.sum)
      redis.call('PEXPIRE', owed, string.format('%.0f', 2 * PERIOD / 1000))
    end
  end
end

-- What runs and is not held here. If data was lost, what was charged before is in what the windows were seen to be, by
-- every server; it cannot be told apart any more, and flows back whatever is used of it.
local function restore(replica, live, existing, has_lost)
  for _, request in ipairs(live) do
    if not existing[request.id] then
      if has_lost and request.told then request.rates = {} end
      hold(replica, request)
      for _, rate in ipairs(request.rates) do
        charge(open(rate.name, rate.limit), rate.cost, math.min(now, request.at), request.id)
      end
    end
  end
end

local operations = {}

-- Reconciles what this replica knows with what is here: nothing, after a restart without its data.
function operations.join()
  local replica, live, existing, ended = given.replica, {}, {}, {}
  for _, request in ipairs(given.live) do live[request.id] = true end
  for _, id in ipairs(redis.call('HKEYS', TAG .. ':live:' .. replica)) do
    existing[id] = true
    if not live[id] then ended[id] = given.ended[id] or -1 end
  end
  redis.call('HSET', JOINED, replica, given.number)
  redis.call('SETNX', BORN, replica .. given.number)
  local born = redis.call('GET', BORN)
  local has_lost = given.born ~= '' and given.born ~= born
  local awaits = given.knows and (has_lost or was_away())
  -- A replica that was apart may spend its share until it hears this answer. Until it says so it counts as silent, and
  -- is not forgotten meanwhile.
  heard_of(replica, given.heard < 0 and now or math.max(given.heard, now - LEASE / 2))
  settle(replica, ended)
  report(replica, given.batch, given.rates, has_lost)
  restore(replica, given.live, existing, has_lost)
  local counted = count(replica, given.replicas)
  counted.has_lost, counted.born = has_lost, born
  if awaits then await_all(given.replicas) end
  if given.is_whole and given.knows then has_told(replica) end
  counted.ready = have_all_told()
  return counted
end

function operations.report()
  report(given.replica, given.batch, given.rates, given.has_lost)
  if given.is_last and given.knows then has_told(given.replica) end
  return { status = 'ok', now = now, ready = have_all_told() }
end

function operations.heartbeat()
  heard_of(given.replica, given.heard)
  return count(given.replica, given.replicas)
end

function operations.leave()
  forget(given.replica)
  return { status = 'ok', now = now }
end

-- Microseconds until a charge fits into its window, beside what is kept back.
local function wait_for(rate, window, kept)
  local capacity = PERIOD * rate.limit
  local over = spent(window) * (rate.limit / window.limit) + kept(rate.limit) + rate.cost * PERIOD - capacity
  -- Sums of floats, where the numbers are too large to be whole: a billionth is not worth a refusal.
  return over <= capacity * 1e-9 and 0 or over / rate.limit
end

local function is_beyond(limit, key, more)
  return limit >= 0 and tonumber(redis.call('GET', key) or 0) + more > limit
end

-- All that the request is charged, or nothing.
function operations.reserve()
  local windows, spents, waits, full, crowded, refused = {}, {}, {}, {}, {}, false
  local kept = kept_back(given.replica)
  for i, rate in ipairs(given.rates) do
    local window = open(rate.name, rate.limit)
    windows[i], spents[i], waits[i] = window, spent(window) / window.limit, wait_for(rate, window, kept)
    refused = refused or waits[i] > 0
  end
  for i, place in ipairs(given.places) do
    full[i] = is_beyond(place.limit, TAG .. ':busy:' .. place.owner, 1)
    crowded[i] = is_beyond(place.max_sequences, TAG .. ':sequences:' .. place.owner, given.sequences)
    refused = refused or full[i] or crowded[i]
  end
  if not refused then
    hold(given.replica, given)
    for i, rate in ipairs(given.rates) do
      charge(windows[i], rate.cost, now, given.id)
      spents[i], waits[i] = spent(windows[i]) / rate.limit, wait_for(rate, windows[i], kept)
    end
  end
  local status = refused and 'refused' or 'ok'
  return { status = status, now = now, spent = spents, waits = waits, full = full, crowded = crowded }
end

function operations.settle()
  local windows = settle(given.replica, given.ended)
  -- An empty table would be an empty array in msgpack.
  return { status = 'ok', now = now, windows = next(windows) and windows or nil }
end

if ARGV[1] ~= 'join' and redis.call('HGET', JOINED, given.replica) ~= given.number then
  return cmsgpack.pack({ status = 'unknown', now = now })
end
return cmsgpack.pack(operations[ARGV[1]]())
