"""Releases: every state kept, only what is ready, forward and back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from loraplex.control.audit.recorder import Actor
from loraplex.control.errors import (
    AdapterNotFound,
    Conflict,
    InvalidValue,
    PreconditionFailed,
    ReleaseNotFound,
    TenantNotFound,
)
from loraplex.control.release_types import ReleaseInfo, ReleaseTarget
from loraplex.control.rules import InvalidCursor
from support.control.plane import ControlPlane, at_once


@pytest.fixture
def released(plane: ControlPlane) -> ControlPlane:
    """`pirate` with v1 (released), v2 and v3, and v4 that is deleted."""
    for seed in range(1, 5):
        plane.add("acme", "pirate", seed)
    plane.catalog.delete_version("acme", "pirate", "v4")
    return plane


def targets(**weights: int) -> list[ReleaseTarget]:
    return [ReleaseTarget(version, weight) for version, weight in weights.items()]


def shares(release: ReleaseInfo) -> dict[str, int]:
    return {target.version: target.weight for target in release.targets}


def test_a_release_is_in_force_as_it_was_put_and_over_a_restart(released: ControlPlane) -> None:
    put = released.releases.put("acme", "pirate", targets(v1=90, v3=10), sticky="user")
    assert shares(put) == {"v1": 90, "v3": 10}
    assert (put.sticky, put.revision) == ("user", 2)
    again = ControlPlane(released.root)
    assert again.releases.get("acme", "pirate") == put
    again.close()


@pytest.mark.parametrize(
    ("given", "sticky"),
    [
        ([], "none"),
        (targets(v1=0, v2=0), "none"),
        (targets(v1=-1), "none"),
        (targets(v1=2_000_000), "none"),
        (targets(v4=100), "none"),
        (targets(v1=50, v9=50), "none"),
        (targets(v01=100), "none"),
        ([ReleaseTarget("v1", 1), ReleaseTarget("v1", 2)], "none"),
        (targets(v1=100), "session"),
    ],
)
def test_invalid_release_changes_nothing(
    released: ControlPlane, given: list[ReleaseTarget], sticky: str
) -> None:
    before = released.releases.get("acme", "pirate")
    with pytest.raises(InvalidValue) as caught:
        released.releases.put("acme", "pirate", given, sticky=sticky)
    assert caught.value.param in ("targets", "sticky")
    assert released.releases.get("acme", "pirate") == before


def test_promoting_gives_all_to_one_version(released: ControlPlane) -> None:
    released.releases.put("acme", "pirate", targets(v1=90, v2=10), sticky="key")
    newest = released.releases.promote("acme", "pirate")
    assert shares(newest) == {"v3": 100}  # v4 is newer and deleted
    assert newest.sticky == "key"
    assert shares(released.releases.promote("acme", "pirate", "v2")) == {"v2": 100}
    with pytest.raises(InvalidValue):
        released.releases.promote("acme", "pirate", "v4")


def rolled_back(released: ControlPlane, **options: Any) -> ReleaseInfo:
    return released.releases.rollback("acme", "pirate", **options).release


def test_rolling_back_goes_to_the_release_before_and_skips_what_is_gone(released: ControlPlane) -> None:
    releases = released.releases
    with pytest.raises(Conflict):
        releases.rollback("acme", "pirate")
    releases.put("acme", "pirate", targets(v1=90, v2=10), sticky="user")
    releases.promote("acme", "pirate", "v3")
    back = rolled_back(released)
    assert shares(back) == {"v1": 90, "v2": 10}
    assert (back.sticky, back.revision, back.restores) == ("user", 4, 2)
    releases.promote("acme", "pirate", "v3")
    released.catalog.delete_version("acme", "pirate", "v2")
    info = releases.rollback("acme", "pirate")
    assert shares(info.release) == {"v1": 100}
    assert [(skip.revision, skip.reason) for skip in info.skipped] == [(4, "v2 is deleted")]


def test_each_rollback_goes_one_step_further_back(released: ControlPlane) -> None:
    releases = released.releases
    releases.put("acme", "pirate", targets(v2=100))
    releases.put("acme", "pirate", targets(v3=100))
    assert [shares(rolled_back(released)) for _ in range(2)] == [{"v2": 100}, {"v1": 100}]
    with pytest.raises(Conflict, match="no earlier release"):
        releases.rollback("acme", "pirate")
    assert releases.get("acme", "pirate").revision == 5


def test_a_release_after_rollbacks_begins_a_branch(released: ControlPlane) -> None:
    releases = released.releases
    releases.put("acme", "pirate", targets(v2=100))
    releases.put("acme", "pirate", targets(v3=100))
    rolled_back(released)
    releases.put("acme", "pirate", targets(v2=50, v3=50))
    # What was rolled back, all to v3, is on no way back.
    assert [shares(rolled_back(released)) for _ in range(2)] == [{"v2": 100}, {"v1": 100}]
    with pytest.raises(Conflict):
        releases.rollback("acme", "pirate")


def test_rolling_back_passes_over_what_equals_the_release_in_force(released: ControlPlane) -> None:
    releases = released.releases
    releases.put("acme", "pirate", targets(v2=100))
    releases.put("acme", "pirate", targets(v2=100), sticky="user")
    releases.put("acme", "pirate", targets(v2=100), sticky="user")
    back = rolled_back(released)
    assert (shares(back), back.sticky, back.restores) == ({"v2": 100}, "none", 2)


def test_a_revision_that_is_named_is_restored(released: ControlPlane) -> None:
    releases = released.releases
    releases.put("acme", "pirate", targets(v2=100), sticky="key")
    releases.put("acme", "pirate", targets(v3=100))
    back = rolled_back(released, to=1)
    assert (shares(back), back.revision, back.restores) == ({"v1": 100}, 4, 1)
    forward = rolled_back(released, to=3)
    assert (shares(forward), forward.restores) == ({"v3": 100}, 3)
    again = rolled_back(released, to=4)  # a rollback itself: what it restored
    assert (shares(again), again.restores) == ({"v1": 100}, 1)
    rolled_back(released, to=3)
    assert shares(rolled_back(released)) == {"v2": 100}  # the one before revision 3


def test_a_revision_that_cannot_be_restored_is_refused_by_name(released: ControlPlane) -> None:
    releases = released.releases
    releases.put("acme", "pirate", targets(v2=100))
    releases.put("acme", "pirate", targets(v3=100))
    released.catalog.delete_version("acme", "pirate", "v2")
    with pytest.raises(Conflict, match="Revision 2 of 'pirate' cannot be restored: v2 is deleted"):
        releases.rollback("acme", "pirate", to=2)
    with pytest.raises(Conflict, match="in force"):
        releases.rollback("acme", "pirate", to=3)
    for unknown in (0, 4, -1, 2**40):
        with pytest.raises(InvalidValue, match="kept are 1 to 3") as caught:
            releases.rollback("acme", "pirate", to=unknown)
        assert caught.value.param == "to"
    assert releases.get("acme", "pirate").revision == 3
    released.catalog.delete_version("acme", "pirate", "v1")
    with pytest.raises(Conflict, match="Skipped: revision 2: v2 is deleted; revision 1: v1 is deleted"):
        releases.rollback("acme", "pirate")


def test_nothing_is_restored_from_before_a_name_was_deleted(released: ControlPlane) -> None:
    released.releases.put("acme", "pirate", targets(v2=100))
    released.catalog.delete_adapter("acme", "pirate")
    released.add("acme", "pirate", 1)
    with pytest.raises(Conflict, match=r"no earlier release to go back to\.$"):
        released.releases.rollback("acme", "pirate")
    with pytest.raises(Conflict, match="Revision 3 of 'pirate' cannot be restored: it released nothing"):
        released.releases.rollback("acme", "pirate", to=3)


def test_history_names_releaser_versions_and_action(released: ControlPlane) -> None:
    releases, by = released.releases, Actor("key", "acme", "k1")
    releases.put("acme", "pirate", targets(v1=90, v2=10), sticky="user", by=by)
    releases.promote("acme", "pirate", "v3", by=Actor("admin"))
    releases.rollback("acme", "pirate", by=by)
    released.catalog.delete_adapter("acme", "pirate", by=by)
    page = releases.history("acme", "pirate")
    told = [(row.revision, row.origin, row.restores, row.actor, row.actor_key_id) for row in page.items]
    assert told == [
        (5, "delete", None, "key", "k1"),
        (4, "rollback", 2, "key", "k1"),
        (3, "promote", None, "admin", None),
        (2, "set", None, "key", "k1"),
        (1, "upload", None, "local", None),
    ]
    assert [shares(row) for row in page.items] == [
        {},
        {"v1": 90, "v2": 10},
        {"v3": 100},
        {"v1": 90, "v2": 10},
        {"v1": 100},
    ]
    assert all(row.created_at.tzinfo is not None for row in page.items)
    first = releases.history("acme", "pirate", limit=3)
    rest = releases.history("acme", "pirate", limit=3, cursor=first.next_cursor)
    assert ((*first.items, *rest.items), rest.next_cursor) == (page.items, None)
    with pytest.raises(AdapterNotFound):
        releases.history("rival", "pirate")
    for cursor in ("djE=", "LTE=", "OTk5OTk5OTk5OTk5"):
        with pytest.raises(InvalidCursor):
            releases.history("acme", "pirate", cursor=cursor)


def test_a_change_is_made_only_on_the_revision_that_was_seen(released: ControlPlane) -> None:
    releases = released.releases
    changes: list[Callable[..., Any]] = [
        partial(releases.put, "acme", "pirate", targets(v2=100)),
        partial(releases.promote, "acme", "pirate", "v3"),
        partial(releases.rollback, "acme", "pirate"),
    ]
    for revision, change in enumerate(changes, start=1):
        with pytest.raises(PreconditionFailed):
            change(if_revision={revision - 1, revision + 1})
        assert releases.get("acme", "pirate").revision == revision
        change(if_revision={revision})
        assert releases.get("acme", "pirate").revision == revision + 1
    both = at_once(*(partial(releases.put, "acme", "pirate", targets(v1=1), if_revision={4}) for _ in "ab"))
    assert sorted(type(result) for result in both if isinstance(result, Exception)) == [PreconditionFailed]


def test_the_newest_releases_of_all_tenants_and_what_serves_by_them(released: ControlPlane) -> None:
    other = released.add("rival", "support", 7)
    released.releases.put("acme", "pirate", targets(v1=0, v2=1, v3=9))
    newest = released.releases.newest(10)
    assert [(info.tenant_id, info.name) for info in newest] == [("acme", "pirate"), ("rival", "support")]
    refs = released.releases.serving(newest)
    assert [(ref.name, ref.version) for ref in refs] == [
        ("pirate", 2),
        ("pirate", 3),
        ("support", 1),
    ]
    assert [(info.tenant_id, info.name) for info in released.releases.newest(1)] == [("acme", "pirate")]
    released.catalog.delete_adapter("acme", "pirate")
    assert released.releases.serving(newest) == [other.ref()]
    assert [info.tenant_id for info in released.releases.newest(10)] == ["rival"]


def test_a_name_without_versions_has_no_release_and_a_new_one_starts_afresh(released: ControlPlane) -> None:
    released.catalog.delete_adapter("acme", "pirate")
    calls: list[Any] = [released.releases.get, released.releases.promote, released.releases.rollback]
    for call in calls:
        with pytest.raises(ReleaseNotFound):
            call("acme", "pirate")
        with pytest.raises(ReleaseNotFound):
            call("rival", "pirate")
        with pytest.raises(TenantNotFound):
            call("nobody", "pirate")
    info = released.add("acme", "pirate", 9)
    assert shares(released.releases.get("acme", "pirate")) == {info.version: 100}
    with pytest.raises(Conflict):
        released.releases.rollback("acme", "pirate")
