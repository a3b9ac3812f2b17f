"""Tenants: checked, paged, changed in part, deleted with all that is theirs and nothing that is not."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from loraplex.control.batches.files import Files
from loraplex.control.batches.work import BatchWork, Result
from loraplex.control.catalog.series import AllSeries, SeriesRules
from loraplex.control.db.tables import Usage, UsageDay
from loraplex.control.errors import Conflict, InvalidValue, TenantIdRetired, TenantNotFound
from loraplex.control.rules import InvalidCursor
from loraplex.control.types import Limits, Stored
from support.control.batches import make_batch, request_line
from support.control.plane import ControlPlane, digests
from support.control.usage import AT, by_id, ended, rows_of


def test_a_tenant_is_kept_as_it_was_made(plane: ControlPlane) -> None:
    limits = {
        "requests_per_minute": 60,
        "tokens_per_minute": 10_000,
        "max_concurrency": 4,
        "max_sequences": 16,
        "max_output_tokens": 512,
        "max_adapters": 3,
        "max_adapter_bytes": 1 << 40,
        "device_bytes_reserved": 1 << 30,
        "device_bytes_max": 1 << 33,
        "host_bytes_max": 1 << 34,
        "batch_tokens": 1 << 20,
        "batch_percent": 50,
        "file_days": 7,
        "token_budget": 10**9,
        "budget_period": "month",
    }
    made = plane.tenants.create("zeta-9", display_name="Zeta, 9 ü", weight=0.5, limits=limits)
    known = {name: value for name, value in limits.items() if value is not None}
    assert made.limits == Limits(**known)
    assert (made.id, made.display_name, made.weight) == ("zeta-9", "Zeta, 9 ü", 0.5)
    assert made.created_at.tzinfo is not None
    again = ControlPlane(plane.root)
    assert again.tenants.get("zeta-9") == made
    again.close()


@pytest.mark.parametrize("tenant_id", ["a", "0", "a-", "a" * 63, "acme-eu-1"])
def test_ids_that_pass(plane: ControlPlane, tenant_id: str) -> None:
    assert plane.tenants.create(tenant_id).id == tenant_id


@pytest.mark.parametrize(
    "tenant_id", ["", "-a", "A", "a" * 64, "a.b", "a_b", "a b", "a/b", "é", "a\n", "../a", "a\x00", "²"]
)
def test_ids_that_do_not(plane: ControlPlane, tenant_id: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        plane.tenants.create(tenant_id)
    assert caught.value.param == "id"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"weight": 0}, "weight"),
        ({"weight": -1.0}, "weight"),
        ({"weight": math.inf}, "weight"),
        ({"weight": math.nan}, "weight"),
        ({"weight": 1e9}, "weight"),
        ({"display_name": "x" * 201}, "display_name"),
        ({"display_name": "a\x1b[2J"}, "display_name"),
        ({"limits": {"requests_per_minute": 0}}, "limits.requests_per_minute"),
        ({"limits": {"requests_per_minute": -5}}, "limits.requests_per_minute"),
        ({"limits": {"requests_per_minute": 1.5}}, "limits.requests_per_minute"),
        ({"limits": {"requests_per_minute": True}}, "limits.requests_per_minute"),
        ({"limits": {"requests_per_minute": "60"}}, "limits.requests_per_minute"),
        ({"limits": {"max_adapter_bytes": 2**80}}, "limits.max_adapter_bytes"),
        ({"limits": {"token_budget": 1000}}, "limits.budget_period"),
        ({"limits": {"token_budget": 0, "budget_period": "day"}}, "limits.token_budget"),
        ({"limits": {"budget_period": "day"}}, "limits.token_budget"),
        ({"limits": {"token_budget": 1000, "budget_period": "year"}}, "limits.budget_period"),
        ({"limits": {"request_per_minute": 5}}, "limits"),
    ],
)
def test_invalid_tenant_fields_are_named(plane: ControlPlane, options: dict[str, Any], param: str) -> None:
    before = plane.tenants.get("acme")
    with pytest.raises(InvalidValue) as caught:
        plane.tenants.create("new", **options)
    assert caught.value.param == param
    with pytest.raises(InvalidValue):
        plane.tenants.update("acme", options)
    assert plane.tenants.get("acme") == before
    with pytest.raises(TenantNotFound):
        plane.tenants.get("new")


def test_an_id_is_taken_once(plane: ControlPlane) -> None:
    with pytest.raises(Conflict) as caught:
        plane.tenants.create("acme", weight=7)
    assert caught.value.code == "conflict"
    assert plane.tenants.get("acme").weight == 1.0


def test_a_change_touches_what_it_names_alone(plane: ControlPlane) -> None:
    plane.tenants.update(
        "acme",
        {"display_name": "Acme", "weight": 2, "limits": {"max_concurrency": 4, "requests_per_minute": 9}},
    )
    changed = plane.tenants.update("acme", {"limits": {"max_concurrency": None, "max_adapters": 1}})
    assert (changed.display_name, changed.weight) == ("Acme", 2.0)
    assert changed.limits == Limits(requests_per_minute=9, max_adapters=1)
    assert plane.tenants.update("acme", {"limits": None, "display_name": None}).limits == Limits()
    assert plane.tenants.get("acme").display_name is None
    assert plane.tenants.get("rival").limits == Limits()


def test_all_are_listed_once_by_pages(plane: ControlPlane) -> None:
    for number in range(10):
        plane.tenants.create(f"t{number}")
    seen: list[str] = []
    page = plane.tenants.list(limit=5)
    while True:
        seen += [info.id for info in page.items]
        if page.next_cursor is None:
            break
        page = plane.tenants.list(limit=5, cursor=page.next_cursor)
    assert seen == ["acme", "rival", *[f"t{number}" for number in range(10)]]
    assert plane.tenants.list(limit=12).next_cursor is None
    for limit in (0, -1, 501):
        with pytest.raises(InvalidValue):
            plane.tenants.list(limit=limit)
    for cursor in ("acme!", "%%%", "YQ", "/w==", "é"):
        with pytest.raises(InvalidCursor):
            plane.tenants.list(cursor=cursor)


def test_what_a_quota_bounds_is_counted(plane: ControlPlane) -> None:
    """Names with a living version, and bytes of living versions and of files; nothing where there is no quota."""
    quotas: dict[str, dict[str, int]] = {
        "counted": {"max_adapters": 5},
        "free": {},
        "new": {"max_adapters": 5, "max_adapter_bytes": 1 << 30},
        "weighed": {"max_adapter_bytes": 1 << 30},
    }
    for tenant, limits in quotas.items():
        plane.tenants.create(tenant, limits=limits)
    for tenant in ("counted", "free", "weighed"):
        for name, seed in (("billing", 1), ("billing", 2), ("support", 3)):
            plane.add(tenant, name, seed)
        plane.catalog.delete_adapter(tenant, "support")
        make_batch(plane.database, [request_line(1)], tenant)
    versions = plane.catalog.list_versions("weighed", "billing").items
    listed = Files(plane.database).list("weighed", limit=100, after=None, purpose=None, newest_first=True)
    size = sum(one.bytes for one in versions) + sum(one.bytes for one in listed.items)
    found = {one.id: one.stored for one in plane.tenants.list().items}
    assert {tenant: found[tenant] for tenant in quotas} == {
        "counted": Stored(1, None),
        "free": Stored(None, None),
        "new": Stored(0, 0),
        "weighed": Stored(None, size),
    }
    assert plane.tenants.get("weighed").stored == Stored(None, size)


def test_a_tenant_goes_with_all_that_is_its_own(plane: ControlPlane) -> None:
    own, shared = plane.add("acme", "own", seed=1), plane.add("acme", "shared", seed=2)
    plane.add("rival", "shared", seed=2)
    plane.keys.create("acme")
    assert digests(plane.tenants.delete("acme")) == {own.digest}
    assert plane.stored() == {shared.digest}
    plane.check_integrity()
    with pytest.raises(TenantNotFound):
        plane.tenants.delete("acme")
    assert plane.catalog.get_version("rival", "shared", "v1").state == "ready"


def test_a_deletion_says_what_went_and_what_stays(plane: ControlPlane) -> None:
    own = plane.add("acme", "own", seed=1)
    plane.add("acme", "shared", seed=2)
    plane.add("rival", "shared", seed=2)
    plane.keys.create("acme", name="one")
    plane.keys.revoke("acme", plane.keys.create("acme", name="two")[0].id)
    plane.tenants.update("acme", {"display_name": "Acme"})
    AllSeries(plane.database, plane.catalog.check_name).put("acme", "steps", SeriesRules(1, 1))
    would = plane.tenants.would_delete("acme")
    told = plane.tenants.delete("acme")
    assert replace(would, unpinned=told.unpinned) == told
    assert told.digests == (own.digest,)
    assert (told.num_keys, told.num_adapters, told.num_versions, told.num_series) == (2, 2, 2, 1)
    assert (told.num_bytes, told.num_shared_artifacts) == (own.bytes, 1)
    # Two names of keys, and the tenant's. Two uploads, two keys, a revocation, a change, a series, and the deletion.
    assert (told.num_texts, told.num_audit_rows) == (3, 8)
    assert told.usage_since is None


def test_a_deletion_counts_files_and_batches(plane: ControlPlane) -> None:
    """Uploads and what batches wrote, by their bytes; batches that are not complete too."""
    for tenant in ("acme", "rival"):
        make_batch(plane.database, [request_line(0), request_line(1)], tenant)
    worker = BatchWork(plane.database, "one")
    while work := worker.take({}, 3):
        worker.write(work, [Result(line.number, False, b"answer\n") for line in work.lines])
        worker.release(work, done=True)
    worker.settle()
    make_batch(plane.database, [request_line(0)])

    def sizes_of(tenant: str) -> list[int]:
        listed = Files(plane.database).list(tenant, limit=100, after=None, purpose=None, newest_first=True)
        return [file.bytes for file in listed.items]

    sizes = sizes_of("acme")
    would = plane.tenants.would_delete("acme")
    told = plane.tenants.delete("acme")
    assert replace(would, unpinned=told.unpinned) == told
    assert (told.num_files, told.num_file_bytes, told.num_batches) == (3, sum(sizes), 2)
    assert len(sizes) == 3
    assert sizes_of("acme") == []
    assert len(sizes_of("rival")) == 2


def test_what_an_engine_laid_out_goes_with_the_upload(plane: ControlPlane) -> None:
    """The cache of laid-out adapters holds the tenant's weights too."""
    plane.tenants.create("kept")
    plane.tenants.create("gone")
    kept, gone = plane.add("kept", "support", seed=1).digest, plane.add("gone", "support", seed=2).digest
    folder = plane.root / "images" / "layout"
    folder.mkdir(parents=True)

    def lay_out() -> None:
        for name in (kept, gone, ".being-written"):
            (folder / name).write_bytes(b"weights")

    lay_out()
    plane.tenants.delete("gone")
    left = {kept, ".being-written"}
    assert {path.name for path in folder.iterdir()} == left
    lay_out()  # a load that was on its way
    plane.start()
    assert {path.name for path in folder.iterdir()} == left


def test_usage_of_a_deleted_tenant_stays_billable(plane: ControlPlane) -> None:
    rows = [
        ended(at=AT),
        ended(at=AT - timedelta(days=3)),
        ended(at=AT - timedelta(days=9), tenant_id="rival"),
    ]
    with plane.database.write() as session:
        columns = Usage.__table__.columns.keys()
        session.add_all(Usage(**{name: getattr(row, name) for name in columns}) for row in rows)
    assert plane.tenants.delete("acme").usage_since == AT - timedelta(days=3)
    assert rows_of(plane.database) == by_id(rows)
    with plane.database.write() as session:
        day = UsageDay(
            at=AT - timedelta(days=40), tenant_id="rival", key_id="k", adapter="", version=0, status="stop"
        )
        day.requests = day.prompt_tokens = day.cached_tokens = day.completion_tokens = 1
        session.add(day)
    assert plane.tenants.delete("rival").usage_since == AT - timedelta(days=40)


def test_the_id_of_a_deleted_tenant_is_not_given_again(plane: ControlPlane) -> None:
    """Its usage is billed by its id, and must not become another tenant's."""
    plane.tenants.delete("acme")
    with pytest.raises(TenantIdRetired) as caught:
        plane.tenants.create("acme")
    assert (caught.value.code, caught.value.param) == ("tenant_id_retired", "id")
    assert plane.tenants.create("acme-2").id == "acme-2"
