"""One scrape of a server's metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from loraplex.adapters.cache.residency import CacheEntry
from loraplex.adapters.errors import LoraplexError
from loraplex.api.metrics.api_metrics import Metrics
from loraplex.api.metrics.cluster_metrics import cluster_snapshot
from loraplex.api.metrics.engine_metrics import EngineSnapshot
from loraplex.engine.reports import EngineStats
from loraplex.serving.engines.engines import Engines


class Scraper:
    """Asks the engine for its figures. There is always an answer: where the engine gives none within `engine_timeout`
    seconds, its last known figures stand in and `loraplex_engine_up` is 0."""

    def __init__(
        self,
        metrics: Metrics,
        engine: Engines,
        *,
        tenant_data: bool = True,
        engine_timeout: float = 2.0,
    ) -> None:
        self._metrics = metrics
        self._engine = engine
        self._tenant_data = tenant_data
        self._engine_timeout = engine_timeout
        self._stats = EngineStats()
        self._cache: Sequence[CacheEntry] = ()
        self._by_replica: Mapping[str, EngineStats] = {}
        self._writing = asyncio.Lock()

    async def text(self) -> bytes:
        """The text format 0.0.4."""
        engine = self._engine
        up = engine.healthy
        if up:
            try:
                async with asyncio.timeout(self._engine_timeout):
                    self._stats, self._cache, self._by_replica = await asyncio.gather(
                        engine.stats(), engine.cache(), engine.replica_stats()
                    )
            except (TimeoutError, OSError, LoraplexError):
                up = False
        try:
            info = engine.info
        except LoraplexError:  # it has never been up
            info = None
        by_replica = self._by_replica if up else {}
        cluster = cluster_snapshot(engine, by_replica)
        snapshot = EngineSnapshot(info, self._stats, self._cache, up, engine.num_restarts, cluster)
        families = self._metrics.engine_families(snapshot, tenant_data=self._tenant_data)
        async with self._writing:  # one thread at a time, however many ask
            return await asyncio.to_thread(self._metrics.text, families, tenant_data=self._tenant_data)
