"""Checks of one tenant's versions that hang, that are slow, or that end the engine: what the others notice of them."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from loraplex.adapters.cache.tenant_memory import MemoryLimits
from loraplex.adapters.numerics import SiteOutputs, check
from loraplex.adapters.ref import AdapterRef
from loraplex.control.types import VersionInfo
from loraplex.lifecycle import version_checks
from loraplex.serving.errors import EngineLost
from support.http.admin_plane import AdminPlane

STUCK = ["s0", "s1", "s2", "s3", "s4", "s5", "s6", "s7"]


def version(plane: AdminPlane, tenant: str, seed: int = 1) -> VersionInfo:
    """A new one that is validating."""
    number = plane.make_adapter("support", tenant, seed, check=True)
    return plane.services.catalog.get_version(tenant, "support", number)


def state(plane: AdminPlane, info: VersionInfo) -> str:
    return plane.services.catalog.get_version(info.tenant_id, info.name, info.version).state


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.002)


async def test_tenants_whose_versions_are_not_measured_hold_up_no_other(plane: AdminPlane) -> None:
    measure, never = plane.measure, asyncio.Event()

    async def some_never(ref: AdapterRef) -> SiteOutputs:
        if ref.tenant_id in STUCK:
            await never.wait()
        return await measure(ref)

    plane.engine.measure = some_never
    tasks = [plane.checks.start(version(plane, plane.make_tenant(tenant))) for tenant in STUCK]
    await asyncio.sleep(0)
    fair = version(plane, plane.make_tenant("acme"), seed=2)
    assert (await plane.checks.wait(fair)).state == "ready"
    assert not any(task.done() for task in tasks)
    never.set()
    await asyncio.wait(tasks)


@pytest.fixture
def sites(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """The sites that the reference has begun, in order; each takes 10 ms. A part of it is one site."""
    begun: list[tuple[int, str]] = []
    right = check.expect_site

    def slow(site: Any, *others: Any) -> Any:
        begun.append((len(site.a), site.module_path))
        time.sleep(0.01)
        return right(site, *others)

    monkeypatch.setattr(check, "expect_site", slow)
    monkeypatch.setattr(version_checks, "REFERENCE_S", 0.0)
    return begun


async def test_a_slow_reference_leaves_others_their_turn(
    plane: AdminPlane, sites: list[tuple[int, str]]
) -> None:
    large = version(plane, plane.make_tenant("large"))
    slow = plane.checks.start(large)
    await until(lambda: len(sites) > 0)
    fair = version(plane, plane.make_tenant("acme"), seed=2)
    before = len(sites)
    assert (await plane.checks.wait(fair)).state == "ready"
    await slow
    per_version = len(sites) // 2
    # They alternate: the later one does not wait for the end of the one before.
    assert before < per_version
    assert len(sites) == 2 * per_version
    order = plane.outcomes
    assert order == ["ready", "ready"]


async def test_storage_that_hangs_costs_others_one_turn(
    plane: AdminPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung, goes_on = threading.Event(), threading.Event()
    right, compute, turns = check.expect_site, plane.checks._compute, itertools.count(1)

    async def brief_once(work: Callable[[], Any]) -> Any:
        """Only the turn that hangs has little time: a busy machine may hold up the others."""
        monkeypatch.setattr(version_checks, "STUCK_S", 0.2 if next(turns) == 2 else 60.0)
        return await compute(work)

    def hang_once(*given: Any) -> Any:
        if not hung.is_set():
            hung.set()
            goes_on.wait(60)
        return right(*given)

    monkeypatch.setattr(check, "expect_site", hang_once)
    monkeypatch.setattr(plane.checks, "_compute", brief_once)
    slow = plane.checks.start(version(plane, plane.make_tenant("slow")))
    await until(hung.is_set)
    fair = version(plane, plane.make_tenant("acme"), seed=2)
    assert (await plane.checks.wait(fair)).state == "ready"
    goes_on.set()
    assert "in time" in ((await slow).reason or "")


async def test_the_engine_knows_a_tenants_limits_before_it_loads_for_a_check(plane: AdminPlane) -> None:
    known: list[MemoryLimits | None] = []
    measure = plane.measure

    async def note(ref: AdapterRef) -> SiteOutputs:
        known.append(getattr(plane.engine.terms.get(ref.tenant_id), "memory", None))
        return await measure(ref)

    plane.engine.measure = note
    plane.make_tenant(limits={"device_bytes_max": 1 << 20, "host_bytes_max": 1 << 21})
    await plane.checks.wait(version(plane, "acme"))
    assert known == [MemoryLimits(None, 1 << 20, 1 << 21)]


async def test_a_version_that_the_engine_dies_of_does_not_end_engine_after_engine(plane: AdminPlane) -> None:
    now = [0.0]
    plane.checks._clock = lambda: now[0]
    plane.make_tenant("poison")
    versions = [version(plane, "poison", seed) for seed in range(8)]
    fair = version(plane, plane.make_tenant("acme"), seed=2)
    measure, deaths = plane.measure, []

    async def die(ref: AdapterRef) -> SiteOutputs:
        if ref.tenant_id == "poison":
            deaths.append(now[0])
            raise EngineLost("the engine process failed and is being restarted")
        return await measure(ref)

    plane.engine.measure = die
    while now[0] < 300:
        await asyncio.wait([plane.checks.start(info) for info in versions])
        now[0] += 1
    assert len(deaths) == 3  # RestartPolicy gives up at five within five minutes
    assert deaths[2] - deaths[1] >= 120
    assert (await plane.checks.wait(fair)).state == "ready"
    # The first was measured twice, the second once; the others wait.
    assert [state(plane, info) for info in versions] == ["rejected", *["validating"] * 7]


async def test_a_version_that_was_measured_beside_one_that_the_engine_dies_of_is_not_blamed(
    plane: AdminPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version_checks, "FIRST_RETRY_S", 0.02)
    monkeypatch.setattr(version_checks, "FIRST_PAUSE_S", 0.02)
    bad, fair = (version(plane, plane.make_tenant(tenant)) for tenant in ("poison", "acme"))
    measure = plane.measure
    inside: set[str] = set()
    together: list[set[str]] = []
    died = asyncio.Event()

    async def die(ref: AdapterRef) -> SiteOutputs:
        """The engine dies of one, and all that it measures is lost."""
        again = died.is_set()
        inside.add(ref.tenant_id)
        try:
            if again:
                await asyncio.sleep(0.1)  # longer than the pause before the other's turn
                together.extend([set(inside)] * (len(inside) > 1))
            elif ref.tenant_id == "poison":
                while len(inside) < 2:
                    await asyncio.sleep(0)
                died.set()
            else:
                await died.wait()
            if ref.tenant_id == "poison" or not again:
                raise EngineLost("the engine process failed and is being restarted")
            return await measure(ref)
        finally:
            inside.discard(ref.tenant_id)

    plane.engine.measure = die
    async with asyncio.timeout(30):
        await asyncio.gather(*map(plane.checks.wait, (bad, fair)), return_exceptions=True)
    assert not together, "one that may be the reason is measured beside another"
    assert (state(plane, bad), state(plane, fair)) == ("rejected", "ready")
