"""Engine processes around the fake core, and what tests of their supervision ask of them."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable
from pathlib import Path

import psutil

from loraplex.adapters.ref import AdapterRef
from loraplex.engine.types import EngineRequest, SamplingParams

FAKE_ENGINE = (sys.executable, str(Path(__file__).with_name("fake_core.py")))
LONG = 1_000_000


def adapter(number: int) -> AdapterRef:
    return AdapterRef("acme", f"a{number}", 1, f"{number:064x}", 8)


def ask(name: str, max_tokens: int = 5, prompt: tuple[int, ...] = (1,), number: int = 0) -> EngineRequest:
    ref = adapter(number) if number else None
    return EngineRequest(name, "acme", prompt, SamplingParams(max_tokens), ref)


def engines() -> list[psutil.Process]:
    """Engine processes of this one that have not been reaped, spares included."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() == psutil.STATUS_ZOMBIE or FAKE_ENGINE[1] in child.cmdline():
                found.append(child)
    return found


async def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)
