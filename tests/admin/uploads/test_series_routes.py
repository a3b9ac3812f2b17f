"""Series over HTTP: their rules, pushes of tensors alone, and who may do what."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from loraplex.adapters.cache.residency import CacheEntry
from loraplex.control.catalog.series import SeriesRules
from support.adapters.drafts import draft_adapter, peft_config
from support.engine.fake_processes import until
from support.http.admin_plane import (
    ADMIN_TOKEN,
    ARCH,
    AdminPlane,
    adapter_files,
    admin_client,
    assert_problem,
)

CONFIG = peft_config(r=4, target_modules=["q_proj", "v_proj"])
TENSORS = {"content-type": "application/octet-stream"}
SERIES = "/tenants/acme/adapters/run/series"
PUSH = f"{SERIES}/versions"


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[AdminPlane]:
    made = AdminPlane(tmp_path, max_upload_bytes=1 << 20)
    made.make_tenant("acme")
    yield made
    made.check_integrity()
    assert made.leftovers() == []
    made.close()


@pytest.fixture
def pausing(tmp_path: Path) -> Iterator[AdminPlane]:
    made = AdminPlane(tmp_path, max_upload_bytes=1 << 20, surplus_pause_s=60.0)
    made.make_tenant("acme")
    yield made
    made.close()


def tensors(tmp_path: Path, seed: int) -> bytes:
    files = draft_adapter(ARCH, seed=seed).write(tmp_path / f"a{seed}")
    return files.tensors.read_bytes()


def states(plane: AdminPlane) -> list[str]:
    return [info.state for info in plane.services.catalog.list_versions("acme", "run").items]


def rules(**changes: Any) -> dict[str, Any]:
    return {"keep_last": 2, "check_every": 100, "config": CONFIG, **changes}


async def test_a_training_pushes_tensors_alone(plane: AdminPlane, tmp_path: Path) -> None:
    async with admin_client(plane.app) as admin:
        made = await admin.put(SERIES, json=rules(quota=600))
        assert made.status_code == 200, made.text
        assert (await admin.get(SERIES)).json() == made.json()
        assert made.json() | {"created_at": ""} == {
            "name": "run", "keep_last": 2, "check_every": 100, "latest": True, "quota": 600, "config": CONFIG,
            "agree_within": None, "created_at": "",
        }  # fmt: skip
    async with admin_client(plane.app, plane.make_key("acme", "adapters:train")) as trainer:
        for number in (1, 2, 3):
            answer = await trainer.post(PUSH, content=tensors(tmp_path, number), headers=TENSORS)
            assert answer.status_code == 201, answer.text
            version = answer.json()
            assert (version["version"], version["state"], version["durable"]) == (
                f"v{number}",
                "ready",
                False,
            )
            assert version["checked"] == ("numbers" if number == 1 else "structure")
            assert (version["report"]["reference_error"] is None) == (number > 1)
            assert answer.headers["location"] == f"/admin/v1/tenants/acme/adapters/run/versions/v{number}"
        again = await trainer.post(PUSH, content=tensors(tmp_path, 3), headers=TENSORS)
        assert (again.status_code, again.json()["version"]) == (200, "v3")
    assert plane.measure.measured == ["run@v1"]
    await until(lambda: states(plane)[0] == "retired" and bool(plane.engine.drops))
    assert plane.watch.pushed == ["early", "early", "early", "known"]
    await plane.durability.finish()
    async with admin_client(plane.app) as admin:
        listed = (await admin.get("/tenants/acme/adapters/run/versions")).json()["data"]
        assert [row["state"] for row in listed] == ["retired", "ready", "ready"]
        assert [row["checked"] for row in listed] == ["numbers", "structure", "structure"]
        # One that retired before its turn needed no flush, and the last was flushed as it was pushed again.
        assert [row["durable"] for row in listed] == [False, True, True]
        assert len(plane.watch.waits) == 1
        # The report of a retired version keeps what was found, without what there was of each module.
        assert listed[0]["report"]["rank_by_module"] == {}
        assert listed[0]["report"]["reference_error"]["verdict"] == "equal"
        assert listed[0]["report"]["checks"]
        release = (await admin.get("/tenants/acme/adapters/run/release")).json()
        assert [target["version"] for target in release["targets"]] == ["v3"]
        archive = await admin.get("/tenants/acme/adapters/run/versions/v1/archive")
        assert "retired" in assert_problem(archive, 404, "version_not_found")["detail"]
    assert listed[0]["digest"] in plane.engine.drops


async def test_a_push_whose_series_ends_meanwhile_makes_no_version(plane: AdminPlane, tmp_path: Path) -> None:
    plane.services.series.put("acme", "run", SeriesRules(keep_last=2, check_every=1, config=CONFIG))
    whole = tensors(tmp_path, 1)

    async def body() -> AsyncIterator[bytes]:
        yield whole[:100]
        plane.services.series.delete("acme", "run")
        yield whole[100:]

    async with admin_client(plane.app, plane.make_key("acme", "adapters:train")) as trainer:
        assert_problem(await trainer.post(PUSH, content=body(), headers=TENSORS), 404, "series_not_found")
    assert not plane.services.catalog.list_adapters("acme").items


async def test_a_version_stays_while_requests_run_on_it(plane: AdminPlane, tmp_path: Path) -> None:
    async with admin_client(plane.app) as admin:
        await admin.put(SERIES, json=rules(keep_last=1))
        await admin.post(PUSH, content=tensors(tmp_path, 1), headers=TENSORS)
        first = plane.services.catalog.get_version("acme", "run", "v1")
        plane.engine.entries = [CacheEntry(first.ref(), "hot", leases=1)]
        for number in (2, 3):
            await admin.post(PUSH, content=tensors(tmp_path, number), headers=TENSORS)
        await until(lambda: states(plane)[1] == "retired")
        assert states(plane) == ["ready", "retired", "ready"]
        # Without another push, once nothing runs on it.
        plane.engine.entries = []
        await until(lambda: states(plane)[0] == "retired")
    assert states(plane) == ["retired", "retired", "ready"]


async def test_old_versions_go_apart_from_the_push_and_from_its_first_request(
    pausing: AdminPlane, tmp_path: Path
) -> None:
    plane = pausing
    async with admin_client(plane.app) as admin:
        await admin.put(SERIES, json=rules(keep_last=1))
        for seed in (1, 2, 3):
            assert (await admin.post(PUSH, content=tensors(tmp_path, seed), headers=TENSORS)).is_success
    assert states(plane) == ["ready", "ready", "ready"]
    await plane.surplus.close()


async def test_only_keys_that_train_push_to_a_series(plane: AdminPlane, tmp_path: Path) -> None:
    files = adapter_files(tmp_path / "whole", seed=7)
    versions = "/tenants/acme/adapters/run/versions"
    async with admin_client(plane.app, plane.make_key("acme", "adapters:read", "adapters:write")) as writer:
        assert (await writer.put(SERIES, json=rules())).status_code == 200
        answer = await writer.post(PUSH, content=b"x", headers=TENSORS)
        assert_problem(answer, 403, "insufficient_scope")
        answer = await writer.post(versions, files=files)
        assert "adapters:train" in assert_problem(answer, 403, "insufficient_scope")["detail"]
        other = await writer.post("/tenants/acme/adapters/support/versions", files=files)
        assert (other.status_code, other.json()["checked"]) == (201, None)
    async with admin_client(plane.app, plane.make_key("acme", "adapters:train")) as trainer:
        for call in (trainer.put(SERIES, json=rules()), trainer.delete(SERIES), trainer.get(SERIES)):
            assert_problem(await call, 403, "insufficient_scope")
    async with admin_client(plane.app, plane.make_key("acme", "adapters:write", "adapters:train")) as both:
        pushed = await both.post(versions, files=files)
        assert (pushed.status_code, pushed.json()["checked"]) == (201, "numbers")


async def test_what_is_no_push_is_refused_and_leaves_nothing(plane: AdminPlane, tmp_path: Path) -> None:
    good = tensors(tmp_path, 1)
    async with admin_client(plane.app) as admin:
        assert_problem(await admin.get(SERIES), 404, "series_not_found")
        assert_problem(await admin.delete(SERIES), 404, "series_not_found")
        assert_problem(await admin.post(PUSH, content=good, headers=TENSORS), 404, "series_not_found")
        for wrong in ({"keep_last": 0}, {"check_every": 0}, {"quota": 0}, {"config": []}):
            assert_problem(await admin.put(SERIES, json=rules(**wrong)), 400, "invalid_value")
        large = rules(config={"r": "x" * (80 << 10)})
        assert_problem(await admin.put(SERIES, json=large), 409, "conflict")
        await admin.put(SERIES, json=rules(config=None))
        assert_problem(await admin.post(PUSH, content=good, headers=TENSORS), 409, "conflict")
        await admin.put(SERIES, json=rules())
        typed = {"content-type": "application/json"}
        assert_problem(await admin.post(PUSH, content=good, headers=typed), 415, "unsupported_media_type")
        assert_problem(await admin.post(PUSH, content=b"x" * (2 << 20), headers=TENSORS), 413, "too_large")
        for content, code in (
            (b"", "not_safetensors"),
            (good[:-1], "not_safetensors"),
            (good[:9], "not_safetensors"),
        ):
            assert_problem(await admin.post(PUSH, content=content, headers=TENSORS), 422, code)
        await admin.put(SERIES, json=rules(config=CONFIG | {"r": 9999}))
        refused = await admin.post(PUSH, content=good, headers=TENSORS)
        assert refused.status_code == 422
    assert plane.measure.measured == []


async def test_a_series_has_a_quota_of_pushes(plane: AdminPlane, tmp_path: Path) -> None:
    async with admin_client(plane.app) as admin:
        await admin.put(SERIES, json=rules(quota=2))
        for seed in (1, 2):
            pushed = await admin.post(PUSH, content=tensors(tmp_path, seed), headers=TENSORS)
            assert pushed.status_code == 201
        third = await admin.post(PUSH, content=tensors(tmp_path, 3), headers=TENSORS)
        assert "2 pushes a minute" in assert_problem(third, 429, "rate_limit_exceeded")["detail"]
        assert int(third.headers["retry-after"]) <= 60


async def test_a_flood_of_pushes_delays_another_tenants_push_by_a_few(
    plane: AdminPlane, tmp_path: Path
) -> None:
    ended: list[str] = []

    async def push(tenant: str, seed: int) -> None:
        path = f"/tenants/{tenant}/adapters/run/series/versions"
        answer = await admin.post(path, content=tensors(tmp_path, seed), headers=TENSORS)
        ended.append(tenant)
        assert answer.status_code == 201, answer.text

    plane.make_tenant("rival")
    async with admin_client(plane.app) as admin:
        for tenant in ("acme", "rival"):
            await admin.put(f"/tenants/{tenant}/adapters/run/series", json=rules(keep_last=100))
            await push(tenant, 1)
        ended.clear()
        flood = [asyncio.create_task(push("acme", seed)) for seed in range(2, 10)]
        await until(lambda: bool(ended))
        await push("rival", 1000)
        place = ended.index("rival")
        await asyncio.gather(*flood)
    assert place <= 4, ended


async def test_changes_of_a_series_are_audited(plane: AdminPlane) -> None:
    async with admin_client(plane.app, ADMIN_TOKEN) as admin:
        await admin.put(SERIES, json=rules())
        await admin.delete(SERIES)
        rows = (await admin.get("/audit")).json()["data"]
    shown = {row["action"]: (row["before"], row["after"]) for row in rows}
    rules_shown = {
        "keep_last": 2,
        "check_every": 100,
        "latest": True,
        "quota": None,
        "agree_within": None,
        "config": True,
    }
    assert shown["series.set"] == (None, rules_shown)
    assert shown["series.delete"] == (rules_shown, None)
    assert CONFIG["base_model_name_or_path"] is None or CONFIG["base_model_name_or_path"] not in json.dumps(
        shown
    )
