"""Calls of an engine: commands with an answer, each waiting for its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar, cast

from loraplex.engine.ipc import protocol as wire
from loraplex.serving.errors import EngineUnavailable, ServingError

CALL_TIMEOUT_S = 10.0

AnswerT = TypeVar("AnswerT", bound=wire.CallAnswer)


class Calls:
    """The calls of one caller that wait for their answers. `send` passes a command on; `step` is between the numbers of
    two calls."""

    def __init__(self, send: Callable[[wire.Command], None], step: int = 1) -> None:
        self._send = send
        self._step = step
        self._waiting: dict[int, asyncio.Future[wire.CallAnswer]] = {}
        self._shared: dict[type, asyncio.Future[wire.CallAnswer]] = {}
        self._last = 0  # its number

    def tell(self, make: Callable[[int], wire.Call[AnswerT]]) -> int:
        """Send a call whose answer nobody waits for; its number."""
        self._last += self._step
        self._send(cast(wire.Command, make(self._last)))  # a test holds that every call is in the table
        return self._last

    async def ask(self, make: Callable[[int], wire.Call[AnswerT]]) -> AnswerT:
        """Raises ServingError where the engine refuses, EngineUnavailable where it does not answer."""
        return cast(AnswerT, await self._answer(self._begin(make)))

    async def share(self, question: type[wire.Call[AnswerT]]) -> AnswerT:
        """A call without arguments, one at a time: a caller that arrives meanwhile shares its answer. Raises as
        `ask`."""
        future = self._shared.get(question)
        if future is None:
            future = self._shared[question] = self._begin(question)
            future.add_done_callback(lambda _: self._shared.pop(question, None))
        return cast(AnswerT, await self._answer(future))

    def take(self, answer: wire.CallAnswer) -> None:
        """The engine's answer to one of them."""
        future = self._waiting.get(answer.call)
        if future is not None and not future.done():
            future.set_result(answer)

    def fail(self, message: str) -> None:
        """End all of them: the engine is gone."""
        for future in list(self._waiting.values()):
            if not future.done():
                future.set_exception(EngineUnavailable(message))
                future.exception()  # the waiter may have been cancelled: then there is no error to report

    def _begin(self, make: Callable[[int], wire.Call[AnswerT]]) -> asyncio.Future[wire.CallAnswer]:
        call = self.tell(make)
        future: asyncio.Future[wire.CallAnswer] = asyncio.get_running_loop().create_future()
        self._waiting[call] = future
        future.add_done_callback(lambda _: self._waiting.pop(call, None))
        return future

    @staticmethod
    async def _answer(future: asyncio.Future[wire.CallAnswer]) -> wire.CallAnswer:
        await asyncio.wait([future], timeout=CALL_TIMEOUT_S)  # does not cancel it: others may share it
        if not future.done():
            future.set_exception(EngineUnavailable(f"the engine did not answer within {CALL_TIMEOUT_S:g} s"))
        answer = future.result()
        if isinstance(answer, wire.Done) and answer.error is not None:
            raise ServingError(answer.error)
        return answer
