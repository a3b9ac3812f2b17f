"""Has engines follow placement: each round adapters are placed, loaded where they live, and pinned there."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Sequence

from loraplex.serving.engines.replica import Replica
from loraplex.serving.errors import ServingError
from loraplex.serving.placement.homes import Homes
from loraplex.serving.placement.placement import elsewhere

ROUND_S = 2.0
"""Time between two rounds of placement."""
_ASKED = 64
"""Adapters whose size one round asks for."""


class Placing:
    """The rounds of placement over `homes`. For one event loop's thread."""

    def __init__(self, homes: Homes) -> None:
        self._homes = homes

    async def round(self, replicas: Sequence[Replica]) -> None:
        """Place all adapters among these replicas, which take requests, and have them follow."""
        homes = self._homes
        homes.advance()
        if len(replicas) > 1:
            await self._learn_sizes(replicas)
        members = [replica.member() for replica in replicas]
        await homes.place(members)
        if len(replicas) > 1:
            for replica, member in zip(replicas, members, strict=True):
                replica.session.prefetch(homes.to_bring(replica.id, replica.session.hot))
                replica.session.set_elsewhere(elsewhere(member, homes.places))
        await self._move_pins(replicas)

    async def _move_pins(self, replicas: Sequence[Replica]) -> None:
        """Pin where pinned versions live now. A replica is left when another one has the version."""
        pins = self._homes.pins
        for digest, ref in list(pins.items()):
            named = self._homes.staying(digest)
            targets = [replica for replica in replicas if replica.id in named]
            for replica in targets:
                if digest in pins and digest not in replica.session.pins:
                    await _try(replica.session.pin(ref))
            if digest in pins and any(digest in replica.session.hot for replica in targets):
                for replica in replicas:
                    if replica not in targets and digest in replica.session.pins:
                        await _try(replica.session.unpin(digest))
        for replica in replicas:
            # A pin that was taken away while it was on its way to this engine.
            for digest in replica.session.pins.keys() - pins.keys():
                await _try(replica.session.unpin(digest))

    async def _learn_sizes(self, replicas: Sequence[Replica]) -> None:
        unknown = self._homes.without_size()
        for replica in replicas:
            asked = [digest for digest in unknown if digest in replica.session.hot][:_ASKED]
            if not asked:
                continue
            with contextlib.suppress(ServingError):  # it has just gone
                for entry in await replica.session.cache(asked):
                    self._homes.learn_size(entry.ref.digest, entry.device_bytes)


async def _try(call: Awaitable[None]) -> None:
    """Await a call to an engine; the next round tries again what it refuses now."""
    with contextlib.suppress(ServingError):
        await call
