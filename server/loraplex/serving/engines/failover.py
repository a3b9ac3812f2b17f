"""Requests whose engine was lost, on their way to another one.

One engine alone tells its clients at once, as soon as it is lost; where there are others, or engines dial in, a request
waits for one that takes it. A request goes on once: what ran at two deaths ends with an error, so that one that ends
its engine walks through two of them at most. An answer that has begun goes on where it was, on an engine of the same
numerics; with the promise of same bits its text is that of an undisturbed run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from loraplex.engine.types import EngineError, EngineRequest, TokenEvent
from loraplex.serving.engines.replica import Replica
from loraplex.serving.engines.stream import RequestStream, error_event
from loraplex.serving.errors import EngineOverloaded, EngineUnavailable, ServingError

Choose = Callable[[Sequence[Replica], EngineRequest], Replica]
"""The one of these replicas that serves a request."""

MOST_DEATHS = 1
"""Deaths of engines that a request outlives."""
LOOK_S, MOST_LOOK_S = 0.02, 0.25
"""Time between two looks for an engine, while requests have lost theirs: it doubles while none is found."""
PATIENCE_S = 15.0
"""How long a request waits for an engine after its own was lost, whether its answer had begun or not. An engine that is
there dials again within 5 s, and few clients and proxies cut a stream that is silent for 15 s."""


@dataclass(slots=True, eq=False)
class Group:
    """The sequences of one request, which one engine serves together. `born`: its submission, in seconds of the
    cluster's clock. `deaths`: engines that were lost under it; `avoid`: the last of them. One that dials again is
    another replica, whose engine process may be the same."""

    streams: Sequence[RequestStream]
    requests: Sequence[EngineRequest]
    replica: Replica
    born: float
    deaths: int = 0
    avoid: tuple[Replica, str] | None = None
    numerics: str = ""
    lost_at: float = 0.0
    error: EngineError | None = None
    orphans: list[RequestStream] = field(default_factory=list)

    @property
    def is_started(self) -> bool:
        return any(stream.num_received for stream in self.orphans)

    def lose(self, streams: Sequence[RequestStream], error: EngineError, now: float, by: Replica) -> bool:
        """Note that its engine `by` is gone, or ends, with these streams. Returns whether another one may serve
        them."""
        lost = by, by.session.life
        if lost != self.avoid:  # sequences of one engine may be lost one after the other
            self.deaths += 1
            self.avoid = lost
        if self.deaths > MOST_DEATHS:
            return False
        self.numerics = by.session.info.numerics
        self.lost_at, self.error = now, error
        self.orphans += streams
        return True

    def may_go_to(self, replica: Replica) -> bool:
        """Whether this replica may serve the orphans, whose length it has to take."""
        if replica.state != "ready" or (replica, replica.session.life) == self.avoid:
            return False
        if replica.session.info.max_model_len < most_tokens(self.requests[0]):
            return False
        return not self.is_started or replica.session.info.numerics == self.numerics

    def continued(self, now: float) -> list[EngineRequest]:
        """Requests for what is left of the orphans: the tokens that were delivered count, and so does the time that
        has passed."""
        passed = now - self.born
        originals = {request.request_id: request for request in self.requests}
        return [
            replace(
                original := originals[stream.request.request_id],
                generated=tuple(stream.received),
                deadline=None if original.deadline is None else max(0.0, original.deadline - passed),
            )
            for stream in self.orphans
        ]

    def end(self, error: EngineError) -> None:
        """End the orphans."""
        orphans, self.orphans = self.orphans, []
        for stream in orphans:
            name = stream.request.request_id
            stream.put(error_event(name, error.code, error.message, error.retry_after_s))


class Failover:
    """The groups that have lost their engine. `replicas`: those of the cluster, by name, as they come and go.
    `engines_dial`: others may come at any time. For one event loop's thread."""

    def __init__(
        self,
        replicas: Mapping[str, Replica],
        choose: Choose,
        clock: Callable[[], float],
        *,
        engines_dial: bool,
    ) -> None:
        self._replicas = replicas
        self._choose = choose
        self._clock = clock
        self._engines_dial = engines_dial
        self._waiting: dict[Group, None] = {}
        self._looking: asyncio.Handle | None = None
        self._look_s = LOOK_S
        self._full: set[str] = set()  # tenants that an engine had no room for in this look
        self.num_failed_over = 0
        """Sequences that went on with another engine."""
        self.num_continued = 0
        """Those of them whose answer had begun."""

    @property
    def num_waiting(self) -> int:
        """Sequences without an engine."""
        return sum(len(group.orphans) for group in self._waiting)

    def take(
        self, by: Replica, lost: Mapping[Group, Sequence[RequestStream]], error: EngineError
    ) -> Collection[RequestStream]:
        """Take the streams that a replica has lost, by group. `error`: what they end with where none serves them.
        Returns those that may go on."""
        taken: list[RequestStream] = []
        for group, streams in lost.items():
            if not group.lose(streams, error, self._clock(), by):
                continue
            taken += streams
            for stream in streams:
                stream.hand_to(partial(_abort, group))
            self._waiting[group] = None
        if taken:
            self.look()
        return taken

    def look(self) -> None:
        """Look for engines, as soon as the event loop comes to it: one that fails has not told yet that it is gone."""
        if self._looking is not None:
            self._looking.cancel()
        self._look_s = LOOK_S
        self._looking = asyncio.get_running_loop().call_soon(self._go_round) if self._waiting else None

    def end(self, error: EngineError) -> None:
        """End all that wait."""
        for group in self._waiting:
            group.end(error)

    def _go_round(self) -> None:
        before, self._waiting = self._waiting, {}
        self._full.clear()
        for group in before:
            try:
                if group.orphans and not self._go_on(group):
                    self._waiting[group] = None
            except Exception as error:  # a fault of ours: nobody else would ever end these streams
                group.end(EngineError("internal_error", f"{type(error).__name__}: {error}"))
                told = {"message": "a request could not be given to another engine", "exception": error}
                asyncio.get_running_loop().call_exception_handler(told)
        self._look_s = LOOK_S if len(self._waiting) < len(before) else min(2 * self._look_s, MOST_LOOK_S)
        again = asyncio.get_running_loop().call_later(self._look_s, self._go_round) if self._waiting else None
        self._looking = again

    def _go_on(self, group: Group) -> bool:
        """Have a replica serve the orphans, or end them where none will; whether either is done."""
        now = self._clock()
        among = [replica for replica in self._replicas.values() if group.may_go_to(replica)]
        tenant_id = group.requests[0].tenant_id
        if among and tenant_id not in self._full:
            requests = group.continued(now)
            replica = self._choose(among, requests[0])
            try:
                replica.session.adopt(tuple(group.orphans), requests)
            except EngineOverloaded:
                self._full.add(tenant_id)  # its other requests would find no room either
            except EngineUnavailable:
                pass  # it has just gone
            except ServingError as error:
                group.end(EngineError("internal_error", str(error)))
                return True
            else:
                group.replica = replica
                self.num_failed_over += len(group.orphans)
                self.num_continued += sum(stream.num_received > 0 for stream in group.orphans)
                group.orphans.clear()
                return True
        others = [replica for replica in self._replicas.values() if replica is not group.replica]
        is_coming = self._engines_dial or any(replica.session.is_coming_back for replica in others)
        if (among or is_coming) and now - group.lost_at < PATIENCE_S:
            return False
        assert group.error is not None
        group.end(group.error)
        return True


def most_tokens(request: EngineRequest) -> int:
    """Tokens of a request's prompt, and those that it may generate."""
    return len(request.prompt_ids) + request.sampling.max_tokens


def _abort(group: Group, name: str) -> None:
    for stream in group.orphans:
        if stream.request.request_id == name:
            group.orphans.remove(stream)
            stream.put(TokenEvent(name, finish_reason="abort"))
            return
