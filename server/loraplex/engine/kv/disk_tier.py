"""The tier behind host memory: blocks on a disk, read and written by two threads of their own. No torch.

What is written has passed through host memory: the runner copies a block to its slot, and hands its bytes on. What is
read is there before its request is scheduled: the request is held like one whose grammar is being built, and then its
blocks are copied to the pool by plans, as those in host memory are. The step thread touches the index alone
(`BlockStore.__contains__`), never the disk.

A disk may hang, fail or lie. A held request goes on without its blocks at a time that it was given when it came. If
nothing was read then for a while, the disk is left alone, and so it is after reads that brought nothing, and after
refused writes. The blocks that wait to be written have a bound in bytes; a block beyond it is not written.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Row

from loraplex.engine.kv import prefix_keys
from loraplex.engine.kv.block_store import BlockStore
from loraplex.engine.kv.disk_work import Asked, Write
from loraplex.engine.types import BlockKey

_log = logging.getLogger(__name__)

LEAST_BLOCKS = 4
"""A request whose prefix the disk has fewer blocks of, beyond those in memory, does not wait for them."""
READ_BYTES = 512 << 20
"""Bytes that are read, or on their way, for all requests that have not taken them yet; half of it for one tenant."""
KEPT_S = 30.0
"""Time for which what was read waits for a request that cannot begin yet; it computes its prefix then."""
WRITE_BYTES = 128 << 20
"""Bytes that wait to be written; a state that has more waits alone."""
LEAST_WAIT_S, MOST_WAIT_S = 0.1, 3.0
"""Bounds of the time for which a request is held."""
REST_S = 30.0
"""Time for which a disk that is slow or fails is left alone."""
_STUCK_S = 10.0
"""A single write that takes longer is that of a slow disk."""
_MOST_FAILED = 3
"""Reads, or writes, in a row that bring nothing before the disk is left alone."""
_DRAIN_S = 5.0
"""Time for what waits to be written when the engine ends."""
_RATE = 0.2
"""The weight of the last read in the mean time of a read."""
_FIRST_SPEED = 200e6
"""Bytes a second that a disk is taken to read before it has shown its own speed, or not for a while."""


class DiskTier:
    """The blocks of a store for the core's thread, and the two threads that read and write them.

    `wake` is called from the reader's thread when `take_ended` has news. Blocks have `block_bytes` bytes. Of the
    methods, `put` may be called from any thread, and all others from the core's. With `clock` and no `threads`, a test
    reads and writes by `read_one` and `write_one` itself.
    """

    def __init__(
        self,
        store: BlockStore,
        block_bytes: int,
        wake: Callable[[], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        least_blocks: int = LEAST_BLOCKS,
        threads: bool = True,
    ) -> None:
        self.store = store
        self.num_late = 0
        """Requests that went on without what they had asked for."""
        self.num_restored = 0
        """Blocks that came back to the pool."""
        self._block_bytes = block_bytes
        self._least_blocks = least_blocks
        self._wake = wake
        self._clock = clock
        self._asked: dict[str, Asked] = {}
        self._changed = threading.Condition()
        # Under the condition's lock.
        self._wanted: dict[BlockKey, list[Asked]] = {}
        self._num_wanted: Counter[str] = Counter()  # by tenant
        self._queue: OrderedDict[str, deque[BlockKey]] = OrderedDict()  # to be read, by tenant, in turns
        self._arrived: dict[BlockKey, bytes] = {}
        self._writes: OrderedDict[BlockKey, Write] = OrderedDict()
        self._to_write: deque[BlockKey] = deque()
        self._full = 0  # writes that were not asked for, since too many wait
        self._read_s = block_bytes / _FIRST_SPEED  # the mean time of a read
        self._moved_at = clock()  # the end of the last read, or the beginning of the queue
        self._reading_since: float | None = None
        self._writing_since: float | None = None
        self._failed = {"read": 0, "write": 0}  # in a row
        self._rests_until = {"read": 0.0, "write": 0.0}
        self._has_news = False
        self._to_sweep = False
        self._closed = False
        self._threads = [
            threading.Thread(target=run, name=name, daemon=True)
            for name, run in (("prefix-read", self._read), ("prefix-write", self._write))
            if threads
        ]
        for thread in self._threads:
            thread.start()

    # Reading.

    def __contains__(self, key: BlockKey) -> bool:
        return key in self.store

    @property
    def most_asked(self) -> int:
        """Blocks that one tenant's requests may have asked for at a time."""
        return READ_BYTES // self._block_bytes // 2

    def ask(self, request_id: str, keys: Row[BlockKey], most_s: float, *, whole: bool = False) -> bool:
        """Read these blocks of one tenant for a request, as many of the first as there is room for; `whole`: all or
        none. `most_s`: what computing all of them takes. Returns whether it is to be held: not if they are few, if the
        reader has more to do than it can meanwhile, or if the disk is being left alone."""
        now, tenant_id, num_asked = self._clock(), keys[0][0][0], len(keys)
        with self._changed:
            room = READ_BYTES // self._block_bytes - len(self._wanted)
            room = max(0, min(room, self.most_asked - self._num_wanted[tenant_id]))
            new = [key for key in keys if key not in self._wanted]
            if len(new) > room:
                if whole:
                    return False
                keys, new = keys[: keys.index(new[room])], new[:room]
            if len(keys) < self._least_blocks or self._is_resting("read", now):
                return False
            most_s = min(max(most_s * len(keys) / num_asked, LEAST_WAIT_S), MOST_WAIT_S)
            if self._expected_s(tenant_id, len(new), now) > most_s:
                return False
            if not self._queue:
                self._moved_at = now
            missing = {key for key in keys if key not in self._arrived}
            asked = self._asked[request_id] = Asked(now + most_s, tuple(keys), missing, bool(missing))
            for key in keys:
                if key not in self._wanted:
                    self._queue.setdefault(tenant_id, deque()).append(key)
                    self._wanted[key] = []
                    self._num_wanted[tenant_id] += 1
                self._wanted[key].append(asked)
            self._changed.notify_all()
        return asked.is_held

    def _expected_s(self, tenant_id: str, num_new: int, now: float) -> float:
        """Seconds until num_new blocks more of a tenant are read: tenants take turns."""
        if now - self._moved_at >= REST_S:  # what was measured then says nothing now
            self._read_s = self._block_bytes / _FIRST_SPEED
        own = num_new + len(self._queue.get(tenant_id, ()))
        num_tenants = len(self._queue) + (tenant_id not in self._queue)
        return min(num_new + sum(map(len, self._queue.values())), own * num_tenants) * self._read_s

    def take_ended(self) -> list[str]:
        """The requests that are to be held no longer, since the last call."""
        now = self._clock()
        if not (self._has_news or self._asked):
            return []
        ended, forgotten = list[str](), list[str]()
        with self._changed:
            self._has_news = False
            for request_id, asked in self._asked.items():
                is_late = asked.is_held and bool(asked.missing) and asked.until <= now
                if is_late:
                    self.num_late += 1
                    if now - self._moved_at >= LEAST_WAIT_S:
                        self._rest("read", now, "blocks were not read in time")
                    self._drop(asked, asked.missing)
                    asked.missing.clear()
                if asked.is_held and not asked.missing:
                    asked.is_held = False
                    ended.append(request_id)
                elif asked.until + KEPT_S <= now:
                    forgotten.append(request_id)
        for request_id in forgotten:
            self.close_request(request_id)
        return ended

    def next_timeout_s(self) -> float | None:
        """Seconds until `take_ended` may have news by time alone."""
        held = [asked.until for asked in self._asked.values() if asked.is_held]
        return max(0.0, min(held) - self._clock()) if held else None

    def payload(self, key: BlockKey) -> bytes | None:
        """The bytes of a block that was read for a request, as long as that request has not been closed."""
        with self._changed:
            return self._arrived.get(key)

    def close_request(self, request_id: str) -> None:
        """A request has ended, or has the blocks that it asked for."""
        asked = self._asked.pop(request_id, None)
        if asked is not None:
            with self._changed:
                self._drop(asked, asked.keys)

    def _drop(self, asked: Asked, keys: Iterable[BlockKey]) -> None:
        for key in keys:
            users = self._wanted.get(key, [])
            if asked in users:
                users.remove(asked)
                if not users:
                    self._forget(key)

    def _forget(self, key: BlockKey) -> list[Asked]:
        """A block is wanted no more. Returns the requests that wanted it."""
        self._num_wanted[key[0][0]] -= 1
        if not self._num_wanted[key[0][0]]:
            del self._num_wanted[key[0][0]]
        self._arrived.pop(key, None)
        return self._wanted.pop(key)

    # Writing.

    def takes_more(self, count: int = 1) -> bool:
        """Whether there is room for blocks that are to be written. That there is none is counted."""
        with self._changed:
            takes_more = self._has_room(count) and not self._is_resting("write", self._clock())
            self._full += 0 if takes_more else count
            return takes_more

    def _has_room(self, count: int) -> bool:
        return not self._writes or (len(self._writes) + count - 1) * self._block_bytes < WRITE_BYTES

    def reserve(self, key: BlockKey) -> bool:
        """Whether the runner is to hand on this block: `put` must follow. False where it is on the disk, or will be,
        and where the disk has enough to write, or is being left alone."""
        return key not in self.store and self._reserve((key,))

    def reserve_state(self, parts: Row[BlockKey]) -> Row[BlockKey]:
        """The parts of a state that the runner is to hand on: all that the disk lacks, or none. Without the first one
        on it the others may be of a state that was no good, and are replaced."""
        with self._changed:
            is_on_way = parts[0] in self._writes
        if not is_on_way and parts[0] not in self.store:
            self.remove(parts)
        elif not is_on_way:
            parts = [part for part in parts if part not in self.store]
        return parts if parts and not is_on_way and self._reserve(parts) else ()

    def _reserve(self, keys: Row[BlockKey]) -> bool:
        now = self._clock()
        with self._changed:
            if self._closed or any(key in self._writes for key in keys):
                return False
            if self._writing_since is not None and now - self._writing_since > _STUCK_S:
                self._rest("write", now, "a block is still being written")
            if self._is_resting("write", now) or not self._has_room(len(keys)):
                self._full += len(keys)
                return False
            self._writes.update((key, Write()) for key in keys)
        return True

    def put(self, key: BlockKey, payload: memoryview) -> None:
        """The bytes of a block that was reserved. They belong to this tier from now on."""
        with self._changed:
            write = self._writes.get(key)
            if write is None:
                return
            if write.is_void:
                del self._writes[key]
                return
            write.payload = payload
            self._to_write.append(key)
            self._changed.notify_all()

    # What is erased.

    def erase_version(self, digest: str) -> None:
        """Nothing of an adapter version is found, filled in or written any more."""
        self.store.erase_version(None, digest)
        self._void(lambda key: key[0][1] == digest)

    def erase_tenant(self, tenant_id: str) -> None:
        self.store.erase_tenant(tenant_id)
        self._void(lambda key: key[0][0] == tenant_id)

    def remove(self, keys: Iterable[BlockKey]) -> None:
        """These blocks are no good."""
        gone = frozenset(keys)
        self.store.remove(gone)
        self._void(gone.__contains__)

    def remove_states(self, names: Iterable[BlockKey]) -> None:
        """The states of these names are no good. Each is found by all of its parts: the first alone is removed."""
        gone = frozenset(names)
        self.store.remove(prefix_keys.part_of_state(name, 0) for name in gone)
        self._void(lambda key: prefix_keys.state_of_part(key) in gone)

    def _void(self, is_gone: Callable[[BlockKey], bool]) -> None:
        with self._changed:
            for key in [key for key in self._wanted if is_gone(key)]:
                for asked in self._forget(key):
                    asked.missing.discard(key)
            for key, write in self._writes.items():
                if is_gone(key):
                    write.is_void, write.payload = True, None
            self._has_news = self._to_sweep = True
            self._changed.notify_all()

    # What others may know.

    @property
    def is_off(self) -> bool:
        """Whether the disk is being left alone, or a read or a write of it takes too long."""
        now = self._clock()
        with self._changed:
            return self._is_resting("read", now) or self._is_resting("write", now)

    @property
    def num_not_asked(self) -> int:
        """Blocks that were not written since too many waited, or the disk was being left alone."""
        return self._full

    def close(self) -> None:
        """Write what waits and remove what was erased, for a few seconds at most, and end the threads. A thread that
        hangs is left to the end of the process."""
        until = time.monotonic() + _DRAIN_S
        with self._changed:
            waits = {*self._to_write}
            for key in [key for key, write in self._writes.items() if write.payload is None]:
                if key not in waits:
                    del self._writes[key]
            while self._threads and (self._writes or self._to_sweep) and time.monotonic() < until:
                self._changed.wait(until - time.monotonic())
            self._closed = True
            self._to_write.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(max(0.1, until - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            self.store.close()

    def _is_resting(self, what: str, now: float) -> bool:
        since = self._reading_since if what == "read" else self._writing_since
        return now < self._rests_until[what] or (since is not None and now - since > _STUCK_S)

    def _rest(self, what: str, now: float, why: str) -> None:
        """Leave the disk alone for a while. Called with the lock held."""
        if now >= self._rests_until[what]:
            told = "--kv-disk: %s; it is left alone for %g s: prefixes are computed, or not kept"
            _log.warning(told, why, REST_S)
        self._rests_until[what], self._failed[what] = now + REST_S, 0

    def _tried(self, what: str, *, did: bool) -> None:
        self._failed[what] = 0 if did else self._failed[what] + 1
        if self._failed[what] >= _MOST_FAILED:
            done = "read" if what == "read" else "written"
            self._rest(what, self._clock(), f"the last {_MOST_FAILED} blocks could not be {done}")

    # The reader's thread.

    def _read(self) -> None:
        while True:
            with self._changed:
                while not (self._closed or self._queue):
                    self._changed.wait()
                if self._closed:
                    return
            self.read_one()

    def read_one(self) -> bool:
        """Read the next block, tenants in turns. Returns False where none is wanted."""
        with self._changed:
            key = self._next_read()
            if key is None:
                return False
            began = self._reading_since = self._clock()
        was_here = key in self.store  # it may have made room for another since it was asked for
        try:
            payload = self.store.read(key)
        except Exception:
            _log.exception("--kv-disk: a block could not be read")
            payload = None
        if payload is not None and len(payload) != self._block_bytes:
            payload = None
        with self._changed:
            self._reading_since, self._moved_at = None, self._clock()
            self._read_s = (1 - _RATE) * self._read_s + _RATE * (self._moved_at - began)
            users = self._wanted.get(key)
            if users is None:
                return True  # nobody waits for it any more, or its owner was erased meanwhile
            if payload is not None or was_here:
                self._tried("read", did=payload is not None)
            if payload is None:
                users = self._forget(key)
                for asked in users:  # no block behind a gap is of use
                    behind = asked.keys[asked.keys.index(key) :]
                    self._drop(asked, behind)
                    asked.missing.difference_update(behind)
            else:
                self._arrived[key] = payload
            for asked in users:
                asked.missing.discard(key)
            news = any(asked.is_held and not asked.missing for asked in users)
            self._has_news = self._has_news or news
        if news:
            self._wake()
        return True

    def _next_read(self) -> BlockKey | None:
        while self._queue:
            tenant_id, keys = self._queue.popitem(last=False)
            key = keys.popleft()
            if keys:
                self._queue[tenant_id] = keys  # last in turn now
            if key in self._wanted and key not in self._arrived:
                return key
        return None

    # The writer's thread.

    def _write(self) -> None:
        while True:
            with self._changed:
                while not (self._closed or self._to_write or self._to_sweep):
                    self._changed.wait()
                if self._closed:
                    return
            self.write_one()

    def write_one(self) -> bool:
        """Remove the files of what was erased, and write the next block. Returns False where none waits."""
        with self._changed:
            to_sweep, self._to_sweep = self._to_sweep, False
            key = self._to_write.popleft() if self._to_write else None
            write = None if key is None else self._writes.get(key)
            payload = None if write is None else write.payload
            self._writing_since = self._clock()
        did = None
        try:
            if to_sweep:
                self.store.sweep()
            if key is not None and payload is not None:
                did = self.store.write(key, payload)
        except Exception:
            _log.exception("--kv-disk: the disk could not be written to")
            did = False
        with self._changed:
            self._writing_since = None
            if did is not None:
                self._tried("write", did=did)
            if key is not None and write is not None:
                self._writes.pop(key, None)
                if did and write.is_void:
                    self.store.remove((key,))  # it was erased while it was being written
                    self._to_sweep = True
            self._changed.notify_all()
        return key is not None
