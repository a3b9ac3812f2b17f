"""Two servers on one database and one store: what each does the other sees, and no race of the two breaks a rule."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

from loraplex.adapters.errors import AdapterRefused
from loraplex.control.errors import Conflict, ControlError, DatabaseBusy, InvalidKey, TenantNotFound
from loraplex.control.limits.budget_store import BudgetStore
from loraplex.control.limits.budgets import Budgets
from loraplex.control.limits.in_process import InProcessLimiter
from loraplex.control.limits.service import RequestLimits
from loraplex.control.release_types import ReleaseTarget
from loraplex.control.types import Removal, VersionInfo
from support.control.plane import ControlPlane, at_once, caller, use_database
from support.servers.postgres import need_programs, postgres_server

Planes = tuple[ControlPlane, ControlPlane]


@pytest.fixture
def planes(tmp_path: Path) -> Iterator[Planes]:
    """SQLite has one server; two of them need PostgreSQL. With the tenants `acme` and `rival`."""
    need_programs()
    use_database(tmp_path, postgres_server().clear())
    first, second = ControlPlane(tmp_path), ControlPlane(tmp_path)
    first.tenants.create("acme")
    first.tenants.create("rival")
    yield first, second
    first.close()
    second.close()


def check(plane: ControlPlane) -> None:
    """Every living version has its bytes, whole, and nothing else is stored; every release names living versions."""
    plane.check_integrity()
    for digest in plane.stored():
        plane.store.verify(digest)
    for tenant in plane.tenants.list().items:
        for adapter in plane.catalog.list_adapters(tenant.id).items:
            versions = plane.catalog.list_versions(tenant.id, adapter.name).items
            assert [info.number for info in versions] == list(range(1, len(versions) + 1))
            living = {info.version for info in versions if info.state == "ready"}
            release = plane.releases.get(tenant.id, adapter.name)
            assert {target.version for target in release.targets} <= living


def test_a_tenant_is_created_once(planes: Planes) -> None:
    results = at_once(*[lambda plane=plane: plane.tenants.create("new") for plane in planes * 4])
    assert sum(isinstance(result, Conflict) for result in results) == 7
    assert [info.id for info in planes[0].tenants.list().items] == ["acme", "new", "rival"]


def test_numbers_are_given_once_and_one_version_is_released(planes: Planes) -> None:
    results = at_once(*[lambda s=s: planes[s % 2].add("acme", "pirate", s) for s in range(8)])
    assert sorted(info.number for info in results) == list(range(1, 9))
    assert planes[1].releases.get("acme", "pirate").revision == 1
    check(planes[0])


def test_the_same_bytes_on_both_are_one_version(planes: Planes) -> None:
    results = at_once(*[lambda plane=plane: plane.upload("acme", "pirate", 1) for plane in planes * 3])
    assert sorted(is_new for _, is_new in results) == [False] * 5 + [True]
    check(planes[0])


def test_a_quota_holds_over_both(planes: Planes) -> None:
    planes[0].tenants.update("acme", {"limits": {"max_adapters": 3}})
    results = at_once(*[lambda s=s: planes[s % 2].add("acme", f"a{s}", s) for s in range(8)])
    assert sum(isinstance(result, AdapterRefused) for result in results) == 5
    check(planes[0])


def test_a_deletion_waits_for_an_upload_of_the_same_bytes_elsewhere(
    planes: Planes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One server found that nobody has the bytes any more; the other brings them just then."""
    here, there = planes
    digest = here.add("acme", "pirate", seed=1).digest
    real = here.store.delete
    with ThreadPoolExecutor(1) as pool:
        late: list[Any] = []

        def delete(doomed: str) -> bool:
            late.append(pool.submit(there.add, "rival", "pirate", 1))
            wait(late, timeout=0.5)  # it must not end before the deletion does, however long that takes
            assert not late[0].done()
            return real(doomed)

        monkeypatch.setattr(here.store, "delete", delete)
        assert here.catalog.delete_adapter("acme", "pirate").digests == (digest,)
        assert late[0].result(30).state == "ready"
    check(here)


def test_an_upload_that_lost_its_lock_does_not_record_bytes_that_are_gone(
    planes: Planes, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = planes
    there.add("rival", "pirate", seed=1)
    real = here.store.commit

    def commit(*args: Any, **kwargs: Any) -> Path:
        path = real(*args, **kwargs)
        monkeypatch.setattr(
            there.database, "lock", lambda _: contextlib.nullcontext()
        )  # as if ours were lost
        there.catalog.delete_adapter("rival", "pirate")
        return path

    monkeypatch.setattr(here.store, "commit", commit)
    with pytest.raises(DatabaseBusy):
        here.add("acme", "pirate", seed=1)
    monkeypatch.undo()
    assert here.stored() == set()
    here.add("acme", "pirate", seed=1)
    check(here)


@pytest.mark.parametrize("seed", range(3))
def test_creating_deleting_and_releasing_on_both_keeps_every_rule(planes: Planes, seed: int) -> None:
    expected = (ControlError, AdapterRefused)

    def work(number: int) -> Callable[[], int]:
        plane, dice = planes[number % 2], random.Random(seed * 100 + number)

        def churn() -> int:
            done = 0
            for _ in range(12):
                tenant, name = dice.choice(["acme", "rival"]), dice.choice(["one", "two"])
                action = dice.randrange(7)
                with contextlib.suppress(*expected):
                    if action <= 2:
                        plane.add(tenant, name, seed=dice.randrange(4))
                    elif action == 3:
                        plane.catalog.delete_adapter(tenant, name)
                    elif action == 4:
                        plane.catalog.delete_version(tenant, name, f"v{dice.randrange(1, 4)}")
                    elif action == 5:
                        plane.releases.put(tenant, name, [ReleaseTarget(f"v{dice.randrange(1, 4)}", 1)])
                    else:
                        plane.releases.promote(tenant, name)
                    done += 1
            return done

        return churn

    results = at_once(*[work(number) for number in range(6)])
    assert all(isinstance(result, int) for result in results), results
    assert sum(results) > 10
    check(planes[0])


def test_a_tenant_deleted_on_one_takes_along_what_arrives_on_the_other(planes: Planes) -> None:
    here, there = planes
    results = at_once(
        *[lambda s=s: there.add("acme", "pirate", s) for s in range(4)], lambda: here.tenants.delete("acme")
    )
    assert isinstance(results[-1], Removal)
    assert all(isinstance(result, VersionInfo | TenantNotFound) for result in results[:-1]), results
    assert here.stored() == set()
    check(there)


def test_revocation_and_the_end_of_a_tenant_reach_the_other_within_five_seconds(planes: Planes) -> None:
    here, there = planes
    info, first = here.keys.create("acme")
    rotated, second = here.keys.create("acme")
    _, third = here.keys.create("rival")
    cache = there.key_cache()

    async def known(secret: str) -> bool:
        try:
            await cache.authenticate(secret)
        except InvalidKey:
            return False
        return True

    for secret in (first, second, third):
        assert asyncio.run(known(secret))
    here.keys.revoke("acme", info.id)
    here.keys.rotate("acme", rotated.id)
    here.tenants.delete("rival")
    there.clock.advance(5)
    assert [asyncio.run(known(secret)) for secret in (first, second, third)] == [False] * 3


def test_a_release_made_on_one_is_followed_by_the_other(planes: Planes) -> None:
    here, there = planes
    for seed in (1, 2):
        here.add("acme", "pirate", seed)
    resolved = asyncio.run(there.resolver.resolve(caller("acme"), "pirate"))
    assert resolved.adapter is not None
    assert resolved.adapter.version == 1
    here.releases.promote("acme", "pirate", "v2")
    there.clock.advance(5)
    resolved = asyncio.run(there.resolver.resolve(caller("acme"), "pirate"))
    assert resolved.adapter is not None
    assert resolved.adapter.version == 2


def test_limits_weights_and_revocations_are_in_force_on_every_server_within_5_s(planes: Planes) -> None:
    """What both servers remember is at most 2 s old; a rate that is lowered holds for what is spent already."""
    first = planes[0]
    info, secret = first.keys.create("acme")
    caches = [plane.key_cache() for plane in planes]
    budgets = [
        Budgets(BudgetStore(plane.database), plane.database.run, clock=plane.clock) for plane in planes
    ]
    limits = [
        RequestLimits(InProcessLimiter(clock=plane.clock), held)
        for plane, held in zip(planes, budgets, strict=True)
    ]

    async def outcomes(number: int) -> list[str | float]:
        """For each server: the weight of a request that it let in, or why it did not."""
        seen: list[str | float] = []
        for cache, decides in zip(caches, limits, strict=True):
            try:
                who = await cache.authenticate(secret)
                admission = await decides.admit(f"r{number}", who)
                asked = {"prompt_tokens": 1, "asked_tokens": 9, "default_tokens": 1, "n": 1}
                await decides.reserve(admission, who, **asked)
                await decides.settle(admission, used_tokens=10)
                seen.append(who.weight)
            except ControlError as error:
                seen.append(error.code)
        return seen

    async def after(number: int, change: Callable[[], Any]) -> list[str | float]:
        change()
        for plane, held in zip(planes, budgets, strict=True):
            plane.clock.advance(2.0)
            await held.report()  # a server does so every 5 s
        return await outcomes(number)

    def tenant(**changes: Any) -> Callable[[], Any]:
        return lambda: first.tenants.update("acme", changes)

    async def history() -> None:
        assert await outcomes(0) == [1.0, 1.0]
        assert await after(1, tenant(limits={"tokens_per_minute": 100})) == [1.0, 1.0]
        # A tenth is spent; of the lower limit it is a tenth still, and the 10 tokens do not fit.
        limited = tenant(limits={"tokens_per_minute": 10})
        assert await after(2, limited) == ["rate_limit_exceeded"] * 2
        assert await after(3, tenant(limits={"tokens_per_minute": None}, weight=4.0)) == [4.0, 4.0]
        budget = {"token_budget": 20, "budget_period": "forever"}
        assert await after(4, tenant(limits=budget)) == [4.0, 4.0]
        assert await after(5, tenant(limits={})) == ["insufficient_quota"] * 2
        assert await after(6, tenant(limits={"token_budget": None})) == [4.0, 4.0]
        few = {"limits": {"requests_per_minute": 2}}
        assert await after(7, lambda: first.keys.update("acme", info.id, few)) == [4.0, 4.0]
        more = {"limits": {"requests_per_minute": None}}
        assert await outcomes(8) == [4.0, 4.0]
        assert await outcomes(9) == ["rate_limit_exceeded"] * 2
        assert await after(10, lambda: first.keys.update("acme", info.id, more)) == [4.0, 4.0]
        assert await after(11, lambda: first.keys.revoke("acme", info.id)) == ["invalid_api_key"] * 2

    asyncio.run(history())
