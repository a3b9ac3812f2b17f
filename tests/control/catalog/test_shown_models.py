"""What /v1/models shows, which spellings a key's `models` may have, and how far back releases go."""

from __future__ import annotations

import pytest

from loraplex.control.catalog.release_changes import MAX_REVISIONS
from loraplex.control.errors import ModelNotAllowed
from loraplex.control.release_types import ReleaseTarget
from support.control.plane import SERVED_NAME, ControlPlane, caller


async def test_a_split_release_is_shown_as_the_version_that_most_callers_get(plane: ControlPlane) -> None:
    for seed in range(1, 4):
        plane.add("acme", "pirate", seed)
    targets = [ReleaseTarget("v1", 5), ReleaseTarget("v2", 90), ReleaseTarget("v3", 5)]
    plane.releases.put("acme", "pirate", targets)
    card = (await plane.resolver.list_models(caller("acme")))[1]
    assert card.root == plane.catalog.get_version("acme", "pirate", "v2").digest


@pytest.mark.parametrize("allowed", ["pirate", f"{SERVED_NAME}:pirate"])
@pytest.mark.parametrize(
    "asked", ["pirate", f"{SERVED_NAME}:pirate", "pirate@v1", f"{SERVED_NAME}:pirate@v1"]
)
async def test_a_name_is_the_same_with_the_base_before_it(
    plane: ControlPlane, allowed: str, asked: str
) -> None:
    plane.add("acme", "pirate")
    plane.add("acme", "json", 2)
    who = caller("acme", models=frozenset({allowed}))
    assert (await plane.resolver.resolve(who, asked)).adapter is not None
    assert [card.id for card in await plane.resolver.list_models(who)] == ["pirate"]
    for model in ("json", SERVED_NAME, f"{SERVED_NAME}:json"):
        with pytest.raises(ModelNotAllowed):
            await plane.resolver.resolve(who, model)


async def test_a_key_for_one_version_may_use_no_other(plane: ControlPlane) -> None:
    plane.add("acme", "pirate", 1)
    plane.add("acme", "pirate", 2)
    who = caller("acme", models=frozenset({f"{SERVED_NAME}:pirate@v2"}))
    for model in ("pirate@v2", f"{SERVED_NAME}:pirate@v2"):
        assert (await plane.resolver.resolve(who, model)).adapter is not None
    for model in ("pirate", "pirate@v1", f"{SERVED_NAME}:pirate"):
        with pytest.raises(ModelNotAllowed):
            await plane.resolver.resolve(who, model)


def test_releasing_without_end_keeps_a_bounded_past(plane: ControlPlane) -> None:
    plane.add("acme", "pirate", 1)
    plane.add("acme", "pirate", 2)
    plane.releases.promote("acme", "pirate", "v2")
    for weight in range(1, MAX_REVISIONS + 5):
        plane.releases.put("acme", "pirate", [ReleaseTarget("v1", weight)])
    with plane.database.read() as session:
        kept = session.connection().exec_driver_sql("SELECT min(revision), count(*) FROM releases").one()
    newest = plane.releases.get("acme", "pirate")
    assert newest.revision == MAX_REVISIONS + 6
    assert tuple(kept) == (newest.revision - MAX_REVISIONS + 1, MAX_REVISIONS)
    assert plane.releases.rollback("acme", "pirate").release.targets == (
        ReleaseTarget("v1", MAX_REVISIONS + 3),
    )
