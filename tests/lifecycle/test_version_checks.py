"""Uploads and the check of their numbers: who waits, what is answered, and what is checked later."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.control.audit.log import AuditFilter
from loraplex.control.db.tables import AdapterVersion
from loraplex.lifecycle import version_checks
from loraplex.lifecycle.version_checks import (
    FIRST_RETRY_S,
    LEFT_ALONE_S,
    LONGEST_RETRY_S,
    MAX_CHECKS,
    MAX_DEATHS,
    VersionChecks,
)
from loraplex.serving.errors import (
    EngineDraining,
    EngineLost,
    EngineOverloaded,
    EngineUnavailable,
    ServingError,
)
from support.faults.damage import flip_a_bit
from support.http.admin_plane import AdminPlane, adapter_files, admin_client, assert_problem

VERSIONS = "/tenants/acme/adapters/support/versions"


@pytest.fixture
def impatient(tmp_path: Path) -> Any:
    """A plane whose uploads wait for half a second."""
    made = AdminPlane(tmp_path, wait_s=0.5)
    yield made
    made.close()


async def push(plane: AdminPlane, root: Path, seed: int = 1, *, wait: bool | None = None) -> httpx.Response:
    query = {} if wait is None else {"wait": str(wait).lower()}
    async with admin_client(plane.app) as client:
        return await client.post(
            VERSIONS, files=adapter_files(root / f"seed-{seed}", seed=seed), params=query
        )


async def show(plane: AdminPlane, version: str = "v1", name: str = "support") -> dict[str, Any]:
    async with admin_client(plane.app) as client:
        found: dict[str, Any] = (await client.get(f"/tenants/acme/adapters/{name}/versions/{version}")).json()
        return found


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.002)


@asynccontextmanager
async def in_background(checks: VersionChecks) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(checks.run())
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def state(plane: AdminPlane, version: str = "v1", name: str = "support") -> str:
    return plane.services.catalog.get_version("acme", name, version).state


async def test_an_upload_waits_for_its_verdict(plane: AdminPlane, tmp_path: Path) -> None:
    plane.make_tenant()
    plane.measure.hold()
    upload = asyncio.create_task(push(plane, tmp_path))
    await until(lambda: plane.measure.num_running == 1)
    assert (state(plane), upload.done()) == ("validating", False)
    plane.measure.release()
    answer = await upload
    assert answer.status_code == 201
    assert answer.json()["state"] == "ready"
    error = answer.json()["report"]["reference_error"]
    assert (error["verdict"], error["tolerance"]) == ("equal", 3.0)
    assert error["max"] < 1.0
    assert (plane.measure.tenants, plane.outcomes) == (["acme"], ["ready"])
    again = await push(plane, tmp_path)
    assert (again.status_code, again.json()["version"]) == (200, "v1")
    assert plane.measure.measured == ["support@v1"]
    plane.check_integrity()


@pytest.mark.parametrize("scale", [1.02, 0.98, float("inf")])
async def test_wrong_numbers_are_refused_with_the_report(
    plane: AdminPlane, tmp_path: Path, scale: float
) -> None:
    plane.make_tenant()
    plane.measure.scale = scale
    problem = assert_problem(await push(plane, tmp_path), 422, "numerical_mismatch")
    assert problem["version"] == "v1"
    assert "support@v1 was rejected: model.layers." in problem["detail"]
    assert problem["report"]["reference_error"]["verdict"] in ("mismatch", "overflow")
    found = await show(plane)
    assert (found["state"], found["report"]) == ("rejected", problem["report"])
    assert plane.outcomes == ["rejected"]
    assert plane.engine.drops == [found["digest"]]
    assert list(plane.services.artifacts.store.digests()) == []
    async with admin_client(plane.app) as client:
        assert_problem(await client.get("/tenants/acme/adapters/support"), 404, "adapter_not_found")
        pin = await client.put(f"{VERSIONS}/v1/pin")
        assert_problem(pin, 409, "conflict")
        assert_problem(await client.get(f"{VERSIONS}/v1/archive"), 404, "version_not_found")
    plane.check_integrity()
    # The same bytes are checked again, as the next version.
    plane.measure.scale = 1.0
    answer = await push(plane, tmp_path)
    assert (answer.status_code, answer.json()["version"]) == (201, "v2")
    plane.check_integrity()


async def test_the_audit_log_has_the_upload_its_check_and_the_refusal(
    plane: AdminPlane, tmp_path: Path
) -> None:
    plane.make_tenant()
    plane.measure.scale = 2.0
    await push(plane, tmp_path)
    rows = reversed(plane.services.audit.list(AuditFilter(tenant="acme")).items)
    assert [(row.action, row.outcome, row.code) for row in rows][1:] == [
        ("version.upload", "done", None),
        ("version.check", "refused", "numerical_mismatch"),
        ("version.upload", "refused", "numerical_mismatch"),
    ]


async def test_an_upload_that_does_not_wait_is_polled(plane: AdminPlane, tmp_path: Path) -> None:
    plane.make_tenant()
    plane.measure.hold()
    answer = await push(plane, tmp_path, wait=False)
    assert (answer.status_code, answer.json()["state"]) == (202, "validating")
    assert answer.json()["report"]["reference_error"] is None
    assert answer.headers["location"] == f"/admin/v1{VERSIONS}/v1"
    again = await push(plane, tmp_path, wait=False)
    assert (again.status_code, again.json()["version"]) == (202, "v1")
    async with admin_client(plane.app) as client:
        assert (await client.get(answer.headers["location"].removeprefix("/admin/v1"))).json()[
            "state"
        ] == "validating"
        assert_problem(await client.put(f"{VERSIONS}/v1/pin"), 409, "conflict")
        promote = await client.post("/tenants/acme/adapters/support/release/promote", json={"version": "v1"})
        assert_problem(promote, 404, "release_not_found")
    plane.measure.release()
    await until(lambda: state(plane) == "ready")
    answer = await push(plane, tmp_path, wait=False)
    assert (answer.status_code, answer.json()["state"]) == (200, "ready")
    assert plane.measure.measured == ["support@v1"]


async def test_wait_has_two_values(plane: AdminPlane, tmp_path: Path) -> None:
    plane.make_tenant()
    async with admin_client(plane.app) as client:
        answer = await client.post(VERSIONS, files=adapter_files(tmp_path / "a"), params={"wait": "later"})
    assert assert_problem(answer, 400, "invalid_value")["param"] == "wait"


async def test_an_import_is_checked_alike(plane: AdminPlane, tmp_path: Path) -> None:
    plane.make_tenant()
    adapter_files(tmp_path / "made", seed=1)
    body = {"source": f"file://{(tmp_path / 'made').resolve()}"}
    async with admin_client(plane.app) as client:
        plane.measure.scale = 2.0
        assert_problem(await client.post(VERSIONS, json=body), 422, "numerical_mismatch")
        plane.measure.scale = 1.0
        answer = await client.post(VERSIONS, json=body, params={"wait": "false"})
        assert (answer.status_code, answer.json()["version"]) == (202, "v2")
    await until(lambda: state(plane, "v2") == "ready")


@pytest.mark.parametrize(
    "error",
    [
        EngineUnavailable("the engine is away"),
        EngineOverloaded("too many requests"),
        EngineDraining("it ends"),
    ],
)
async def test_an_engine_that_cannot_measure_leaves_the_version_validating(
    plane: AdminPlane, tmp_path: Path, error: ServingError, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version_checks, "FIRST_RETRY_S", LONGEST_RETRY_S)  # for longer than an upload waits
    plane.make_tenant()
    plane.measure.error = error
    answer = await push(plane, tmp_path)
    problem = assert_problem(answer, 503, "numbers_unchecked")
    assert (problem["version"], answer.headers["retry-after"]) == ("v1", "10")
    assert str(error) in problem["detail"]
    assert state(plane) == "validating"
    assert set(plane.outcomes) == {"unchecked"}
    plane.check_integrity()
    # A tenant that uploads the same files again waits for the same version.
    plane.measure.error = None
    answer = await push(plane, tmp_path)
    assert (answer.status_code, answer.json()["state"], answer.json()["version"]) == (200, "ready", "v1")


async def test_an_engine_that_is_back_within_the_wait_is_not_told_of(
    plane: AdminPlane, tmp_path: Path
) -> None:
    plane.make_tenant()
    plane.measure.error = EngineUnavailable("the engine is being restarted")
    upload = asyncio.create_task(push(plane, tmp_path))
    await until(lambda: plane.outcomes == ["unchecked"])
    plane.measure.error = None
    answer = await upload
    assert (answer.status_code, answer.json()["state"]) == (201, "ready")
    assert plane.outcomes == ["unchecked", "ready"]


async def test_a_slow_engine_is_asked_once_while_uploads_come_and_go(
    impatient: AdminPlane, tmp_path: Path
) -> None:
    plane = impatient
    plane.make_tenant()
    plane.measure.hold()
    answers = await asyncio.gather(push(plane, tmp_path), push(plane, tmp_path), push(plane, tmp_path))
    for answer in answers:
        assert "the engine is busy" in assert_problem(answer, 503, "numbers_unchecked")["detail"]
    plane.measure.release()
    await until(lambda: state(plane) == "ready")
    assert plane.measure.measured == ["support@v1"]


async def test_a_version_that_is_deleted_meanwhile_is_not_found(plane: AdminPlane, tmp_path: Path) -> None:
    plane.make_tenant()
    plane.measure.hold()
    upload = asyncio.create_task(push(plane, tmp_path))
    await until(lambda: plane.measure.num_running == 1)
    async with admin_client(plane.app) as client:
        assert (await client.delete(f"{VERSIONS}/v1")).status_code == 204
    plane.measure.error = ServingError("the adapter's bytes are gone")
    plane.measure.release()
    assert_problem(await upload, 404, "version_not_found")
    assert plane.validation.pending() == []
    plane.check_integrity()


async def test_damaged_bytes_are_damage_and_no_verdict(plane: AdminPlane, tmp_path: Path) -> None:
    plane.make_tenant()
    plane.measure.hold()
    upload = asyncio.create_task(push(plane, tmp_path))
    await until(lambda: plane.measure.num_running == 1)
    flip_a_bit(plane.services.artifacts.store.path((await show(plane))["digest"]))
    plane.measure.scale = 2.0
    plane.measure.release()
    assert_problem(await upload, 503, "adapter_unavailable")
    assert state(plane) == "corrupt"
    plane.measure.scale = 1.0
    answer = await push(plane, tmp_path)
    assert (answer.status_code, answer.json()["version"], answer.json()["state"]) == (200, "v1", "ready")
    plane.check_integrity()


async def test_another_servers_verdict_is_the_uploads_answer(plane: AdminPlane, tmp_path: Path) -> None:
    plane.make_tenant()
    plane.measure.hold()
    upload = asyncio.create_task(push(plane, tmp_path))
    await until(lambda: plane.measure.num_running == 1)
    (waiting,) = plane.validation.pending()
    plane.validation.accept(waiting, {"verdict": "equal", "max": 0.5})
    plane.measure.scale = 2.0
    plane.measure.release()
    answer = await upload
    assert (answer.status_code, answer.json()["state"]) == (201, "ready")
    assert answer.json()["report"]["reference_error"]["max"] == 0.5
    assert plane.outcomes == []


async def test_what_a_dead_server_left_is_checked_at_the_start(plane: AdminPlane) -> None:
    plane.make_tenant()
    plane.make_adapter("support", seed=1, check=True)
    plane.make_adapter("support", seed=2, check=True)
    plane.start()
    assert plane.measure.measured == []
    async with in_background(plane.checks):
        await until(lambda: plane.validation.pending() == [])
    assert plane.measure.measured == ["support@v1", "support@v2"]
    assert [target.version for target in plane.services.releases.get("acme", "support").targets] == ["v1"]
    plane.check_integrity()


async def test_a_check_that_fails_is_tried_again_later_and_no_sooner(plane: AdminPlane) -> None:
    plane.make_tenant()
    plane.make_adapter("support", check=True)
    plane.measure.error = EngineUnavailable("the engine is away")
    clock = asyncio.get_running_loop().time
    began = clock()
    async with in_background(plane.checks):
        await until(lambda: len(plane.measure.measured) == 2)
        assert clock() - began >= FIRST_RETRY_S / 2
        plane.measure.error = None
        await until(lambda: state(plane) == "ready")
        await until(lambda: len(plane.outcomes) == 3)  # it is counted when the row is written
    assert plane.outcomes == ["unchecked", "unchecked", "ready"]


async def test_a_version_that_the_engine_dies_of_twice_is_rejected(
    plane: AdminPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version_checks, "FIRST_RETRY_S", 0.02)
    monkeypatch.setattr(version_checks, "FIRST_PAUSE_S", 0.02)
    plane.make_tenant()
    plane.measure.error = EngineLost("the engine process has ended")
    problem = assert_problem(await push(plane, tmp_path), 422, "numerical_crash")
    assert "the engine died twice while it measured this version" in problem["detail"]
    assert plane.measure.measured == ["support@v1"] * MAX_DEATHS
    assert state(plane) == "rejected"
    # The same files are another version, and others are checked as ever.
    plane.measure.error = None
    answer = await push(plane, tmp_path)
    assert (answer.status_code, answer.json()["version"], answer.json()["state"]) == (201, "v2", "ready")


async def test_an_engine_that_is_away_rejects_nothing(
    plane: AdminPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version_checks, "FIRST_RETRY_S", 0.02)
    monkeypatch.setattr(plane.checks, "wait_s", 3.0)
    plane.make_tenant()
    plane.measure.error = EngineUnavailable("the engine process is being restarted")
    assert_problem(await push(plane, tmp_path), 503, "numbers_unchecked")
    assert len(plane.measure.measured) > MAX_DEATHS
    assert state(plane) == "validating"


async def test_a_fresh_version_is_left_to_the_server_that_took_it(plane: AdminPlane) -> None:
    plane.make_tenant()
    async with in_background(plane.checks):
        plane.make_adapter("first", seed=1, check=True)
        await until(lambda: plane.measure.measured == ["first@v1"])  # at the start all are looked at
        await until(lambda: plane.outcomes == ["ready"])
        plane.make_adapter("taken", seed=2, check=True)
        plane.make_adapter("abandoned", seed=3, check=True)
        with plane.database.write() as session:
            row = session.get(AdapterVersion, ("acme", "abandoned", 1))
            assert row is not None
            row.created_at -= timedelta(seconds=LEFT_ALONE_S + 1)
        await until(lambda: len(plane.outcomes) == 2)
    assert plane.measure.measured == ["first@v1", "abandoned@v1"]
    assert state(plane, name="taken") == "validating"


async def test_tenants_take_turns_and_few_are_measured_at_a_time(plane: AdminPlane) -> None:
    tenants = [f"t{number:02}" for number in range(MAX_CHECKS + 2)]
    for tenant in tenants:
        plane.make_tenant(tenant)
    for name in ("a", "b", "c"):
        plane.make_adapter(name, tenants[0], seed=1, check=True)
    for tenant in tenants[1:]:
        plane.make_adapter("a", tenant, seed=1, check=True)
    plane.measure.hold()
    async with in_background(plane.checks):
        await until(lambda: plane.measure.num_running == MAX_CHECKS)
        assert sorted(plane.measure.tenants) == tenants[:MAX_CHECKS]  # one of the first, however many it has
        plane.measure.release()
        await until(lambda: plane.validation.pending() == [])
    assert plane.measure.most_running == MAX_CHECKS


async def test_the_end_of_the_server_ends_its_checks(
    plane: AdminPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plane.checks, "wait_s", 3.0)
    plane.make_tenant()
    plane.make_adapter("support", check=True)
    plane.measure.hold()
    async with in_background(plane.checks):
        await until(lambda: plane.measure.num_running == 1)
        upload = asyncio.create_task(push(plane, tmp_path))
        await until(lambda: len(plane.services.audit.list(AuditFilter(action="version.upload")).items) == 2)
    assert plane.measure.num_running == 0
    assert_problem(await upload, 503, "numbers_unchecked")
    assert state(plane) == "validating"


async def test_lora_on_experts_is_rejected_in_words_where_the_engine_takes_none(plane: AdminPlane) -> None:
    plane.make_tenant()
    plane.make_adapter("support", check=True)
    with plane.database.write() as session:
        row = session.get(AdapterVersion, ("acme", "support", 1))
        assert row is not None
        row.targets = ["q_proj", "experts.down"]
    async with in_background(plane.checks):
        await until(lambda: plane.outcomes == ["rejected"])
    refusal = (await show(plane))["report"]["refusal"]
    assert refusal["code"] == "unsupported_feature"
    assert "(experts.down) is not served by this engine, which does not run the base on" in refusal["message"]
    assert plane.measure.measured == []
    plane.check_integrity()


async def test_lora_on_experts_is_measured_where_the_engine_has_their_sites(
    plane: AdminPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane.make_tenant()
    plane.make_adapter("support", check=True)
    with plane.database.write() as session:
        row = session.get(AdapterVersion, ("acme", "support", 1))
        assert row is not None
        row.targets = ["experts.down"]
    info = replace(plane.engine.info, sites=("q_proj", "experts.down"))
    monkeypatch.setattr(plane.engine, "_info", info)
    async with in_background(plane.checks):
        await until(lambda: plane.outcomes == ["ready"])
    assert plane.measure.measured == ["support@v1"]
