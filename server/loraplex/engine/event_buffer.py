"""Events of one request on their way to a reader that may be slower than the steps."""

from __future__ import annotations

import msgspec

from loraplex.engine.logprobs import Scores, join_scores
from loraplex.engine.types import TokenEvent


class EventBuffer:
    """Merges the events that nobody has taken into one: it holds at most the request's `max_tokens` ids, and the log
    probabilities that it asked for."""

    __slots__ = ("_last", "_scores", "_token_ids")

    def __init__(self) -> None:
        self._last: TokenEvent | None = None
        # Of all events, once there are two. Nearly always the reader takes each event before the next one comes.
        self._token_ids: list[int] | None = None
        self._scores: list[Scores] = []

    def __bool__(self) -> bool:
        return self._last is not None

    @property
    def num_tokens(self) -> int:
        if self._last is None:
            return 0
        return len(self._last.token_ids if self._token_ids is None else self._token_ids)

    def add(self, event: TokenEvent) -> None:
        before, self._last = self._last, event
        if before is None:
            return
        if self._token_ids is None:
            self._token_ids = list(before.token_ids)
            self._scores = [] if before.scores is None else [before.scores]
        self._token_ids += event.token_ids
        if event.scores is not None:
            self._scores.append(event.scores)
        if event.adapter_state is None and before.adapter_state is not None:
            self._last = msgspec.structs.replace(event, adapter_state=before.adapter_state)

    def take(self) -> TokenEvent:
        """Everything added since the last call; something must have been."""
        event, token_ids = self._last, self._token_ids
        assert event is not None, "nothing was added"
        self._last = None
        if token_ids is None:
            return event
        self._token_ids, scores = None, join_scores(self._scores)
        return msgspec.structs.replace(event, token_ids=tuple(token_ids), scores=scores)
