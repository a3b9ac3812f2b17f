"""Shadows over a scripted engine, and a store of theirs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from prometheus_client import CollectorRegistry

from loraplex.adapters.ref import AdapterRef
from loraplex.api.drain import Drain
from loraplex.api.generation.shadow import Shadows
from loraplex.api.metrics.part_meters import SHADOW_OUTCOMES, ShadowMeter
from loraplex.control.catalog.shadow_store import ShadowKey, ShadowSums
from loraplex.control.db.database import utc_now
from loraplex.control.release_types import ReleaseInfo, ReleasePlan, ShadowPlan
from loraplex.control.types import ResolvedModel
from loraplex.engine.types import EngineRequest, SamplingParams
from loraplex.serving.text.processor import TextProcessor
from support.engine.fake_engine import FakeEngineClient
from support.http.data_plane import ref

PROMPT = tuple(b"say ok")
ANSWER = tuple(b"ok")
LIVE, SHADOW = ref("acme", "pirate", 1), ref("acme", "pirate", 2)
KEY = ShadowKey("acme", "pirate", 5, 2)


def released(tenant: str = "acme", **plan: Any) -> ReleaseInfo:
    its = ShadowPlan(**{"version": "v2", "sample": 1.0, **plan})
    return ReleaseInfo(tenant, "pirate", 5, (), "none", utc_now(), plan=ReleasePlan(shadow=its))


def model(tenant: str = "acme", adapter: AdapterRef = LIVE, **plan: Any) -> ResolvedModel:
    return ResolvedModel(adapter, release=released(tenant, **plan), shadow=SHADOW)


def asked(name: str = "r", **changes: Any) -> EngineRequest:
    sampling = SamplingParams(max_tokens=40, temperature=0.7, seed=11, logprobs=3)
    return replace(EngineRequest(f"{name}-0", "acme", PROMPT, sampling, LIVE, priority=3), **changes)


@dataclass
class Store:
    """Adds up what is written; `broken`: it raises instead."""

    sums: dict[ShadowKey, ShadowSums] = field(default_factory=dict)
    broken: bool = False
    num_cleanings: int = 0

    def remove_old_texts(self) -> int:
        self.num_cleanings += 1
        return 0

    def add(self, batch: Mapping[ShadowKey, ShadowSums]) -> None:
        if self.broken:
            raise ConnectionError("the database is away")
        for key, its in batch.items():
            self.sums.setdefault(key, ShadowSums()).add_all(its)

    def __getitem__(self, name: str) -> float:
        return sum(its.sums.get(name, 0) for its in self.sums.values())


@dataclass
class Bench:
    """Shadows over a scripted engine, on a loop of their own."""

    text: TextProcessor
    engine: FakeEngineClient = field(default_factory=FakeEngineClient)
    store: Store = field(default_factory=Store)
    drain: Drain = field(default_factory=Drain)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.registry = CollectorRegistry()

        async def in_thread(write: Callable[[], object]) -> None:
            write()

        self.shadows = Shadows(
            self.engine,
            self.text,
            self.drain,
            self.store,
            in_thread,
            ShadowMeter(self.registry),
            clock=lambda: self.now,
        )

    def offer(
        self, name: str = "r", *, tenant: str = "acme", tokens: tuple[int, ...] = ANSWER, **more: Any
    ) -> None:
        request = more.pop("request", None) or asked(name, tenant_id=tenant)
        stops = more.pop("stops", ())
        self.shadows.offer(name, model(tenant, **more), (request, tokens), stops)

    async def settle(self) -> None:
        """Until nothing waits or runs; then all is written."""
        async with asyncio.timeout(60):
            while self.gauge("waiting") or self.gauge("running"):
                await asyncio.sleep(0)
        await self.shadows.write()

    def gauge(self, name: str) -> float:
        return self.registry.get_sample_value(f"loraplex_shadow_{name}") or 0.0

    @property
    def outcomes(self) -> dict[str, int]:
        name = "loraplex_shadow_requests_total"
        counts = {
            one: int(self.registry.get_sample_value(name, {"outcome": one}) or 0) for one in SHADOW_OUTCOMES
        }
        return {one: count for one, count in counts.items() if count}
