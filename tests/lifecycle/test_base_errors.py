"""A version that was trained on another form of the base: when that is measured, and what its report says."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.admin.runtime_loading import RuntimeLoading
from loraplex.control.audit.recorder import Actor
from loraplex.control.errors import DatabaseUnavailable
from loraplex.control.types import VersionInfo
from loraplex.engine.base_error.messages import BaseErrorFigures
from loraplex.lifecycle import base_errors
from support.adapters.drafts import draft_adapter
from support.http.admin_plane import ARCH, AdminPlane, admin_client

NOT_YET = "the change of its answers has not been measured yet"
FORMS = "the adapter was trained on bitsandbytes nf4 of this base and is served over full precision"
FIGURES = {"kl": 0.25, "top1": 0.75, "tokens": 256, "reason": None}


@pytest.fixture
def impatient(tmp_path: Path) -> Iterator[AdminPlane]:
    """A plane whose uploads wait for three seconds: long enough for a verdict, also on a busy machine."""
    made = AdminPlane(tmp_path, wait_s=3.0)
    yield made
    made.close()


@pytest.fixture
def patient(tmp_path: Path) -> Iterator[AdminPlane]:
    """A plane whose uploads wait for longer than a test may take."""
    made = AdminPlane(tmp_path, wait_s=600.0)
    yield made
    made.close()


@pytest.fixture
def bounded(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[AdminPlane]:
    """A plane that warns from the divergence on that is the fixture's parameter."""
    made = AdminPlane(tmp_path, warn_above=request.param)
    yield made
    made.close()


async def push(
    plane: AdminPlane,
    root: Path,
    name: str = "support",
    tenant: str = "acme",
    *,
    form: str = "-bnb-4bit",
    wait: bool = True,
) -> httpx.Response:
    """`name`: also of the files, which differ by it."""
    folder = root / tenant / name
    draft_adapter(ARCH, base_model_name_or_path=f"org/base{form}", lora_alpha=8 + len(name)).write(folder)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    async with admin_client(plane.app) as client:
        path = f"/tenants/{tenant}/adapters/{name}/versions"
        return await client.post(path, files=files, params={} if wait else {"wait": "false"})


async def show(plane: AdminPlane, name: str = "support") -> dict[str, Any]:
    async with admin_client(plane.app) as client:
        found: dict[str, Any] = (await client.get(f"/tenants/acme/adapters/{name}/versions/v1")).json()
        return found


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.002)


def is_ready(plane: AdminPlane, name: str, tenant: str) -> bool:
    return plane.services.catalog.get_version(tenant, name, "v1").state == "ready"


def check_of(report: dict[str, Any]) -> tuple[bool, str]:
    (check,) = [check for check in report["checks"] if check["name"] == "base_form"]
    return check["ok"], check["detail"]


async def test_an_upload_shows_the_figures_and_warns(plane: AdminPlane, tmp_path: Path) -> None:
    plane.make_tenant()
    answer = (await push(plane, tmp_path)).json()
    assert answer["state"] == "ready"
    forms = {"trained_on": "bitsandbytes nf4", "served": "full precision"}
    assert answer["report"]["base_error"] == forms | FIGURES
    warning = (
        "which changes its answers by 0.25 nat a token and 25.0% of their most likely tokens (256 tokens"
    )
    assert check_of(answer["report"])[0] is False
    assert check_of(answer["report"])[1].startswith(f"warning: {FORMS}, {warning}")
    assert (await show(plane))["report"] == answer["report"]
    (task,) = plane.base_measure.tasks
    assert (task.trained_on, task.quantise, task.digest) == ("bitsandbytes nf4", "none", answer["digest"])
    assert Path(task.tensors_path).is_file()
    assert sum(map(len, task.prompts)) == 256
    plane.check_integrity()


async def test_what_changes_little_is_no_warning(plane: AdminPlane, tmp_path: Path) -> None:
    plane.make_tenant()
    plane.base_measure.figures = BaseErrorFigures(0.0999, 0.9, 256)
    report = (await push(plane, tmp_path)).json()["report"]
    assert check_of(report)[0] is True
    assert check_of(report)[1].startswith(f"{FORMS}, which changes its answers by 0.1 nat")


@pytest.mark.parametrize(
    ("bounded", "warns"), [(0.0, True), (0.25, True), (0.26, False)], indirect=["bounded"]
)
async def test_the_setting_is_the_least_that_warns(bounded: AdminPlane, warns: bool, tmp_path: Path) -> None:
    bounded.make_tenant()
    report = (await push(bounded, tmp_path)).json()["report"]
    assert check_of(report)[0] is not warns


async def test_a_version_takes_traffic_while_it_is_measured(impatient: AdminPlane, tmp_path: Path) -> None:
    plane = impatient
    plane.make_tenant()
    plane.base_measure.hold()
    upload = asyncio.create_task(push(plane, tmp_path))
    await until(lambda: plane.base_measure.num_running == 1)
    assert plane.services.catalog.get_version("acme", "support", "v1").state == "ready"
    assert plane.services.releases.get("acme", "support").targets[0].weight == 100
    # The upload waits no longer than for its verdict.
    answer = await upload
    assert answer.status_code == 201
    error = answer.json()["report"]["base_error"]
    assert (error["kl"], error["reason"]) == (None, NOT_YET)
    assert check_of(answer.json()["report"])[0] is False
    plane.base_measure.release()
    await until(lambda: plane.base_measure.num_running == 0)
    assert (await plane.base_errors.wait(_version(plane), 60)).report["base_error"]["kl"] == 0.25
    assert (await show(plane))["report"]["base_error"]["kl"] == 0.25


async def test_a_training_loop_does_not_wait_for_figures(patient: AdminPlane, tmp_path: Path) -> None:
    plane = patient
    plane.make_tenant()
    plane.base_measure.hold()
    draft_adapter(ARCH, base_model_name_or_path="org/base-bnb-4bit").write(tmp_path / "step-1")
    loading = RuntimeLoading(plane.services)
    async with asyncio.timeout(120):  # an upload would wait for 600 s
        loaded = await loading.load(Actor("key", "acme", "k1"), "support", str(tmp_path / "step-1"))
    assert loaded.state == "ready"
    await until(lambda: plane.base_measure.num_running == 1)
    plane.base_measure.release()
    assert (await plane.base_errors.wait(loaded, 60)).report["base_error"]["kl"] == 0.25


def _version(plane: AdminPlane, name: str = "support", tenant: str = "acme") -> VersionInfo:
    return plane.services.catalog.get_version(tenant, name, "v1")


@pytest.mark.parametrize("form", ["", "-GPTQ-Int4", "-mlx-4bit"])
async def test_what_cannot_be_computed_is_not_begun(plane: AdminPlane, tmp_path: Path, form: str) -> None:
    plane.make_tenant()
    assert (await push(plane, tmp_path, form=form)).json()["state"] == "ready"
    assert plane.base_measure.tasks == []


async def test_versions_beyond_the_bound_are_measured_when_their_tenant_has_no_other(
    impatient: AdminPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base_errors, "MOST_WAITING", 1)
    plane = impatient
    plane.make_tenant()
    plane.base_measure.hold()
    names = ("aa", "bbb", "cccc")
    for name in names:
        assert (await push(plane, tmp_path, name)).status_code == 201
    assert plane.base_measure.num_running == 1
    plane.base_measure.release()
    await until(lambda: all(_version(plane, name).report["base_error"]["kl"] == 0.25 for name in names))
    assert len(plane.base_measure.tasks) == 3


async def test_a_database_that_is_away_meanwhile_loses_no_measurement_for_good(
    impatient: AdminPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base_errors, "MOST_WAITING", 1)
    plane, unmeasured, asked = impatient, impatient.validation.unmeasured, 0
    plane.make_tenant()

    def fails() -> list[VersionInfo]:
        nonlocal asked
        asked += 1
        raise DatabaseUnavailable

    plane.base_measure.hold()
    for name in ("aa", "bbb"):
        await push(plane, tmp_path, name)
    monkeypatch.setattr(plane.validation, "unmeasured", fails)
    plane.base_measure.release()
    await until(lambda: asked == 1)
    monkeypatch.setattr(plane.validation, "unmeasured", unmeasured)
    assert (await push(plane, tmp_path, "cccc")).status_code == 201
    await until(
        lambda: all(_version(plane, name).report["base_error"]["kl"] == 0.25 for name in ("bbb", "cccc"))
    )


async def test_figures_that_came_before_anybody_waits_are_told(impatient: AdminPlane, tmp_path: Path) -> None:
    plane = impatient
    plane.make_tenant()
    plane.base_measure.hold()
    assert (await push(plane, tmp_path)).status_code == 201
    before = _version(plane)
    assert before.report["base_error"]["kl"] is None
    plane.base_measure.release()
    await until(lambda: _version(plane).report["base_error"]["kl"] == 0.25)
    assert (await plane.base_errors.wait(before, 0)).report["base_error"]["kl"] == 0.25


async def test_a_reason_takes_the_place_of_figures(plane: AdminPlane, tmp_path: Path) -> None:
    plane.make_tenant()
    plane.base_measure.figures = BaseErrorFigures(reason="it takes 9 MiB of memory, and may take 8 MiB")
    report = (await push(plane, tmp_path)).json()["report"]
    assert report["base_error"] == {
        "trained_on": "bitsandbytes nf4", "served": "full precision", "kl": None, "top1": None, "tokens": None,
        "reason": "it takes 9 MiB of memory, and may take 8 MiB",
    }  # fmt: skip
    assert check_of(report) == (False, f"warning: {FORMS}: it takes 9 MiB of memory, and may take 8 MiB")


async def test_a_failure_is_a_reason_and_fails_no_upload(plane: AdminPlane, tmp_path: Path) -> None:
    plane.make_tenant()
    plane.base_measure.error = RuntimeError("a bug")
    answer = await push(plane, tmp_path)
    assert (answer.status_code, answer.json()["state"]) == (201, "ready")
    reason = answer.json()["report"]["base_error"]["reason"]
    assert reason == "the measurement did not begin; the server's log says why"


async def test_one_is_measured_at_a_time_and_tenants_take_turns(plane: AdminPlane, tmp_path: Path) -> None:
    names = [("aa", "acme"), ("bbb", "acme"), ("cccc", "acme"), ("ddddd", "other")]
    for tenant in ("acme", "other"):
        plane.make_tenant(tenant)
    plane.base_measure.hold()
    for name, tenant in names:
        assert (await push(plane, tmp_path, name, tenant, wait=False)).status_code == 202
        await until(partial(is_ready, plane, name, tenant))
    assert len(plane.base_measure.tasks) == 1
    plane.base_measure.release()
    versions = [_version(plane, name, tenant) for name, tenant in names]
    await asyncio.gather(*(plane.base_errors.wait(version, 60) for version in versions))
    digests = {version.digest: version.name for version in versions}
    order = [digests[task.digest] for task in plane.base_measure.tasks]
    assert plane.base_measure.most_running == 1
    assert order == ["aa", "ddddd", "bbb", "cccc"]


async def test_the_next_server_measures_what_this_one_did_not(plane: AdminPlane, tmp_path: Path) -> None:
    plane.make_tenant()
    plane.base_measure.hold()
    upload = asyncio.create_task(push(plane, tmp_path))
    await until(lambda: plane.base_measure.num_running == 1)
    await plane.base_errors.close()
    assert (await upload).json()["report"]["base_error"]["reason"] == NOT_YET
    assert plane.base_measure.num_running == 0
    plane.base_measure.release()
    checking = asyncio.create_task(plane.checks.run())
    await until(lambda: _version(plane).report["base_error"]["kl"] == 0.25)
    checking.cancel()
    await asyncio.gather(checking, return_exceptions=True)
    assert len(plane.base_measure.tasks) == 2
    await plane.base_errors.start_unmeasured()
    assert len(plane.base_measure.tasks) == 2  # nothing is left


async def test_a_base_that_is_served_otherwise_meanwhile_is_a_reason(
    plane: AdminPlane, tmp_path: Path
) -> None:
    plane.make_tenant()
    plane.base_measure.hold()
    upload = asyncio.create_task(push(plane, tmp_path))
    await until(lambda: plane.base_measure.num_running == 1)
    await plane.base_errors.close()
    await upload
    plane.validation.base = dataclasses.replace(plane.validation.base, quantise="int8")
    await plane.base_errors.start_unmeasured()
    found = await plane.base_errors.wait(_version(plane), 60)
    assert "another form than when the version was uploaded" in found.report["base_error"]["reason"]


async def test_a_version_that_is_deleted_meanwhile_stays_deleted(plane: AdminPlane, tmp_path: Path) -> None:
    plane.make_tenant()
    plane.base_measure.hold()
    upload = asyncio.create_task(push(plane, tmp_path))
    await until(lambda: plane.base_measure.num_running == 1)
    plane.services.catalog.delete_version("acme", "support", "v1")
    plane.base_measure.release()
    await upload
    assert _version(plane).state == "deleted"
    assert _version(plane).report["base_error"]["kl"] is None
    plane.check_integrity()


async def test_figures_that_cannot_be_written_fail_no_upload(
    plane: AdminPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane.make_tenant()

    def fails(*_: Any, **__: Any) -> VersionInfo:
        raise DatabaseUnavailable

    monkeypatch.setattr(plane.validation, "record_base_error", fails)
    answer = await push(plane, tmp_path)
    assert (answer.status_code, answer.json()["state"]) == (201, "ready")
    assert answer.json()["report"]["base_error"]["reason"] == NOT_YET
