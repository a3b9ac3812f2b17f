"""Clients that read streams without an end, and count what comes: what runs beside pushes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from types import TracebackType

import httpx

MOST_TOKENS = 256
"""Tokens of one stream. Behind it the next one begins."""


class Streams:
    """`count` clients that stream completions of `models` in turn, one after another, while the context is open."""

    def __init__(self, connect: Callable[[], httpx.Client], models: list[str], count: int) -> None:
        self._connect = connect
        self._models = models
        self._ended = threading.Event()
        self._tokens = [0] * count
        self._failures: list[str] = []
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(count)]

    def __enter__(self) -> Streams:
        for thread in self._threads:
            thread.start()
        while not all(self._tokens) and not self._failures:
            time.sleep(0.05)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()
        if kind is None and self._failures:
            raise RuntimeError(self._failures[0])

    @property
    def tokens(self) -> int:
        """Events with text so far: a token each, except where one character takes several."""
        return sum(self._tokens)

    def _run(self, number: int) -> None:
        try:
            with self._connect() as client:
                first = number
                while not self._ended.is_set():
                    self._read(client, number, self._models[first % len(self._models)])
                    first += 1
        except (httpx.HTTPError, RuntimeError) as error:
            self._failures.append(f"stream {number}: {error!r}")

    def _read(self, client: httpx.Client, number: int, model: str) -> None:
        asked = {"model": model, "prompt": f"Story {number}:", "max_tokens": MOST_TOKENS}
        asked |= {"stream": True, "ignore_eos": True, "temperature": 0}
        with client.stream("POST", "/v1/completions", json=asked) as answer:
            if answer.status_code != 200:
                raise RuntimeError(answer.read().decode())
            for line in answer.iter_lines():
                if self._ended.is_set():
                    return
                if line.startswith("data: {"):
                    if "choices" not in (event := json.loads(line[6:])):
                        raise RuntimeError(line)
                    self._tokens[number] += bool(event["choices"] and event["choices"][0]["text"])


def tokens_per_s(streams: Streams, seconds: float) -> float:
    """The streams' tokens a second from now on."""
    before, began = streams.tokens, time.monotonic()
    time.sleep(seconds)
    return (streams.tokens - before) / (time.monotonic() - began)
