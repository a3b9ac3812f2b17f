"""One question to several engines, of which a slow one is not waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

SLOW_S = 1.0
"""Time after the first answer in which the others have to come: half of what a scrape may take."""


async def answers(asked: Mapping[str, Coroutine[Any, Any, T]]) -> dict[str, T]:
    """The answers to at least one question, by name, without those that fail or come too late. Raises what the first
    one raises where all fail."""
    tasks = {name: asyncio.create_task(question) for name, question in asked.items()}
    try:
        pending = set(tasks.values())
        while pending and not any(map(_has_answered, tasks.values())):
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        if pending:
            await asyncio.wait(pending, timeout=SLOW_S)
        found = {name: task.result() for name, task in tasks.items() if _has_answered(task)}
        return found or {name: task.result() for name, task in tasks.items()}
    finally:
        for task in tasks.values():
            task.cancel()


def _has_answered(task: asyncio.Task[T]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None
