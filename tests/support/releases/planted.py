"""Versions for the tiny model that end their answers soon or never, and users who are served by them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from threading import Event, Lock
from typing import Any

import httpx
import numpy as np

from support.adapters.drafts import AdapterDraft, draft_adapter
from support.servers.live_server import TINY, LiveServer

_ENDS = 256
"""The token that ends an answer of `write_tiny_model`."""
_DIRECTION = np.array([20.0, -20.0, 20.0, -20.0], np.float32)


def write_brief_adapter(directory: Path, *, strength: float = 1.0) -> Path:
    """An adapter whose answers end after some tokens. With another `strength` it is another one that does the same."""
    draft = _with_logits({_ENDS: -strength * _DIRECTION}, seed=1)
    draft.write(directory)
    return directory


def write_endless_adapter(directory: Path) -> Path:
    """An adapter whose answers never end by themselves: of two letters one is far above all other tokens."""
    draft = _with_logits({ord("a"): _DIRECTION, ord("b"): -_DIRECTION}, seed=2)
    draft.write(directory)
    return directory


def _with_logits(rows: Mapping[int, np.ndarray], seed: int) -> AdapterDraft:
    """An adapter that changes the logits of these tokens alone."""
    draft = draft_adapter(TINY, targets=("lm_head",), seed=seed)
    (b,) = (tensor for name, tensor in draft.tensors.items() if "lora_B" in name)
    b[:] = 0.0
    for token, row in rows.items():
        b[token] = row
    return draft


@dataclass(frozen=True)
class Asked:
    """A request that was answered. `version` is empty where the server named none; `code` is an error's. `at`: when it
    was sent, in seconds since the epoch."""

    user: str
    version: str
    code: str | None
    at: float


@dataclass
class Crowd:
    """Users who each ask once, `at_once` at a time, until `stop`. `asked` is what came of it, `fields` are of
    each request."""

    server: LiveServer
    key: str
    model: str
    at_once: int = 8
    max_tokens: int = 64
    prompt: Callable[[int], str] = "user {} says".format
    fields: Mapping[str, Any] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stop, self._lock, self._numbers = Event(), Lock(), count()
        self._threads = ThreadPoolExecutor(self.at_once)
        self._asking = [self._threads.submit(self._ask_on) for _ in range(self.at_once)]

    def stop(self) -> None:
        """Ask nothing more, and wait for what runs. Raises what a user's request raised."""
        self._stop.set()
        for asking in self._asking:
            asking.result()
        self._threads.shutdown()

    def of(self, version: str) -> list[Asked]:
        """What the version answered, and what failed: an error names no version."""
        return [asked for asked in tuple(self.asked) if asked.version == version or asked.code is not None]

    def _ask_on(self) -> None:
        with self.server.client(self.key) as client:
            while not self._stop.is_set():
                with self._lock:
                    number = next(self._numbers)
                self._ask(client, number)

    def _ask(self, client: httpx.Client, number: int) -> None:
        user = f"user-{number}"
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": self.prompt(number),
            "max_tokens": self.max_tokens,
            "user": user,
            "seed": number,
            **self.fields,
        }
        at = time.time()
        answer = client.post("/v1/completions", json=body)
        code = None if answer.status_code == 200 else answer.json()["error"]["code"]
        self.asked.append(Asked(user, answer.headers.get("x-loraplex-adapter", ""), code, at))
