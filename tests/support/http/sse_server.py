"""A data plane that answers from a script: what a load generator or a chat has to do with, without an engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

KEY = "lpx_test_key"


@dataclass
class Answer:
    """What one request gets. `first_s` and `gap_s` are waits before the first piece and between pieces; `status`
    other than 200 is a refusal with `code`; `error_after` breaks the stream with an error event after this
    number of pieces, `cut_after` without a word. `together`: no first piece comes before that many have run at once."""

    pieces: tuple[str, ...] = ("one", " two", " three", " four")
    tokens: int | None = None
    first_s: float = 0.0
    gap_s: float = 0.0
    together: int = 0
    status: int = 200
    code: str | None = "server_overloaded"
    error_after: int | None = None
    cut_after: int | None = None


@dataclass
class FakeDataPlane:
    """`bodies` are all requests in the order in which they came; `busiest` the most that ran at once; `answer`
    may be changed between requests, or be a function of the request's body."""

    models: tuple[str, ...] = ("base-model",)
    adapters: tuple[str, ...] = ("a", "b", "c")
    answer: Answer | Callable[[dict[str, Any]], Answer] = field(default_factory=Answer)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    running: int = 0
    busiest: int = 0

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/models", self._models, methods=["GET"]),
                Route("/v1/completions", self._ask, methods=["POST"]),
                Route("/v1/chat/completions", self._ask, methods=["POST"]),
            ]
        )

    async def _models(self, request: Request) -> Response:
        if denied := _denied(request):
            return denied
        cards = [{"id": name, "object": "model", "parent": None} for name in self.models]
        cards += [{"id": name, "object": "model", "parent": self.models[0]} for name in self.adapters]
        return JSONResponse({"object": "list", "data": cards})

    async def _ask(self, request: Request) -> Response:
        if denied := _denied(request):
            return denied
        body = await request.json()
        self.bodies.append(body)
        answer = self.answer(body) if callable(self.answer) else self.answer
        if answer.status != 200:
            return _error(answer.status, answer.code, "the server is full")
        chat = request.url.path.endswith("chat/completions")
        if not body.get("stream"):
            return JSONResponse(
                {"choices": [{"message": {"role": "assistant", "content": "".join(answer.pieces)}}]}
            )
        return StreamingResponse(self._stream(answer, body, chat), media_type="text/event-stream")

    async def _stream(self, answer: Answer, body: dict[str, Any], chat: bool) -> AsyncIterator[str]:
        self.running += 1
        self.busiest = max(self.busiest, self.running)
        try:
            await asyncio.sleep(answer.first_s)
            while self.busiest < answer.together:
                await asyncio.sleep(0.005)
            if chat:
                yield _event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
            for number, piece in enumerate(answer.pieces):
                if number == answer.cut_after:
                    return
                if number == answer.error_after:
                    yield _event({"error": {"message": "it broke", "code": "engine_restarting"}})
                    break
                if number:
                    await asyncio.sleep(answer.gap_s)
                yield _event({"choices": [{"delta": {"content": piece}} if chat else {"text": piece}]})
            else:
                usage = {"prompt_tokens": 7, "completion_tokens": answer.tokens or len(answer.pieces)}
                yield _event({"choices": [], "usage": usage})
            yield "data: [DONE]\n\n"
        finally:
            self.running -= 1


def _denied(request: Request) -> Response | None:
    if request.headers.get("authorization") == f"Bearer {KEY}":
        return None
    return _error(401, "invalid_api_key", "This key is not valid.")


def _error(status: int, code: str | None, message: str) -> Response:
    error = {"message": message, "type": "server_error", "param": None, "code": code}
    return JSONResponse({"error": error}, status)


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"
