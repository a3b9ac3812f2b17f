"""The events of a request, on their way from the engine to the one who asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Self

import msgspec

from loraplex.engine.event_buffer import EventBuffer
from loraplex.engine.logprobs import Logprobs, Scores
from loraplex.engine.types import EngineError, EngineRequest, ErrorCode, TokenEvent


class RequestStream:
    """The events of one request, for one reader: `async for event in stream`.

    Ends after the terminal event (the one with `finish_reason`). There is exactly one, whatever happens
    to the engine. While the reader is slow, token events are merged into one, so that the buffer holds
    at most the request's `max_tokens` ids, and the log probabilities that it asked for. A cancelled read loses
    nothing. As a context manager it aborts the request on the way out if it has not ended.
    """

    def __init__(self, request: EngineRequest, on_abort: Callable[[str], None]) -> None:
        self.request = request
        self._on_abort = on_abort
        self._unread = EventBuffer()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiter: asyncio.Future[None] | None = None  # of the reader, while there is nothing to read
        self._closed = False  # the terminal event has been put
        self._ended = False  # the terminal event has been read
        self._aborted = False
        self.on_end: Callable[[RequestStream, TokenEvent], None] | None = None
        """Called when the terminal event has been put."""
        self._received: list[int] = []
        self._num_prompt_scores = 0
        self._num_repeated = 0  # prompt scores to come that an earlier engine has sent already

    # The reader's side.

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenEvent:
        if self._ended:
            raise StopAsyncIteration
        while not self._unread:
            if self._loop is None:
                self._loop = (
                    asyncio.get_running_loop()
                )  # not for each token: it asks the system for the process' id
            self._waiter = self._loop.create_future()
            await self._waiter
        event = self._unread.take()
        self._ended = event.finish_reason is not None
        return event

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.abort()

    def abort(self) -> None:
        """Ask the engine to end this request; it then ends with its terminal event like any other. Does
        nothing when it has ended or was aborted before."""
        if self._closed or self._aborted:
            return
        self._aborted = True
        self._on_abort(self.request.request_id)

    @property
    def finished(self) -> bool:
        """The terminal event has arrived, though perhaps it has not been read."""
        return self._closed

    @property
    def aborted(self) -> bool:
        """The reader's side has asked for the end."""
        return self._aborted

    @property
    def num_received(self) -> int:
        """Tokens that the engine has sent, read or not."""
        return len(self._received)

    # The client's side.

    @property
    def received(self) -> Sequence[int]:
        """The tokens that the engine has sent, read or not."""
        return self._received

    def hand_to(self, on_abort: Callable[[str], None], request: EngineRequest | None = None) -> None:
        """Have another engine serve it from here on, by `request` where that is another. What the next one tells of the
        prompt for the second time is left out."""
        self._on_abort = on_abort
        self.request = self.request if request is None else request
        self._num_repeated = 0 if self._received else self._num_prompt_scores

    def put(self, event: TokenEvent) -> None:
        """Called by the client on the event loop's thread. What follows a terminal event is ignored."""
        if self._closed:
            return
        self._received += event.token_ids
        if event.scores is not None and event.scores.prompt is not None:
            event = self._without_repeated(event, event.scores.prompt)
        self._closed = event.finish_reason is not None
        self._unread.add(event)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if self._closed and self.on_end is not None:
            self.on_end(self, event)

    def _without_repeated(self, event: TokenEvent, prompt: Logprobs) -> TokenEvent:
        repeated = min(self._num_repeated, len(prompt))
        self._num_repeated -= repeated
        self._num_prompt_scores += len(prompt) - repeated
        if not repeated:
            return event
        assert event.scores is not None
        rest = prompt.part(repeated, len(prompt)) if repeated < len(prompt) else None
        scores = Scores(event.scores.output, rest)
        return msgspec.structs.replace(event, scores=scores if scores.num_values else None)


def error_event(
    request_id: str, code: ErrorCode, message: str, retry_after_s: float | None = None
) -> TokenEvent:
    """The terminal event of a request that failed."""
    return TokenEvent(request_id, finish_reason="error", error=EngineError(code, message, retry_after_s))
