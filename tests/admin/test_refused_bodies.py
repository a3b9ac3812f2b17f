"""The bodies of refused requests: whose are read on, and how many at a time."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from starlette.types import Message, Receive, Scope, Send

from loraplex.admin.framework.boundary import LEFTOVER_STRANGERS, ProblemBoundary
from loraplex.admin.problem import Problem
from loraplex.control.types import Principal
from loraplex.http.context import context_of

ADMIN = Principal(None, "admin", frozenset())


class Refused:
    """Requests to a boundary whose application refuses them. Their bodies are announced and do not come."""

    def __init__(self) -> None:
        self.boundary = ProblemBoundary(self._refuse)
        self.awaited = 0
        self.answers = 0

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        context_of(scope).principal = scope["caller"]
        raise Problem("not_found", "There is nothing here.")

    async def send(self, caller: Principal | None) -> None:
        async def receive() -> Message:
            self.awaited += 1
            return await cast("asyncio.Future[Message]", asyncio.get_running_loop().create_future())

        async def answer(message: Message) -> None:
            self.answers += message["type"] == "http.response.start"

        scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": "/admin/v1/tenants",
            "headers": [(b"content-length", b"4000000")],
            "caller": caller,
        }
        await self.boundary(scope, receive, answer)


async def settled(refused: Refused, awaited: int) -> None:
    async with asyncio.timeout(10):
        while refused.awaited < awaited:
            await asyncio.sleep(0)


@pytest.mark.timeout(30)
async def test_bodies_of_unknown_callers_are_awaited_for_a_few_at_a_time() -> None:
    refused = Refused()
    async with asyncio.TaskGroup() as group:
        strangers = [group.create_task(refused.send(None)) for _ in range(LEFTOVER_STRANGERS)]
        await settled(refused, LEFTOVER_STRANGERS)
        assert refused.answers == 0
        # One more is answered without a look at its body; a caller with a key is waited for.
        await refused.send(None)
        assert (refused.answers, refused.awaited) == (1, LEFTOVER_STRANGERS)
        known = group.create_task(refused.send(ADMIN))
        await settled(refused, LEFTOVER_STRANGERS + 1)
        for task in [*strangers, known]:
            task.cancel()
    # Those that went away have left room.
    async with asyncio.TaskGroup() as group:
        again = group.create_task(refused.send(None))
        await settled(refused, LEFTOVER_STRANGERS + 2)
        again.cancel()
