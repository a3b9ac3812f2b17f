"""Grammars of a random history: matchers that take time, come too late or not at all, by a clock that the test owns.

A grammar's text says what becomes of it: "ends 3" ends with the third token, "breaks 3" fails where the fourth would
be drawn, "refused 0" cannot be built.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Literal, cast

from loraplex.engine.types import EngineRequest

TIMEOUT_S = 3.0

Kind = Literal["ends", "breaks", "refused"]


def grammar_of(request: EngineRequest) -> tuple[Kind, int] | None:
    """What becomes of a request's grammar, and after how many tokens."""
    if request.grammar is None:
        return None
    kind, count = request.grammar.split()
    return cast(Kind, kind), int(count)


class FakeGrammars:
    """In place of `GrammarMatchers`. `late` are the requests whose matchers took too long."""

    def __init__(self, clock: Callable[[], float], rng: random.Random) -> None:
        self._clock = clock
        self._rng = rng
        self._due: list[tuple[float, str, str | None]] = []
        self.ready: set[str] = set()
        self.waiting: dict[str, float] = {}  # until when at most
        self.late: set[str] = set()
        self.num_held = 0

    def open(self, request_id: str, tenant_id: str, text: str) -> bool:
        assert request_id not in self.ready | self.waiting.keys(), "a request was opened twice"
        refused = text.startswith("refused")
        if not refused and self._rng.random() < 0.3:
            self.ready.add(request_id)
            return True
        self.num_held += 1
        now, seconds = self._clock(), 10 ** self._rng.uniform(-3, 1)
        self.waiting[request_id] = now + TIMEOUT_S
        if seconds < TIMEOUT_S:
            heapq.heappush(self._due, (now + seconds, request_id, "no such rule" if refused else None))
        return False

    def take_built(self) -> list[tuple[str, str | None]]:
        built = []
        while self._due and self._due[0][0] <= self._clock():
            _, request_id, error = heapq.heappop(self._due)
            if self.waiting.pop(request_id, None) is not None:
                built.append((request_id, error))
        for request_id, until in list(self.waiting.items()):
            if until <= self._clock():
                self.late.add(request_id)
                del self.waiting[request_id]
                built.append((request_id, "too late"))
        self.ready |= {request_id for request_id, error in built if error is None}
        return built

    def resume(self, request_id: str, token_ids: tuple[int, ...]) -> tuple[bool, str | None]:
        assert request_id in self.ready, "a request goes on before its matcher is built"
        return False, None  # it would have ended before

    def next_timeout_s(self) -> float | None:
        return min(self.waiting.values()) - self._clock() if self.waiting else None

    def close_request(self, request_id: str) -> None:
        self.ready.discard(request_id)
        self.waiting.pop(request_id, None)

    @property
    def next_due(self) -> float | None:
        """When the next matcher is built: what the engine cannot know."""
        return self._due[0][0] if self._due else None
