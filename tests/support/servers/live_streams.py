"""Clients that read long streams of a live server while a test does something to it."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx

from support.servers.live_server import SERVED_NAME, LiveServer, sse_events


@dataclass
class Story:
    """What one client saw: an HTTP status, its events (the last few), and when and how its answer ended."""

    status: int = 0
    headers: httpx.Headers = field(default_factory=httpx.Headers)
    events: list[Any] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    num_chunks: int = 0
    ended_at: float = 0.0
    broken: str | None = None

    @property
    def finished(self) -> bool:
        """It came to a proper end."""
        return self.events[-1:] == ["[DONE]"] and self.finish_reason is not None

    @property
    def error(self) -> dict[str, Any]:
        """The error event of a stream that ended in one; fails on any other end."""
        assert self.status == 200, self
        assert self.broken is None, self.broken
        assert self.events[-1] == "[DONE]", self.events[-3:]
        assert "error" in self.events[-2], self.events[-3:]
        return dict(self.events[-2]["error"])


class Streams:
    """Clients that read one long stream each, `models[i]`'s, in threads of their own."""

    def __init__(self, server: LiveServer, key: str, models: Sequence[str], *, max_tokens: int) -> None:
        self.stories = [Story() for _ in models]
        self._server, self._key, self._max_tokens = server, key, max_tokens
        self._pool = ThreadPoolExecutor(len(models))
        self._enough = threading.Event()
        self._futures = [
            self._pool.submit(self._read, story, model)
            for story, model in zip(self.stories, models, strict=True)
        ]

    def _read(self, story: Story, model: str) -> None:
        body = {"model": model, "prompt": "one", "max_tokens": self._max_tokens, "stream": True}
        body |= {"ignore_eos": True, "temperature": 0}
        try:
            with (
                self._server.client(self._key) as client,
                client.stream("POST", "/v1/completions", json=body) as answer,
            ):
                story.status, story.headers = answer.status_code, answer.headers
                for event in sse_events(answer.iter_lines()):
                    story.events = [*story.events[-3:], event]
                    story.num_chunks += 1
                    if isinstance(event, dict) and event.get("choices"):
                        story.text += event["choices"][0]["text"]
                        story.finish_reason = event["choices"][0]["finish_reason"] or story.finish_reason
                    if self._enough.is_set():
                        break
        except httpx.HTTPError as error:
            story.broken = repr(error)
        story.ended_at = time.monotonic()

    def wait_until_all_run(self) -> None:
        self._server.wait(lambda: all(story.num_chunks >= 3 for story in self.stories), timeout=120)

    @property
    def all_run_on(self) -> bool:
        return not any(story.ended_at for story in self.stories)

    def hang_up(self) -> None:
        self._enough.set()
        self.join()

    def join(self, timeout: float = 60) -> list[Story]:
        for future in self._futures:
            future.result(timeout)
        self._pool.shutdown()
        return self.stories


class Neighbour:
    """A stream of the base without an end, and when each of its events came."""

    def __init__(self, server: LiveServer, key: str) -> None:
        self._server = server
        self._key = key
        self._enough = threading.Event()
        self.times: list[float] = []
        self._thread = threading.Thread(target=self._read)

    def _read(self) -> None:
        body = {
            "model": SERVED_NAME,
            "prompt": "The sea",
            "max_tokens": 1500,
            "stream": True,
            "ignore_eos": True,
        }
        with self._server.client(self._key) as client:
            while not self._enough.is_set():
                with client.stream("POST", "/v1/completions", json=body) as answer:
                    assert answer.status_code == 200
                    for event in sse_events(answer.iter_lines()):
                        assert isinstance(event, str) or "error" not in event
                        self.times.append(time.monotonic())
                        if self._enough.is_set():
                            return

    def __enter__(self) -> Neighbour:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        self._thread.join(60)

    def gaps(self, since: float, until: float) -> list[float]:
        times = [at for at in self.times if since <= at <= until]
        return [later - at for at, later in itertools.pairwise(times)]


def print_gaps(what: str, gaps: list[float]) -> None:
    ordered = sorted(gaps)
    print(
        f"{what}: {len(gaps)} events, gaps p50 {1e3 * statistics.median(ordered):.0f} ms, "
        f"p99 {1e3 * ordered[int(0.99 * len(ordered))]:.0f} ms, max {1e3 * ordered[-1]:.0f} ms"
    )
