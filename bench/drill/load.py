"""Streams that run while something is killed, and what became of each."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from loraplex.serving.client.engine_client import RequestStream
from loraplex.serving.cluster.client import ClusterEngineClient
from loraplex.serving.errors import ServingError
from support.engine.fake_core import fake_tokens
from support.engine.fake_processes import ask

RETRY_S = 0.1


@dataclass
class Load:
    """`ended`: whole answers, equal to an undisturbed engine's. `lost`: answers that broke, or whose tokens are
    wrong. `refused`: requests that no engine took, and that are asked again. `gap_s`: longest time between two
    tokens of a stream."""

    ended: int = 0
    lost: int = 0
    refused: int = 0
    gap_s: float = 0.0
    reasons: list[str] = field(default_factory=list)
    _stop: bool = False
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def stop(self) -> None:
        """Begin nothing new."""
        self._stop = True

    async def run(self, client: ClusterEngineClient, tokens: int) -> None:
        """Ask one request after the other until `stop`."""
        while not self._stop:
            number = next(self._numbers)
            request = ask(f"{id(self)}-{number}", tokens, (1 + number % 600, number % 997))
            try:
                (stream,) = client.submit(request)
            except ServingError:
                self.refused += 1
                await asyncio.sleep(RETRY_S)
                continue
            got = await self._read(stream)
            if got == fake_tokens(request):
                self.ended += 1
            else:
                self.lost += 1

    async def _read(self, stream: RequestStream) -> tuple[int, ...]:
        tokens: list[int] = []
        last: float | None = None
        async for event in stream:
            now = time.monotonic()
            if last is not None:
                self.gap_s = max(self.gap_s, now - last)
            last = now
            tokens += event.token_ids
            if event.error is not None:
                self.reasons.append(f"{event.error.code}: {event.error.message}")
        return tuple(tokens)


@contextlib.asynccontextmanager
async def under_load(client: ClusterEngineClient, streams: int, tokens: int = 100) -> AsyncIterator[Load]:
    """This number of streams at a time; at the end of the context all that run are read to their end."""
    load = Load()
    running = [asyncio.create_task(load.run(client, tokens)) for _ in range(streams)]
    try:
        yield load
    finally:
        load.stop()
        await asyncio.gather(*running)
