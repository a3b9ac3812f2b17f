"""Versions that wait for the check of their numbers, and what its verdict makes of them."""

from __future__ import annotations

import pytest

from loraplex.adapters.errors import AdapterRefused
from loraplex.control.audit.log import AuditFilter, AuditLog
from loraplex.control.audit.recorder import Actor
from loraplex.control.catalog.retention import Retention
from loraplex.control.catalog.validation import Decision
from loraplex.control.errors import AdapterUnavailable, ModelNotFound, VersionNotFound
from loraplex.control.release_types import ReleaseTarget
from loraplex.control.types import Refusal, VersionInfo
from support.adapters.drafts import make_adapter
from support.control.plane import ARCH, ControlPlane, at_once, caller, digests
from support.faults.damage import flip_a_bit

EQUAL = {"verdict": "equal", "max": 0.75, "tolerance": 3.0}
MISMATCH = {"verdict": "mismatch", "max": 6.5, "tolerance": 3.0}
WRONG = Refusal("numerical_mismatch", "model.layers.0.self_attn.q_proj is off by 6.5; upload another.")
BY = Actor("key", "acme", "k1", "192.0.2.1", "r-1")


def state(plane: ControlPlane, version: str, name: str = "pirate") -> str:
    return plane.catalog.get_version("acme", name, version).state


def released(plane: ControlPlane, name: str = "pirate") -> tuple[ReleaseTarget, ...]:
    return plane.releases.get("acme", name).targets


def reject(plane: ControlPlane, version: VersionInfo) -> Decision:
    return plane.validation.reject(version, WRONG, MISMATCH)


async def test_a_version_takes_no_traffic_before_its_numbers_are_accepted(plane: ControlPlane) -> None:
    waiting = plane.add_unchecked("acme", "pirate")
    assert (waiting.version, waiting.state) == ("v1", "validating")
    assert plane.validation.pending() == [waiting]
    for model in ("pirate", "pirate@v1", f"pirate@sha256:{waiting.digest[:12]}"):
        with pytest.raises(AdapterUnavailable, match=r"v1 is validating .* try again") as refused:
            await plane.resolver.resolve(caller("acme"), model)
        assert refused.value.retry_after_s == 5.0
    assert [card.id for card in await plane.resolver.list_models(caller("acme"))] == ["org/tiny"]
    plane.check_integrity()

    decision = plane.validation.accept(waiting, EQUAL)
    ready = decision.info
    assert decision.decided
    assert (ready.state, ready.version, ready.report["reference_error"]) == ("ready", "v1", EQUAL)
    assert plane.validation.pending() == []
    for model in ("pirate", "pirate@v1"):
        resolved = await plane.resolver.resolve(caller("acme"), model)
        assert resolved.adapter == ready.ref()
    plane.check_integrity()


async def test_a_name_answers_by_its_release_while_a_later_version_is_checked(plane: ControlPlane) -> None:
    first = plane.add("acme", "pirate", 1)
    second = plane.add_unchecked("acme", "pirate", 2)
    assert (await plane.resolver.resolve(caller("acme"), "pirate")).adapter == first.ref()
    plane.validation.accept(second, EQUAL)
    assert released(plane) == (ReleaseTarget("v1", 100),)


def test_the_uploader_is_who_released_the_first_version(plane: ControlPlane) -> None:
    with plane.store.begin_staging() as staging:
        make_adapter(staging.directory, ARCH, seed=1)
        waiting, _ = plane.catalog.admit("acme", "pirate", staging, check=True, by=BY)
    plane.validation.accept(waiting, EQUAL)
    release = plane.releases.get("acme", "pirate")
    assert (release.origin, release.actor, release.actor_key_id) == ("upload", "key", "k1")
    rows = {row.action: row for row in AuditLog(plane.database).list(AuditFilter()).items}
    check = rows["version.check"]
    assert check.target == "tenants/acme/adapters/pirate/versions/v1"
    assert check.by == BY
    assert (check.before, check.outcome) == ({"state": "validating"}, "done")
    assert check.after == {
        "digest": waiting.digest,
        "state": "ready",
        "verdict": "equal",
        "max_error": 0.75,
        "tolerance": 3.0,
        "release": {"revision": 1, "targets": [{"version": "v1", "weight": 100}], "sticky": "none"},
    }


def test_a_release_that_was_asked_for_comes_with_the_verdict(plane: ControlPlane) -> None:
    plane.add("acme", "pirate", 1)
    second = plane.add_unchecked("acme", "pirate", 2, release=True)
    assert released(plane) == (ReleaseTarget("v1", 100),)
    plane.validation.accept(second, EQUAL)
    assert released(plane) == (ReleaseTarget("v2", 100),)


def test_the_same_bytes_again_are_the_version_that_waits_and_may_ask_for_its_release(
    plane: ControlPlane,
) -> None:
    plane.add("acme", "pirate", 1)
    waiting = plane.add_unchecked("acme", "pirate", 2)
    assert plane.add_unchecked("acme", "pirate", 2, release=True) == waiting
    plane.validation.accept(waiting, EQUAL)
    assert released(plane) == (ReleaseTarget("v2", 100),)
    plane.check_integrity()


def test_a_rejected_version_keeps_its_report_and_nothing_else(plane: ControlPlane) -> None:
    plane.tenants.update("acme", {"limits": {"max_adapters": 1}})
    waiting = plane.add_unchecked("acme", "pirate")
    plane.catalog.set_tags("acme", "pirate", ["eu"])
    decision = reject(plane, waiting)
    rejected = decision.info
    assert decision.decided
    assert digests(decision.removal) == {waiting.digest}
    assert plane.stored() == set()
    assert rejected.state == "rejected"
    assert rejected.report["reference_error"] == MISMATCH
    assert rejected.report["refusal"] == {"code": WRONG.code, "message": WRONG.message}
    assert plane.catalog.get_version("acme", "pirate", "v1") == rejected
    assert [v.state for v in plane.catalog.list_versions("acme", "pirate").items] == ["rejected"]
    assert plane.catalog.list_adapters("acme").items == ()
    with pytest.raises(VersionNotFound, match="was rejected"):
        plane.catalog.delete_version("acme", "pirate", "v1")
    (row,) = AuditLog(plane.database).list(AuditFilter(action="version.check")).items
    assert (row.outcome, row.code, row.after["state"]) == ("refused", "numerical_mismatch", "rejected")
    assert row.before == {"state": "validating", "tags": ["eu"]}
    plane.check_integrity()
    # Its place in the quota is free again, and the next version has the next number.
    plane.add("acme", "other", 3)
    with pytest.raises(AdapterRefused, match="may have 1 adapters"):
        plane.add("acme", "pirate", 2)
    plane.catalog.delete_adapter("acme", "other")
    assert plane.add("acme", "pirate", 2).version == "v2"
    assert released(plane) == (ReleaseTarget("v2", 100),)
    assert plane.catalog.get_adapter("acme", "pirate").tags == ()
    plane.check_integrity()


def test_tags_stay_while_another_version_is_left(plane: ControlPlane) -> None:
    plane.add("acme", "pirate", 1)
    plane.catalog.set_tags("acme", "pirate", ["a-b", "ab", "a.b", "a_b"])
    reject(plane, plane.add_unchecked("acme", "pirate", 2))
    assert plane.catalog.get_adapter("acme", "pirate").tags == ("a-b", "a.b", "a_b", "ab")


async def test_a_rejected_version_is_no_model(plane: ControlPlane) -> None:
    reject(plane, plane.add_unchecked("acme", "pirate"))
    for model in ("pirate", "pirate@v1"):
        with pytest.raises(ModelNotFound):
            await plane.resolver.resolve(caller("acme"), model)


def test_bytes_that_were_rejected_are_checked_again(plane: ControlPlane) -> None:
    reject(plane, plane.add_unchecked("acme", "pirate"))
    again = plane.add_unchecked("acme", "pirate")
    assert (again.version, again.state) == ("v2", "validating")
    plane.validation.accept(again, EQUAL)
    assert [state(plane, version) for version in ("v1", "v2")] == ["rejected", "ready"]
    plane.check_integrity()


def test_bytes_of_a_rejected_version_that_others_have_stay(plane: ControlPlane) -> None:
    theirs = plane.add("rival", "parrot", 1)
    decision = reject(plane, plane.add_unchecked("acme", "pirate", 1))
    assert decision.decided
    assert digests(decision.removal) == set()
    assert plane.stored() == {theirs.digest}
    plane.check_integrity()


def test_of_verdicts_that_differ_one_counts(plane: ControlPlane) -> None:
    other = ControlPlane(plane.root)
    for seed in range(4):
        waiting = plane.add_unchecked("acme", "pirate", seed)
        accepted, rejected = at_once(
            lambda waiting=waiting: plane.validation.accept(waiting, EQUAL),
            lambda waiting=waiting: reject(other, waiting),
        )
        assert accepted.decided != rejected.decided, "both decided, or neither"
        assert accepted.info == rejected.info == plane.catalog.get_version("acme", "pirate", waiting.version)
        assert accepted.info.state == ("ready" if accepted.decided else "rejected")
        plane.check_integrity()
    other.close()


def release_of_upload(plane: ControlPlane, seed: int) -> VersionInfo:
    with plane.store.begin_staging() as staging:
        make_adapter(staging.directory, ARCH, seed=seed)
        return plane.catalog.admit("acme", "pirate", staging, check=True, release=True)[0]


@pytest.mark.parametrize("late", [1, 2])
def test_a_late_verdict_does_not_bring_an_older_version_back(plane: ControlPlane, late: int) -> None:
    plane.add("acme", "pirate", 0)
    first, second = release_of_upload(plane, 1), release_of_upload(plane, 2)
    for version in (second, first) if late == 1 else (first, second):
        assert plane.validation.accept(version, EQUAL).info.state == "ready"
    assert released(plane) == (ReleaseTarget("v3", 100),)
    plane.check_integrity()


def test_an_older_version_comes_back_where_that_is_asked_for_again(plane: ControlPlane) -> None:
    first, second = release_of_upload(plane, 1), release_of_upload(plane, 2)
    plane.validation.accept(second, EQUAL)
    assert released(plane) == (ReleaseTarget("v2", 100),)
    assert release_of_upload(plane, 1) == first
    plane.validation.accept(first, EQUAL)
    assert released(plane) == (ReleaseTarget("v1", 100),)
    plane.check_integrity()


def test_tenants_with_few_waiting_versions_are_not_behind_one_with_many(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraplex.control.catalog.validation.MAX_PENDING", 3)
    for seed in range(4):
        plane.add_unchecked("acme", "pirate", seed)
    plane.add_unchecked("rival", "parrot")
    shown = [(info.tenant_id, info.version) for info in plane.validation.pending()]
    assert shown == [("acme", "v1"), ("rival", "v1"), ("acme", "v2")]


def test_a_version_that_went_meanwhile_stays_gone(plane: ControlPlane) -> None:
    waiting = plane.add_unchecked("acme", "pirate")
    plane.catalog.delete_version("acme", "pirate", "v1")
    assert plane.validation.pending() == []
    for decision in (plane.validation.accept(waiting, EQUAL), reject(plane, waiting)):
        assert (decision.info.state, decision.decided) == ("deleted", False)
    plane.check_integrity()


def test_a_restart_leaves_what_waits_waiting(plane: ControlPlane) -> None:
    waiting = plane.add_unchecked("acme", "pirate")
    again = ControlPlane(plane.root)
    again.start()
    assert again.validation.pending() == [waiting]
    assert again.stored() == {waiting.digest}
    again.check_integrity()
    again.close()


def test_damage_does_not_stand_in_for_a_check(plane: ControlPlane) -> None:
    waiting = plane.add_unchecked("acme", "pirate")
    flip_a_bit(plane.store.path(waiting.digest))
    assert plane.catalog.mark_damaged(waiting.digest)
    assert state(plane, "v1") == "corrupt"
    assert plane.validation.pending() == []
    assert not plane.validation.accept(waiting, EQUAL).decided
    healed = plane.add_unchecked("acme", "pirate")
    assert (healed.version, healed.state) == ("v1", "validating")
    assert plane.validation.pending() == [healed]
    plane.check_integrity()


async def test_a_version_for_another_base_is_checked_when_that_base_is_back(plane: ControlPlane) -> None:
    waiting = plane.add_unchecked("acme", "pirate")
    other = ControlPlane(plane.root, base_seed=1)
    other.start()
    assert other.validation.pending() == []
    assert state(other, "v1") == "incompatible"
    with pytest.raises(AdapterUnavailable, match="made for another base model; upload one made for this one"):
        await other.resolver.resolve(caller("acme"), "pirate@v1")
    assert not other.validation.accept(waiting, EQUAL).decided
    other.check_integrity()
    other.close()
    back = ControlPlane(plane.root)
    back.start()
    assert back.validation.pending() == [waiting]
    back.close()


def test_retention_neither_deletes_nor_counts_what_waits(plane: ControlPlane) -> None:
    retention = Retention(plane.database, plane.artifacts, 1)
    for seed in (1, 2):
        plane.add("acme", "pirate", seed)
    waiting = plane.add_unchecked("acme", "pirate", 3)
    retention.apply("acme", "pirate")
    assert [state(plane, f"v{number}") for number in (1, 2, 3)] == ["ready", "ready", "validating"]
    plane.validation.accept(waiting, EQUAL)
    retention.apply("acme", "pirate")
    assert [state(plane, f"v{number}") for number in (1, 2, 3)] == ["ready", "deleted", "ready"]
    plane.check_integrity()
