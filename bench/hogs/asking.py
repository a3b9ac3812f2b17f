"""Sends one request as a stream and notes when its answer was complete."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any, Literal

import httpx


@dataclass(frozen=True)
class Asking:
    """How every request is asked."""

    endpoint: Literal["completions", "chat"]
    max_tokens: int

    def body(self, model: str, prompt: str) -> dict[str, Any]:
        said = (
            {"messages": [{"role": "user", "content": prompt}]}
            if self.endpoint == "chat"
            else {"prompt": prompt}
        )
        return said | {
            "model": model,
            "max_tokens": self.max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.endpoint == "chat" else "/v1/completions"


@dataclass(frozen=True)
class Outcome:
    """Seconds from the request to the end of its answer, and the server's own counts of tokens."""

    seconds: float
    prompt_tokens: int
    output_tokens: int


async def ask(client: httpx.AsyncClient, asking: Asking, model: str, prompt: str) -> Outcome:
    """Raises SystemExit where the answer is an error, or ends early."""
    sent = time.perf_counter()
    usage: dict[str, Any] | None = None
    async with client.stream("POST", asking.path, json=asking.body(model, prompt)) as response:
        if response.status_code != 200:
            raise SystemExit(f"a request failed: {(await response.aread()).decode('utf-8', 'replace')}")
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if error := event.get("error"):
                    raise SystemExit(f"a request failed: {error}")
                usage = event.get("usage") or usage
    if usage is None:
        raise SystemExit("a request failed: its stream ended without usage")
    return Outcome(time.perf_counter() - sent, usage["prompt_tokens"], usage["completion_tokens"])
