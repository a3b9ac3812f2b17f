"""One server's standing with the Redis of the limits: its calls, and what their answers show about Redis itself."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import msgspec

from loraplex.control.limits.redis_link import LinkDown, RedisLink
from loraplex.control.limits.redis_messages import Caller, Reply

STEP_US = 1e6
"""Microseconds that Redis' clock may be set forward unnoticed, as in the script."""


class RedisSession:
    """`number`: of its joining, which the script has to know. `decisions`: the most that Redis counted; one that counts
    fewer has lost data. `born`: the name of that data, empty before the first joining. `is_doubtful`: Redis' clock was
    set forward, and what expires by it may be gone. `replicas`: servers that live, as last heard. `clock` is monotonic
    seconds."""

    def __init__(self, link: RedisLink, clock: Callable[[], float]) -> None:
        self.replica = uuid.uuid4().hex
        self.number = 0
        self.decisions = 0
        self.born = ""
        self.is_doubtful = False
        self.replicas = 1
        self._link = link
        self._clock = clock
        self._offset_us: float | None = None

    def caller(self) -> Caller:
        """The session at this moment, for the next call."""
        clock = -1.0
        if self._offset_us is not None and not self.is_doubtful:
            clock = self._clock() * 1e6 + self._offset_us
        return Caller(self.replica, str(self.number), clock, self.decisions)

    async def call(self, operation: str, given: msgspec.Struct, timeout_s: float) -> Reply:
        """Raises LinkDown, too, where Redis did nothing since it does not know this server, or the time."""
        sent = self._clock()
        raw = await self._link.call(operation, msgspec.msgpack.encode(given), timeout_s)
        reply = msgspec.msgpack.decode(raw, type=Reply)
        self._compare_clocks(reply.now, sent)
        if reply.status == "late":
            raise LinkDown("Redis was late, or its clock was set forward")
        if reply.status == "unknown":
            raise LinkDown("Redis has forgotten this server, or decisions")
        self.decisions = max(self.decisions, reply.decisions)
        return reply

    def _compare_clocks(self, now_us: float, sent: float) -> None:
        """Redis read its clock between the call and its answer."""
        least, most = now_us - self._clock() * 1e6, now_us - sent * 1e6
        if self._offset_us is None:
            self._offset_us = most
        if least > self._offset_us + STEP_US:
            self.is_doubtful = True
        self._offset_us = min(max(self._offset_us, least), most)
