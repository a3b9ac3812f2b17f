"""Series: which of their versions have their numbers checked, which are kept, and what is said of the others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from loraplex.adapters.errors import AdapterRefused
from loraplex.control.audit.recorder import Actor
from loraplex.control.catalog.retention import Retention
from loraplex.control.catalog.series import AllSeries, SeriesRules
from loraplex.control.errors import ModelNotFound, NotForTraining, SeriesNotFound, VersionNotFound
from loraplex.control.types import Refusal, VersionInfo
from loraplex.migrations.run import downgrade, upgrade
from support.adapters.drafts import draft_adapter, make_adapter
from support.control.plane import ARCH, ControlPlane, caller

TRAINER = Actor("key", "acme", "0123456789abcdef", scopes=frozenset({"adapters:train", "adapters:write"}))
ONLY_TRAINER = replace(TRAINER, scopes=frozenset({"adapters:train"}))
OTHER = Actor("key", "acme", "fedcba9876543210")
WRONG = Refusal("numerical_mismatch", "it is off")


@pytest.fixture
def series(plane: ControlPlane) -> AllSeries:
    return AllSeries(plane.database, plane.catalog.check_name)


def push(plane: ControlPlane, seed: int, *, name: str = "run", by: Actor = TRAINER) -> VersionInfo:
    """A version from a key that may train, left as its series wants it."""
    with plane.store.begin_staging() as staging:
        make_adapter(staging.directory, ARCH, seed=seed)
        return plane.catalog.admit("acme", name, staging, check=True, by=by)[0]


def pass_check(plane: ControlPlane, info: VersionInfo) -> None:
    plane.validation.accept(info, {"verdict": "ok"})


def states(plane: ControlPlane) -> dict[str, str]:
    return {info.version: info.state for info in plane.catalog.list_versions("acme", "run").items}


def released(plane: ControlPlane) -> list[str]:
    return [target.version for target in plane.releases.get("acme", "run").targets]


def test_the_first_version_and_every_nth_have_their_numbers_checked(
    plane: ControlPlane, series: AllSeries
) -> None:
    series.put("acme", "run", SeriesRules(keep_last=8, check_every=3))
    pushed = []
    for seed in range(1, 8):
        info = push(plane, seed)
        if info.state == "validating":
            pass_check(plane, info)
        pushed.append(info)
    assert [info.checked for info in pushed] == [
        "numbers", "structure", "structure", "numbers", "structure", "structure", "numbers",
    ]  # fmt: skip
    assert all((info.checked == "numbers") == (info.state == "validating") for info in pushed)
    told = [check for check in pushed[1].report["checks"] if check["name"] == "numbers"]
    assert told
    assert "one in 3" in told[0]["detail"]
    assert not [check for check in pushed[0].report["checks"] if check["name"] == "numbers"]
    plane.check_integrity()


def test_values_are_measured_where_numbers_are_checked_and_are_finite_in_each(
    plane: ControlPlane, series: AllSeries
) -> None:
    series.put("acme", "run", SeriesRules(keep_last=8, check_every=3))
    pushed = [push(plane, 1)]
    pass_check(plane, pushed[0])
    pushed += [push(plane, seed) for seed in range(2, 5)]
    assert [info.report["norm"] is None for info in pushed] == [False, True, True, False]
    pass_check(plane, pushed[3])
    draft = draft_adapter(ARCH, seed=5)
    next(iter(draft.tensors.values()))[0, 0] = np.nan
    with plane.store.begin_staging() as staging, pytest.raises(AdapterRefused) as refused:
        draft.write(staging.directory)
        plane.catalog.admit("acme", "run", staging, check=True, by=TRAINER)
    assert refused.value.code == "non_finite"
    # Another structure, or another name, is inspected in full.
    assert plane.upload("acme", "other", 6)[0].report["norm"] is not None
    with plane.store.begin_staging() as staging:
        make_adapter(staging.directory, ARCH, seed=7, rank=2)
        info = plane.catalog.admit("acme", "run", staging, check=True, by=TRAINER)[0]
    assert (info.checked, info.report["norm"] is None) == ("structure", False)
    plane.check_integrity()


def test_a_set_in_another_order_is_the_version_whose_norms_were_not_measured(
    plane: ControlPlane, series: AllSeries
) -> None:
    series.put("acme", "run", SeriesRules(keep_last=8, check_every=100))

    def push_ordered(seed: int, targets: list[str]) -> VersionInfo:
        with plane.store.begin_staging() as staging:
            draft = draft_adapter(ARCH, seed=seed, targets=("q_proj", "v_proj"))
            draft.config["target_modules"] = targets
            draft.write(staging.directory)
            return plane.catalog.admit("acme", "run", staging, check=True, by=TRAINER)[0]

    ordered, turned = ["q_proj", "v_proj"], ["v_proj", "q_proj"]
    pass_check(plane, push_ordered(1, ordered))
    second, third = push_ordered(2, ordered), push_ordered(3, ordered)
    assert [second.report["norm"], third.report["norm"]] == [None, None]
    assert push_ordered(2, turned) == second
    assert push_ordered(4, turned).version == "v4"
    plane.check_integrity()


def test_a_version_that_fails_or_new_rules_make_the_next_one_due(
    plane: ControlPlane, series: AllSeries
) -> None:
    rules = SeriesRules(keep_last=8, check_every=100)
    series.put("acme", "run", rules)
    plane.validation.reject(push(plane, 1), WRONG, {})
    second = push(plane, 2)
    assert second.checked == "numbers"
    pass_check(plane, second)
    assert push(plane, 3).checked == "structure"
    series.put("acme", "run", rules)
    assert push(plane, 4).checked == "numbers"
    plane.check_integrity()


def test_bytes_that_were_rejected_before_have_their_numbers_checked_again(
    plane: ControlPlane, series: AllSeries
) -> None:
    series.put("acme", "run", SeriesRules(keep_last=8, check_every=3))
    pass_check(plane, push(plane, 1))
    push(plane, 2)
    push(plane, 3)
    plane.validation.reject(push(plane, 4), WRONG, {})
    pass_check(plane, push(plane, 5))
    again = push(plane, 4)
    assert (again.version, again.checked, again.state) == ("v6", "numbers", "validating")
    assert released(plane) == ["v5"]
    plane.check_integrity()


def test_a_version_that_was_deleted_before_its_check_leaves_the_next_one_due(
    plane: ControlPlane, series: AllSeries
) -> None:
    series.put("acme", "run", SeriesRules(keep_last=8, check_every=10))
    push(plane, 1)
    plane.catalog.delete_version("acme", "run", "v1")
    assert push(plane, 2).checked == "numbers"
    plane.check_integrity()


def test_each_version_takes_the_traffic_if_the_series_says_so(plane: ControlPlane, series: AllSeries) -> None:
    series.put("acme", "run", SeriesRules(keep_last=8, check_every=10, latest=True))
    pass_check(plane, push(plane, 1))
    assert released(plane) == ["v1"]
    push(plane, 2)
    assert released(plane) == ["v2"]
    series.put("acme", "run", SeriesRules(keep_last=8, check_every=10, latest=False))
    third = push(plane, 3)
    pass_check(plane, third)
    push(plane, 4)
    assert released(plane) == ["v2"]
    # A load at run time asks for a release: the rules of the series decide on it too.
    with plane.store.begin_staging() as staging:
        make_adapter(staging.directory, ARCH, seed=5)
        plane.catalog.admit("acme", "run", staging, release=True, check=True, by=TRAINER)
    assert released(plane) == ["v2"]
    plane.check_integrity()


async def test_old_versions_retire_unless_they_are_in_use_pinned_or_released(
    plane: ControlPlane, series: AllSeries
) -> None:
    series.put("acme", "run", SeriesRules(keep_last=2, check_every=100, latest=False))
    pass_check(plane, push(plane, 1))
    infos = [push(plane, seed) for seed in range(2, 7)]
    plane.catalog.set_pin("acme", "run", "v2", True)
    retention = Retention(plane.database, plane.artifacts, 0)
    assert retention.surplus("acme", "run") == [infos[2].digest, infos[1].digest]
    removal = retention.apply("acme", "run", in_use={infos[2].digest})
    assert removal.digests == (infos[1].digest,)
    expected = dict.fromkeys(("v1", "v2", "v4", "v5", "v6"), "ready") | {"v3": "retired"}
    assert states(plane) == expected
    assert infos[1].digest not in plane.stored()
    # A request for it is told that it was there; a number that never was is unknown.
    with pytest.raises(ModelNotFound, match="run@v3 is retired") as caught:
        await plane.resolver.resolve(caller("acme"), "run@v3")
    assert caught.value.code == "model_not_found"
    for model, who in (("run@v9", "acme"), ("run@v3", "rival")):
        with pytest.raises(ModelNotFound, match="does not exist"):
            await plane.resolver.resolve(caller(who), model)
    with pytest.raises(ModelNotFound, match="does not exist"):
        await plane.resolver.resolve(caller("acme", models=frozenset({"other"})), "run@v3")
    with pytest.raises(VersionNotFound, match="retired"):
        plane.catalog.get_living("acme", "run", "v3")
    # Nor does one go that the engine was not asked about.
    assert retention.apply("acme", "run", among=()).digests == ()
    # The one in use goes when it is not any more.
    assert retention.apply("acme", "run").digests == (infos[2].digest,)
    assert states(plane)["v4"] == "retired"
    plane.check_integrity()


def test_only_a_key_that_trains_pushes_to_a_series(plane: ControlPlane, series: AllSeries) -> None:
    series.put("acme", "run", SeriesRules(keep_last=2, check_every=1))
    with pytest.raises(NotForTraining, match="adapters:train"):
        plane.catalog.check_upload("acme", "run", OTHER)
    with pytest.raises(NotForTraining):
        push(plane, 1, by=OTHER)
    push(plane, 1)
    ordinary = push(plane, 2, name="support", by=OTHER)
    assert ordinary.checked is None
    push(plane, 4, by=ONLY_TRAINER)
    series.delete("acme", "run")
    # The series ended while the bytes of a push were on their way.
    with pytest.raises(SeriesNotFound):
        push(plane, 5, by=ONLY_TRAINER)
    assert push(plane, 3, by=OTHER).checked is None
    with pytest.raises(SeriesNotFound):
        series.get("acme", "run")
    plane.check_integrity()


def test_a_series_ends_with_its_name_and_its_tenant(plane: ControlPlane, series: AllSeries) -> None:
    for name in ("run", "walk"):
        series.put("acme", name, SeriesRules(keep_last=2, check_every=1, config={"r": 4}))
    push(plane, 1)
    plane.catalog.delete_adapter("acme", "run")
    with pytest.raises(SeriesNotFound):
        series.get("acme", "run")
    assert series.get("acme", "walk").rules.config == {"r": 4}
    plane.tenants.delete("acme")
    plane.check_integrity()


def test_the_schema_before_knows_retired_versions_as_deleted(
    plane: ControlPlane, series: AllSeries, tmp_path: Path
) -> None:
    series.put("acme", "run", SeriesRules(keep_last=1, check_every=100))
    pass_check(plane, push(plane, 1))
    push(plane, 2)
    Retention(plane.database, plane.artifacts, 0).apply("acme", "run")
    assert states(plane) == {"v1": "retired", "v2": "ready"}
    # Nor does it know the scope.
    for scopes in (["adapters:train"], ["adapters:train", "inference"], ["inference"]):
        plane.keys.create("acme", scopes=scopes)
    plane.close()
    downgrade(plane.url, "0013")
    upgrade(plane.url)
    restarted = ControlPlane(tmp_path)
    assert states(restarted) == {"v1": "deleted", "v2": "ready"}
    scopes = {key.scopes for key in restarted.keys.list("acme").items}
    assert scopes == {("adapters:read",), ("inference",)}
    restarted.check_integrity()
    restarted.close()
