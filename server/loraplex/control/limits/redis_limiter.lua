-- The limits of all servers on one Redis. Every call is one step: Redis runs nothing beside a script.
--
-- KEYS[1]: the hash tag that every key begins with. ARGV[1]: the operation; ARGV[2]: its arguments, in msgpack as the
-- answer is. Times are microseconds of Redis' own clock; those in arguments are relative to now, but for `by.clock`.
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
--   TAG:WHAT:OWNER        what else they have at a time, such as sequences
--   TAG:live:REPLICA      request -> what it holds
--   TAG:state             `born`: a name for this set of data; `decisions`: how many changed it;
--                         replica -> the number of its joining, which every call names
--   TAG:seen              replica -> when it was last heard of
--   TAG:owed:REPLICA      what was spent without Redis and is charged: batch and window

local PERIOD = 60e6
local LEASE = 15e6
local SLACK = 1e6
local STEP = 1e6
local TAG = KEYS[1]
local STATE, SEEN = TAG .. ':state', TAG .. ':seen'
local given = cmsgpack.unpack(ARGV[2])
local by = given.by
local clock = redis.call('TIME')
local now = clock[1] * 1e6 + clock[2]
local known = redis.call('HMGET', STATE, 'born', 'decisions', by.replica)
local born, decisions, number = known[1], tonumber(known[2] or 0), known[3]
-- This Redis was restarted from an older dump, or took over without the last writes.
local goes_back = decisions < by.decisions

local function count_decision()
  decisions = redis.call('HINCRBY', STATE, 'decisions', 1)
end

local function pack_held(t, cost, sum, floor, id)
  return struct.pack('<dddd', t, cost, sum, floor) .. id
end

local function unpack_held(raw)
  local t, cost, sum, floor = struct.unpack('<dddd', raw)
  return t, cost, sum, floor, string.sub(raw, 33)
end

-- What is spent, of PERIOD * limit.
local function spent(window, at)
  return math.max(0, window.tat - ((at or now) - window.base) * window.limit)
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

-- `limit` nil: as it is; nil is returned where nothing is spent. `at`: when it is to be charged, else now. Nothing is
-- written for a window that is only read.
local function open(name, limit, at)
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
    if spent(window, at) > 0 then
      if limit and limit ~= window.limit then window.rescaled = limit end
      return window
    end
  end
  if not limit then return nil end
  -- What was charged before makes no difference any more, given back or not.
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

-- Before all that is held here it was spent until then. `is_first`: all that is held is in what was seen; what of it is
-- whose cannot be told apart any more.
local function raise(window, seen, is_first)
  begin_write(window)
  if is_first then
    window.head = window.tat
    redis.call('DEL', window.held)
  end
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

local function place_key(what, owner)
  return TAG .. ':' .. (what == 'concurrency' and 'busy' or what) .. ':' .. owner
end

-- Servers of earlier releases name the sequences alone, or nothing.
local function free_places(holds)
  local held = holds.held or { concurrency = 1, sequences = holds.sequences or 0 }
  for _, owner in ipairs(holds.places) do
    for what, amount in pairs(held) do count_down(place_key(what, owner), amount) end
  end
end

-- `ended`: request -> tokens that it used, -1 where nothing came of it. What this replica does not hold is left out.
-- Window -> the microseconds that are spent then.
local function settle(replica, ended)
  local live, by_window, has_ended = TAG .. ':live:' .. replica, {}, false
  for id, used in pairs(ended) do
    local raw = redis.call('HGET', live, id)
    if raw then
      -- First, as it needs no memory: a script that has written once is not stopped by `maxmemory`.
      redis.call('HDEL', live, id)
      has_ended = true
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
  if has_ended then count_decision() end
  return by_window
end

local function hold(replica, request)
  local rates, places = {}, {}
  for i, rate in ipairs(request.rates) do
    rates[i] = { name = rate.name, cost = rate.cost, tokens = rate.tokens }
  end
  for i, place in ipairs(request.places) do places[i] = place.owner end
  -- The first write of a decision: here a Redis without memory stops it.
  local holds = { rates = rates, places = places, held = request.held, sequences = request.held.sequences }
  redis.call('HSET', TAG .. ':live:' .. replica, request.id, cmsgpack.pack(holds))
  for _, owner in ipairs(places) do
    for what, amount in pairs(request.held) do redis.call('INCRBY', place_key(what, owner), amount) end
  end
end

local function forget(replica)
  local ended = {}
  for _, id in ipairs(redis.call('HKEYS', TAG .. ':live:' .. replica)) do ended[id] = -1 end
  settle(replica, ended)
  redis.call('HDEL', STATE, replica)
  redis.call('ZREM', SEEN, replica)
end

-- What runs and is not held here. If data was lost, what was charged before is in what the windows were seen to be, by
-- every server; it cannot be told apart any more, and flows back whatever is used of it.
local function restore(replica, live, existing, has_lost)
  for _, request in ipairs(live) do
    if not existing[request.id] then
      if has_lost and request.told then request.rates = {} end
      hold(replica, request)
      for _, rate in ipairs(request.rates) do
        local at = now - request.age
        charge(open(rate.name, rate.limit, at), rate.cost, at, request.id)
      end
    end
  end
end

-- The caller saw data that is not here any more: all of it, the last of it, or what expired when the clock was set
-- forward.
local function has_lost_data()
  return given.born ~= '' and (given.born ~= born or goes_back or given.is_doubtful)
end

local operations = {}

-- What this replica knows of windows, before it joins. How far they were spent, if this Redis lost its data; if it did
-- not it knows better, as what was seen may have been given back since. And what was spent without it: each window of a
-- batch once, though it may be told again, by a replica that did not hear the answer.
function operations.tell()
  local owed = TAG .. ':owed:' .. by.replica
  local has_lost = has_lost_data()
  for _, rate in ipairs(given.rates) do
    local window = open(rate.name, rate.limit)
    local fresh = window.fresh
    if fresh then window.base = math.min(window.base, now + rate.seen) end
    -- A window that is gone had flowed back, as far as anybody saw.
    if has_lost or fresh then raise(window, point(window, now + rate.seen), born == given.born) end
    if rate.sum > 0 and redis.call('SADD', owed, given.batch .. ' ' .. rate.name) == 1 then
      charge_for_good(window, rate.sum * PERIOD, point(window, now + rate.floor))
    end
  end
  redis.call('PEXPIRE', owed, string.format('%.0f', 2 * PERIOD / 1000))
  return { status = 'ok' }
end

-- Reconciles what this replica holds with what is here: nothing, after a restart without its data.
function operations.join()
  local replica, live, existing, ended = by.replica, {}, {}, {}
  for _, request in ipairs(given.live) do live[request.id] = true end
  -- What was decided just now, and the replica has not heard of: taken for ended, it would pass uncharged.
  for _, id in ipairs(given.asked) do live[id] = true end
  for _, id in ipairs(redis.call('HKEYS', TAG .. ':live:' .. replica)) do
    existing[id] = true
    if not live[id] then ended[id] = given.ended[id] or -1 end
  end
  local has_lost = has_lost_data()
  if not born or (has_lost and born == given.born) then
    -- The first to notice. Everybody else has to join again, and finds another name.
    redis.call('DEL', STATE)
    born = replica .. by.number
  end
  decisions = math.max(decisions, by.decisions) + 1
  redis.call('HSET', STATE, 'born', born, 'decisions', string.format('%.0f', decisions), replica, by.number)
  redis.call('ZADD', SEEN, string.format('%.17g', now), replica)
  settle(replica, ended)
  restore(replica, given.live, existing, has_lost)
  return { status = 'ok', replicas = redis.call('ZCARD', SEEN), has_lost = has_lost, born = born }
end

function operations.heartbeat()
  redis.call('ZADD', SEEN, string.format('%.17g', now), by.replica)
  for _, silent in ipairs(redis.call('ZRANGEBYSCORE', SEEN, '-inf', string.format('%.17g', now - LEASE))) do
    forget(silent)
  end
  return { status = 'ok', replicas = redis.call('ZCARD', SEEN) }
end

function operations.leave()
  forget(by.replica)
  return { status = 'ok' }
end

-- Microseconds until a charge fits into its window.
local function wait_for(rate, window)
  local capacity = PERIOD * rate.limit
  local over = spent(window) * (rate.limit / window.limit) + rate.cost * PERIOD - capacity
  -- Sums of floats, where the numbers are too large to be whole: a billionth is not worth a refusal.
  return over <= capacity * 1e-9 and 0 or over / rate.limit
end

local function is_beyond(limit, key, more)
  return tonumber(redis.call('GET', key) or 0) + more > limit
end

-- All that the request is charged, or nothing.
function operations.reserve()
  local windows, spents, waits, over, refused = {}, {}, {}, {}, false
  for i, rate in ipairs(given.rates) do
    local window = open(rate.name, rate.limit)
    windows[i], spents[i], waits[i] = window, spent(window) / window.limit, wait_for(rate, window)
    refused = refused or waits[i] > 0
  end
  for i, place in ipairs(given.places) do
    over[i] = {}
    for what, limit in pairs(place.bounds) do
      if is_beyond(limit, place_key(what, place.owner), given.held[what]) then over[i][#over[i] + 1] = what end
    end
    refused = refused or #over[i] > 0
  end
  if not refused then
    hold(by.replica, given)
    for i, rate in ipairs(given.rates) do
      charge(windows[i], rate.cost, now, given.id)
      spents[i], waits[i] = spent(windows[i]) / rate.limit, wait_for(rate, windows[i])
    end
    count_decision()
  end
  local status = refused and 'refused' or 'ok'
  return { status = status, spent = spents, waits = waits, over = over }
end

function operations.settle()
  local windows = settle(by.replica, given.ended)
  -- An empty table would be an empty array in msgpack.
  return { status = 'ok', windows = next(windows) and windows or nil }
end

local function answer()
  -- It lay in a buffer and its replica has given it up; or this clock was set forward, which the replica then sees.
  if by.clock >= 0 and now - by.clock > STEP then return { status = 'late' } end
  local is_known = number == by.number and not goes_back
  if ARGV[1] ~= 'join' and ARGV[1] ~= 'tell' and not is_known then return { status = 'unknown' } end
  return operations[ARGV[1]]()
end

local reply = answer()
reply.now, reply.decisions = now, decisions
return cmsgpack.pack(reply)
