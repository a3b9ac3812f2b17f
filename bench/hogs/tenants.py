"""The tenants on the wire: one that sends a mix from a process of its own, and one with a short chat after another."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from typing import Any

import httpx

from bench.hogs.mixes import SENTENCE, Mix


@dataclass(frozen=True)
class Target:
    """A server's data port, and the name of its base."""

    url: str
    base: str
    keys: tuple[str, ...]
    """The chat's, then one of each tenant that sends a mix."""


@dataclass
class Seen:
    """Seconds that the chat waited: for each first token, and longest between two tokens of each answer."""

    waits: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def add(self, other: Seen) -> None:
        self.waits += other.waits
        self.gaps += other.gaps


def client(url: str, key: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    headers = {"authorization": f"Bearer {key}"}
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=600, limits=limits)


# The sender of a mix.


@contextmanager
def beside(target: Target, mix: Mix, settle_s: float) -> Iterator[Callable[[], int]]:
    """`mix` is sent meanwhile, and since `settle_s` before. The function tells how many of its requests have ended.
    Another process sends it, so that the chat's times do not hold what a client does for the mix."""
    context = multiprocessing.get_context("spawn")
    ended, begun = context.Value("q"), context.Event()
    begin = time.perf_counter_ns() // 1000 % 10**9
    sender = context.Process(target=_send, args=(target, mix, begin, ended, begun), daemon=True)
    sender.start()
    try:
        begun.wait(60)
        time.sleep(settle_s)
        yield lambda: int(ended.value)
        if sender.exitcode is not None:
            raise SystemExit(f"the sender of {mix.title} ended with {sender.exitcode}")
    finally:
        sender.kill()
        sender.join()


def _send(target: Target, mix: Mix, begin: int, ended: Synchronized[int], begun: Event) -> None:
    begun.set()
    asyncio.run(_send_all(target, mix, begin, ended))


async def _send_all(target: Target, mix: Mix, begin: int, ended: Synchronized[int]) -> None:
    turns = count(begin)
    async with asyncio.TaskGroup() as group:
        for key in target.keys[1 : 1 + mix.tenants]:
            http = client(target.url, key)
            for _ in range(mix.streams):
                group.create_task(_repeat(http, target.base, mix, turns, ended))


async def _repeat(
    http: httpx.AsyncClient, base: str, mix: Mix, turns: count[int], ended: Synchronized[int]
) -> None:
    """One request after another. What comes is not looked at, to leave the processor to the server."""
    while True:
        body = mix.asked(base, turns)
        try:
            async with asyncio.timeout(mix.hang_up_s), http.stream("POST", mix.path, json=body) as response:
                if response.status_code == 503:  # the queue has no room for all of them now
                    await asyncio.sleep(0.1)
                elif response.status_code != 200:
                    raise SystemExit(f"{mix.title}: {response.status_code} {await response.aread()!r}")
                async for _ in response.aiter_raw():
                    pass
            ended.value += 1
        except TimeoutError:
            continue


# The chat.


def chat(
    target: Target, requests: int, turns: count[int], *, tokens: int, limit_s: float, **fields: Any
) -> Seen:
    """What `requests` chats waited, as many of them as begin within `limit_s`; of one without a token in as long again,
    what it waited so far. `fields` are added to each body."""
    return asyncio.run(_chat(target, requests, turns, tokens, limit_s, fields))


async def _chat(
    target: Target, requests: int, turns: count[int], tokens: int, limit_s: float, fields: dict[str, Any]
) -> Seen:
    seen = Seen()
    async with client(target.url, target.keys[0]) as http:
        end = time.perf_counter() + limit_s
        for number in range(requests):
            body = {
                "model": target.base,
                "messages": [{"role": "user", "content": f"{next(turns)}. {SENTENCE * 3}"}],
                "max_tokens": tokens,
                "temperature": 0.0,
                "ignore_eos": True,
                "stream": True,
                **fields,
            }
            now = time.perf_counter()
            if now > end:
                break
            try:
                await asyncio.wait_for(_ask(http, body, seen), limit_s)
            except TimeoutError:
                if len(seen.waits) == number:
                    seen.waits.append(time.perf_counter() - now)
                break
    return seen


async def _ask(http: httpx.AsyncClient, body: dict[str, Any], seen: Seen) -> None:
    """Send it, note the seconds until its first token and between two of them, and read it to its end."""
    last, first = time.perf_counter(), True
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise SystemExit(f"the chat was refused: {response.status_code} {await response.aread()!r}")
        async for data in _data(response):
            if '"error"' in data:
                raise SystemExit(f"the chat failed: {data}")
            if '"content":"' not in data.replace('"content":""', ""):
                continue
            now = time.perf_counter()
            if first:
                seen.waits.append(now - last)
                seen.gaps.append(0.0)
                first = False
            else:
                seen.gaps[-1] = max(seen.gaps[-1], now - last)
            last = now


async def _data(response: httpx.Response) -> AsyncIterator[str]:
    """The data of each event."""
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")
