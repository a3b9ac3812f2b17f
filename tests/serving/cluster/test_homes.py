"""What has engines follow placement, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from loraplex.adapters.cache.residency import CacheEntry
from loraplex.adapters.ref import AdapterRef
from loraplex.engine.ipc import protocol as wire
from loraplex.serving.engines.placing import ROUND_S, Placing
from loraplex.serving.engines.replica import Replica
from loraplex.serving.placement.homes import Homes
from support.cluster.scripted import ScriptedSession
from support.engine.fake_engine import fake_engine_info
from support.virtual_time import VirtualTimeLoop

REF = AdapterRef("acme", "a", 1, "a" * 64, 8)


class Session(ScriptedSession):
    """Notes what it is to load. `load` puts it onto its device."""

    def __init__(self) -> None:
        super().__init__(fake_engine_info(max_num_seqs=4))
        self.prefetched: list[AdapterRef] = []

    def load(self) -> None:
        self._dispatch(wire.ResidencyChanged({REF.digest: "hot"}))

    def prefetch(self, refs: Sequence[AdapterRef]) -> None:
        self.prefetched += refs

    async def cache(self, digests: Collection[str] | None = None) -> list[CacheEntry]:
        return [CacheEntry(REF, "hot", device_bytes=1 << 18)]


def test_a_version_that_no_engine_has_loaded_is_not_brought_to_others() -> None:
    """It may be what ends the engines that load it; its request ends one or two of them, placement would end all."""

    async def run() -> None:
        sessions = [Session(), Session()]
        replicas = [Replica(f"replica-{number}", session) for number, session in enumerate(sessions)]
        for session in sessions:
            await session.start()
        homes = Homes(asyncio.get_running_loop().time)
        placing = Placing(homes)
        homes.begin(REF, 8)  # more than one engine has places for
        for _ in range(5):
            await asyncio.sleep(ROUND_S)
            await placing.round(replicas)
        assert len(homes.of(REF.digest)) == 2
        assert [session.prefetched for session in sessions] == [[], []]
        sessions[0].load()
        await placing.round(replicas)
        assert [session.prefetched for session in sessions] == [[], [REF]]
        for session in sessions:
            await session.close()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(run())
