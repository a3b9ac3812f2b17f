"""Releases: every state kept, only what is ready, forward and back."""

from __future__ import annotations

from typing import Any

import pytest

from loraplex.control.errors import Conflict, InvalidValue, ReleaseNotFound, TenantNotFound
from loraplex.control.types import ReleaseInfo, ReleaseTarget
from support.control import ControlPlane


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
def test_what_cannot_be_released_changes_nothing(
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


def test_rolling_back_goes_to_the_release_before_and_skips_what_is_gone(released: ControlPlane) -> None:
    releases = released.releases
    with pytest.raises(Conflict):
        releases.rollback("acme", "pirate")
    releases.put("acme", "pirate", targets(v1=90, v2=10), sticky="user")
    releases.promote("acme", "pirate", "v3")
    back = releases.rollback("acme", "pirate")
    assert shares(back) == {"v1": 90, "v2": 10}
    assert (back.sticky, back.revision) == ("user", 4)
    releases.promote("acme", "pirate", "v3")
    released.catalog.delete_version("acme", "pirate", "v2")
    assert shares(releases.rollback("acme", "pirate")) == {"v1": 100}


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
