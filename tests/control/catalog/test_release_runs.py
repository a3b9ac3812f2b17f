"""Releases with a guard or a schedule: how one begins, what it refuses, and every act that ends it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import select

from loraplex.control.audit.recorder import LOCAL
from loraplex.control.catalog import release_runs
from loraplex.control.catalog.schedule_state import ScheduleState
from loraplex.control.db.release_tables import ReleaseRun
from loraplex.control.db.tables import AdapterVersion, AuditRow
from loraplex.control.errors import Conflict, InvalidValue, PreconditionFailed
from loraplex.control.release_types import ReleaseInfo, ReleasePlan, ReleaseTarget, ShadowPlan
from support.control.plane import ControlPlane

GUARD = ReleasePlan(guard={"max_false_alarm": 0.01})
STEPS = [{"weight": 1, "for_seconds": 600}, {"weight": 25, "for_seconds": 600}]
SCHEDULE = ReleasePlan(guard={}, schedule=STEPS)


@pytest.fixture
def released(plane: ControlPlane) -> ControlPlane:
    """`pirate` with v1 (released), v2 and v3."""
    for seed in range(1, 4):
        plane.add("acme", "pirate", seed)
    return plane


def targets(**weights: int) -> list[ReleaseTarget]:
    return [ReleaseTarget(version, weight) for version, weight in weights.items()]


def shares(release: ReleaseInfo) -> dict[str, int]:
    return {target.version: target.weight for target in release.targets}


def put(plane: ControlPlane, plan: ReleasePlan, **weights: int) -> ReleaseInfo:
    return plane.releases.put("acme", "pirate", targets(**weights), plan=plan)


def in_force(plane: ControlPlane) -> ReleaseInfo:
    return plane.releases.get("acme", "pirate")


def change(plane: ControlPlane, act: Callable[[Any, ReleaseRun], Any]) -> Any:
    """The act on the name's run, in one transaction."""
    with plane.database.write() as session:
        run = session.get(ReleaseRun, ("acme", "pirate"))
        assert run is not None
        return act(session, run)


def num_runs(plane: ControlPlane) -> int:
    with plane.database.read() as session:
        return len(list(session.scalars(select(ReleaseRun))))


def actions(plane: ControlPlane) -> list[tuple[str, str]]:
    with plane.database.read() as session:
        rows = session.execute(select(AuditRow.actor, AuditRow.action).order_by(AuditRow.seq))
        return [(actor, action) for actor, action in rows if action.startswith("release.")]


def test_a_guard_watches_a_release_from_the_revision_that_set_it(released: ControlPlane) -> None:
    info = put(released, GUARD, v1=60, v2=30, v3=10)
    assert info == in_force(released)
    assert (info.plan, info.began, shares(info)) == (GUARD, info.revision, {"v1": 60, "v2": 30, "v3": 10})
    assert info.run is not None
    assert (info.run.status, info.run.control, info.run.candidate) == ("running", 1, 3)
    assert info.run.since == info.created_at.timestamp()
    with released.database.read() as session:
        assert [run.name for run in release_runs.running(session)] == ["pirate"]


def test_a_schedule_sets_the_weights_of_its_steps_and_the_others_share_the_rest(
    released: ControlPlane,
) -> None:
    first = put(released, SCHEDULE, v1=60, v2=30, v3=0)
    assert shares(first) == {"v1": 66, "v2": 33, "v3": 1}
    second = change(
        released, lambda session, run: release_runs.take_step(session, run, ScheduleState(1, 9.0))
    )
    assert second == in_force(released)
    assert shares(second) == {"v1": 50, "v2": 25, "v3": 25}
    assert (second.origin, second.actor, second.began) == ("step", "guard", first.revision)
    assert (second.run.status, second.run.step, second.run.since) == ("running", 1, 9.0)
    last = change(
        released,
        lambda session, run: release_runs.take_step(session, run, ScheduleState(2, 19.0, "promoted")),
    )
    assert last == in_force(released)
    assert (shares(last), last.plan, last.run.status) == ({"v3": 100}, ReleasePlan(), "promoted")
    assert actions(released) == [
        ("local", "release.set"),
        ("guard", "release.step"),
        ("guard", "release.promoted"),
    ]
    assert shares(released.releases.rollback("acme", "pirate").release) == {"v1": 100}


def test_large_weights_stay_within_what_a_release_may_have(released: ControlPlane) -> None:
    info = put(released, SCHEDULE, v1=999_983, v2=999_979, v3=0)
    assert max(shares(info).values()) <= 1_000_000
    total = sum(shares(info).values())
    assert shares(info)["v3"] / total == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize(
    ("plan", "weights", "words"),
    [
        (GUARD, {"v2": 100}, "needs two versions for a guard"),
        (SCHEDULE, {"v2": 100}, "needs two versions for a schedule"),
        (SCHEDULE, {"v1": 0, "v2": 100}, "gives nothing to versions before v2"),
        (GUARD, {"v1": 100, "v2": 0}, "gives nothing to v2, the newest"),
        (ReleasePlan(shadow=ShadowPlan("v9", 0.5)), {"v1": 100}, "no version v9 that is ready"),
        (ReleasePlan(shadow=ShadowPlan("v1", 0.5)), {"v1": 100}, "gives traffic already"),
        (replace(SCHEDULE, shadow=ShadowPlan("v2", 0.5)), {"v1": 100, "v2": 0}, "gives traffic already"),
        (ReleasePlan(shadow=ShadowPlan("v2", 0.0)), {"v1": 100}, "a share above 0"),
    ],
)
def test_a_plan_that_the_targets_do_not_allow_changes_nothing(
    released: ControlPlane, plan: ReleasePlan, weights: dict[str, int], words: str
) -> None:
    before = in_force(released)
    with pytest.raises(InvalidValue, match=words):
        put(released, plan, **weights)
    assert in_force(released) == before
    assert num_runs(released) == 0


def test_a_shadow_is_part_of_the_release_and_ends_with_it(released: ControlPlane) -> None:
    shadow = ReleasePlan(shadow=ShadowPlan("v2", 0.5, keep_texts=True))
    assert put(released, shadow, v1=100, v2=0).plan == shadow
    assert in_force(released).run is None
    assert released.releases.promote("acme", "pirate").plan == ReleasePlan()


def test_a_second_schedule_waits_for_the_end_of_the_first(released: ControlPlane) -> None:
    put(released, SCHEDULE, v1=100, v2=0)
    before = in_force(released)
    with pytest.raises(
        Conflict, match="running at step 1, and a release has one: promote or roll back first"
    ):
        put(released, SCHEDULE, v1=100, v3=0)
    released.releases.pause("acme", "pirate")
    with pytest.raises(Conflict, match="paused at step 1"):
        put(released, SCHEDULE, v1=100, v3=0)
    assert in_force(released).revision == before.revision
    released.releases.promote("acme", "pirate", "v2")
    assert put(released, SCHEDULE, v2=100, v3=0).run is not None


def test_a_pause_keeps_everything_and_a_resume_begins_the_step_again(released: ControlPlane) -> None:
    put(released, SCHEDULE, v1=100, v2=0)
    change(released, lambda _, run: setattr(run, "guard_state", b"{}"))
    before = in_force(released)
    with pytest.raises(Conflict, match="only a paused one can be resumed"):
        released.releases.resume("acme", "pirate")
    with pytest.raises(PreconditionFailed):
        released.releases.pause("acme", "pirate", if_revision=[99])
    paused = released.releases.pause("acme", "pirate", if_revision=[before.revision])
    assert paused == in_force(released)
    assert (paused.run.status, paused.targets, paused.revision) == (
        "paused",
        before.targets,
        before.revision,
    )
    with released.database.read() as session:
        assert release_runs.running(session) == []
    with pytest.raises(Conflict, match="only a running one can be paused"):
        released.releases.pause("acme", "pirate")
    with pytest.raises(PreconditionFailed):
        released.releases.resume("acme", "pirate", if_revision=[99])
    resumed = released.releases.resume("acme", "pirate", if_revision=[before.revision])
    assert resumed == in_force(released)
    assert (resumed.run.status, resumed.run.step) == ("running", 0)
    assert resumed.run.since > before.run.since
    assert change(released, lambda _, run: run.guard_state) is None
    assert actions(released)[1:] == [("local", "release.pause"), ("local", "release.resume")]


def test_nothing_is_paused_where_nothing_is_watched(released: ControlPlane) -> None:
    for act in (released.releases.pause, released.releases.resume):
        with pytest.raises(Conflict, match="it has no guard and no schedule"):
            act("acme", "pirate")


def _promote(plane: ControlPlane) -> None:
    plane.releases.promote("acme", "pirate", "v2")


def _promote_another(plane: ControlPlane) -> None:
    plane.releases.promote("acme", "pirate", "v3")


def _put_other_weights(plane: ControlPlane) -> None:
    put(plane, ReleasePlan(), v1=50, v2=50)


def _put_all(plane: ControlPlane) -> None:
    put(plane, ReleasePlan(), v1=0, v2=100)


def _roll_back(plane: ControlPlane) -> None:
    plane.releases.rollback("acme", "pirate")


def _upload(plane: ControlPlane) -> None:
    """A version whose upload asks for the release at once."""
    info = plane.add_unchecked("acme", "pirate", 9, release=True)
    plane.validation.accept(info, {"verdict": "ok"})


def _delete(plane: ControlPlane) -> None:
    plane.catalog.delete_adapter("acme", "pirate")


@pytest.mark.parametrize(
    ("act", "status"),
    [
        (_promote, "promoted"),
        (_put_all, "promoted"),
        (_roll_back, "rolled_back"),
        (_promote_another, None),
        (_put_other_weights, None),
        (_upload, None),
        (_delete, None),
    ],
)
@pytest.mark.parametrize("paused", [False, True])
def test_any_other_change_of_the_release_ends_what_watched_it(
    released: ControlPlane, act: Callable[[ControlPlane], None], status: str | None, paused: bool
) -> None:
    began = put(released, SCHEDULE, v1=100, v2=0)
    if paused:
        released.releases.pause("acme", "pirate")
    act(released)
    with released.database.read() as session:
        row = session.get(ReleaseRun, ("acme", "pirate"))
        assert release_runs.running(session) == []
        assert (None if row is None else row.status) == status
    if status is not None:
        info = in_force(released)
        assert (info.began, info.run.status, info.run.revision) == (began.revision, status, info.revision)
        with pytest.raises(Conflict, match=f"The release is {status}"):
            released.releases.pause("acme", "pirate")
        put(released, ReleasePlan(), v1=50, v3=50)
        assert num_runs(released) == 0


def test_going_back_passes_over_the_steps_of_a_schedule(released: ControlPlane) -> None:
    put(released, SCHEDULE, v1=100, v2=0)
    change(released, lambda session, run: release_runs.take_step(session, run, ScheduleState(1, 1.0)))
    change(
        released, lambda session, run: release_runs.take_step(session, run, ScheduleState(2, 2.0, "promoted"))
    )
    put(released, ReleasePlan(), v1=50, v3=50)
    back = [released.releases.rollback("acme", "pirate").release for _ in range(2)]
    assert [shares(info) for info in back] == [{"v2": 100}, {"v1": 100}]


def test_the_guard_restores_what_was_in_force_before_it(released: ControlPlane) -> None:
    put(released, ReleasePlan(), v1=80, v2=20)
    began = put(released, SCHEDULE, v2=100, v3=0)
    change(released, lambda session, run: release_runs.take_step(session, run, ScheduleState(1, 1.0)))
    info = change(released, lambda session, run: release_runs.roll_back(session, run, "guard: error_rate"))
    assert info == in_force(released)
    assert (shares(info), info.origin, info.restores) == (
        {"v1": 80, "v2": 20},
        "rollback",
        began.revision - 1,
    )
    assert (info.actor, info.reason, info.plan) == ("guard", "guard: error_rate", ReleasePlan())
    assert (info.run.status, info.run.reason, info.began) == (
        "rolled_back",
        "guard: error_rate",
        began.revision,
    )
    assert actions(released)[-1] == ("guard", "release.rolled_back")
    assert shares(released.releases.rollback("acme", "pirate").release) == {"v1": 100}


def test_the_guard_does_not_go_back_to_what_serves_the_bad_version(released: ControlPlane) -> None:
    put(released, GUARD, v1=90, v2=10)
    put(released, GUARD, v1=80, v2=20)
    info = change(released, lambda session, run: release_runs.roll_back(session, run, "guard: ttft"))
    assert shares(info) == {"v1": 100}


def test_without_an_earlier_release_that_is_usable_all_traffic_goes_to_the_control(
    released: ControlPlane,
) -> None:
    put(released, GUARD, v2=90, v3=10)
    with released.database.write() as session:
        session.get_one(AdapterVersion, ("acme", "pirate", 1)).state = "corrupt"
    info = change(released, lambda session, run: release_runs.roll_back(session, run, "x" * 500))
    assert shares(info) == {"v2": 100}
    assert info.reason == "x" * 200


def test_the_actor_of_a_pause_is_recorded(released: ControlPlane) -> None:
    put(released, GUARD, v1=90, v2=10)
    released.releases.pause("acme", "pirate", by=LOCAL)
    with released.database.read() as session:
        row = session.scalars(select(AuditRow).where(AuditRow.action == "release.pause")).one()
    assert '"status":"paused"' in (row.after or "")
    assert '"status":"running"' in (row.before or "")


def test_a_tenant_has_a_limit_of_watched_releases(
    released: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release_runs, "MAX_RUNS", 1)
    plane = released
    plane.tenants.create("zeta", weight=1.0)
    both = targets(v1=1, v2=1)
    for tenant, name in (("acme", "other"), ("zeta", "own")):
        for seed in (1, 2):
            plane.add(tenant, name, seed)
    plane.releases.put("acme", "other", both, plan=GUARD)
    plane.releases.put("acme", "other", both, plan=GUARD)  # again is no second one
    plane.releases.pause("acme", "other")
    plane.releases.put("zeta", "own", both, plan=GUARD)
    with pytest.raises(Conflict, match="has 1 releases with a guard or a schedule"):
        put(plane, SCHEDULE, v1=1, v2=1)
    assert in_force(plane).revision == 1
    put(plane, ReleasePlan(), v1=1, v2=1)
    plane.releases.promote("acme", "other")
    assert put(plane, SCHEDULE, v1=1, v2=1).run is not None
