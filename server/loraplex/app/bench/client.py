"""Sends one request as a stream and notes when each piece of the answer came."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx
import msgspec

from loraplex.app.bench.workload import BenchRequest
from loraplex.app.sse import EventTooLarge, SseParser

Endpoint = Literal["completions", "chat"]


@dataclass(frozen=True, slots=True)
class Asking:
    """How every request is asked."""

    endpoint: Endpoint = "completions"
    max_tokens: int = 64
    ignore_eos: bool = True
    temperature: float = 0.0

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.endpoint == "chat" else "/v1/completions"

    def body(self, request: BenchRequest) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": request.model,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "ignore_eos": self.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.endpoint == "chat":
            return body | {"messages": [{"role": "user", "content": request.prompt}]}
        return body | {"prompt": request.prompt}


@dataclass(slots=True)
class Outcome:
    """The outcome of one request; all times in seconds of one monotonic clock.

    `due` is when it should have been sent (a closed loop: when it was), `sent` when it was, `arrivals` when each
    piece of text came, `done` when the answer was complete. `error` is None for success, else the server's code,
    `http_<status>`, or what went wrong on the way. Token counts are the server's own."""

    model: str
    due: float
    sent: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    done: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None
    error_message: str = ""


async def ask(
    client: httpx.AsyncClient,
    asking: Asking,
    request: BenchRequest,
    due: float,
    clock: Callable[[], float] = time.perf_counter,
) -> Outcome:
    """Never raises for what the server or the network does."""
    outcome = Outcome(request.model, due)
    content = msgspec.json.encode(asking.body(request))
    headers = {"content-type": "application/json", "accept": "text/event-stream"}
    outcome.sent = clock()
    try:
        async with client.stream("POST", asking.path, content=content, headers=headers) as response:
            if response.status_code != 200:
                _note_refusal(outcome, response.status_code, await response.aread())
            else:
                await _read_stream(outcome, response, clock)
    except httpx.TimeoutException:
        outcome.error = "timeout"
    except httpx.ConnectError as error:
        outcome.error, outcome.error_message = "connection_failed", str(error)
    except httpx.HTTPError as error:
        outcome.error, outcome.error_message = "connection_broken", str(error)
    except (msgspec.DecodeError, EventTooLarge) as error:
        outcome.error, outcome.error_message = "bad_answer", str(error)
    outcome.done = clock()
    return outcome


async def _read_stream(outcome: Outcome, response: httpx.Response, clock: Callable[[], float]) -> None:
    parser = SseParser()
    finished = False
    async for chunk in response.aiter_raw():
        now = clock()
        for data in parser.feed(chunk):
            if data == "[DONE]":
                finished = True
                continue
            event = msgspec.json.decode(data)
            if error := event.get("error"):
                outcome.error = error.get("code") or "stream_error"
                outcome.error_message = str(error.get("message", ""))
                return
            if usage := event.get("usage"):
                outcome.prompt_tokens = usage.get("prompt_tokens", 0)
                outcome.output_tokens = usage.get("completion_tokens", 0)
                outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            if any(_carries_text(choice) for choice in event.get("choices", ())):
                outcome.arrivals.append(now)
    if not finished:
        outcome.error, outcome.error_message = "stream_cut", "the stream ended without [DONE]"
    elif not outcome.arrivals:
        # Tokens may have no text (a special token alone); the first sign of them is then the end.
        outcome.arrivals.append(clock())


def _carries_text(choice: dict[str, Any]) -> bool:
    return bool(choice.get("text") or (choice.get("delta") or {}).get("content"))


def _note_refusal(outcome: Outcome, status: int, body: bytes) -> None:
    outcome.error = f"http_{status}"
    try:
        error = msgspec.json.decode(body)["error"]
        outcome.error = error["code"] or outcome.error
        outcome.error_message = error["message"]
    except (msgspec.DecodeError, KeyError, TypeError):
        outcome.error_message = body[:200].decode("utf-8", "replace")
