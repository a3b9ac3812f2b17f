"""Adapters, versions, pins and the engine: what each route answers, over the real control services."""

from __future__ import annotations

import io
import re
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.adapters.cache.residency import CacheEntry
from loraplex.engine.reports import EngineStats, KVDiskCounts, KVHostCounts
from loraplex.serving.errors import EngineUnavailable, ServingError
from support.adapters.drafts import draft_adapter
from support.http.admin_plane import ARCH, SERVED_NAME, AdminPlane, adapter_files, assert_problem


async def push(
    client: httpx.AsyncClient, files: dict[str, Any], name: str = "support", tenant: str = "acme"
) -> httpx.Response:
    return await client.post(f"/tenants/{tenant}/adapters/{name}/versions", files=files)


class TestAdapters:
    @pytest.fixture(autouse=True)
    def _tenant(self, plane: AdminPlane) -> None:
        plane.make_tenant("acme")

    async def test_the_first_version_serves_and_later_ones_wait(
        self, admin: httpx.AsyncClient, tmp_path: Path
    ) -> None:
        files = adapter_files(tmp_path / "a")
        first = await push(admin, files)
        assert first.status_code == 201, first.text
        version = first.json()
        assert first.headers["location"] == "/admin/v1/tenants/acme/adapters/support/versions/v1"
        assert (version["name"], version["version"], version["state"], version["rank"]) == (
            "support",
            "v1",
            "ready",
            4,
        )
        assert version["targets"] == ["q_proj", "v_proj"]
        assert version["bytes"] == sum(len(data) for _, data in files.values())
        assert re.fullmatch("[0-9a-f]{64}", version["digest"])
        assert version["report"]["modules_matched"] == 4
        again = await push(admin, files)
        assert (again.status_code, again.json()) == (200, version)
        second = await push(admin, adapter_files(tmp_path / "b", seed=2))
        assert (second.status_code, second.json()["version"]) == (201, "v2")
        adapter = (await admin.get("/tenants/acme/adapters/support")).json()
        assert (adapter["num_versions"], adapter["latest_version"]) == (2, "v2")
        assert [t["version"] for t in adapter["release"]["targets"]] == ["v1"]
        assert (await admin.get("/tenants/acme/adapters")).json()["data"] == [adapter]
        versions = (await admin.get("/tenants/acme/adapters/support/versions")).json()["data"]
        assert [row["version"] for row in versions] == ["v1", "v2"]
        assert (await admin.get("/tenants/acme/adapters/support/versions/v1")).json() == version

    async def test_adapters_are_searched_by_a_part_of_their_names(
        self, admin: httpx.AsyncClient, plane: AdminPlane
    ) -> None:
        for seed, name in enumerate(("bot_a", "botxa", "help.bot", "other")):
            plane.make_adapter(name, seed=seed)

        async def named(**query: Any) -> list[str]:
            page = await admin.get("/tenants/acme/adapters", params=query)
            return [row["name"] for row in page.json()["data"]]

        assert await named(search="bot") == ["bot_a", "botxa", "help.bot"]
        assert await named(search="t_") == ["bot_a"], "an underscore is no wildcard"
        assert await named(search="bot", limit=2) == ["bot_a", "botxa"]
        assert_problem(await admin.get("/tenants/acme/adapters?search=%25"), 400, "invalid_value")

    @pytest.mark.parametrize("kind", ["tar", "tar.gz", "zip"])
    async def test_archives(
        self, admin: httpx.AsyncClient, plane: AdminPlane, tmp_path: Path, kind: str
    ) -> None:
        files = adapter_files(tmp_path / "a")
        buffer = io.BytesIO()
        if kind == "zip":
            with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
                for name, (_, data) in files.items():
                    archive.writestr(name, data)
        else:
            with tarfile.open(fileobj=buffer, mode="w:gz" if kind == "tar.gz" else "w") as archive:
                for name, (_, data) in files.items():
                    info = tarfile.TarInfo(f"folder/{name}")
                    info.size = len(data)
                    archive.addfile(info, io.BytesIO(data))
        packed = await push(admin, {"archive": (f"a.{kind}", buffer.getvalue())})
        assert packed.status_code == 201, packed.text
        plain = await push(admin, files)
        assert (plain.status_code, plain.json()["digest"]) == (200, packed.json()["digest"])
        assert plane.leftovers() == []

    async def test_refusals_are_422_with_a_report_and_leave_nothing(
        self, admin: httpx.AsyncClient, plane: AdminPlane, tmp_path: Path
    ) -> None:
        good = adapter_files(tmp_path / "a")
        biased = draft_adapter(ARCH, lora_bias=True).write(tmp_path / "biased")
        cases: dict[str, dict[str, Any]] = {
            "unsupported_feature": {
                p.name: (p.name, p.read_bytes()) for p in (biased.config, biased.tensors)
            },
            "not_safetensors": good | {"adapter_model.safetensors": ("x", b"\x80\x04.")},
            "config_invalid": good | {"adapter_config.json": ("x", b"{not json")},
            "bad_archive": {"archive": ("x.zip", b"PK\x03\x04 nonsense")},
        }
        wide = draft_adapter(ARCH)
        wide.tensors = {
            name: array[:, :-1] if "lora_A" in name else array for name, array in wide.tensors.items()
        }
        written = wide.write(tmp_path / "wide")
        cases["base_mismatch"] = {p.name: (p.name, p.read_bytes()) for p in (written.config, written.tensors)}
        for code, files in cases.items():
            problem = assert_problem(await push(admin, files), 422, code)
            assert "report" in problem
            if code == "unsupported_feature":
                assert problem["feature"]
            if code == "base_mismatch":
                assert problem["report"]["checks"][-1]["ok"] is False
        assert plane.leftovers() == []
        assert list(plane.services.artifacts.store.digests()) == []
        assert_problem(await admin.get("/tenants/acme/adapters/support"), 404, "adapter_not_found")

    async def test_names(self, admin: httpx.AsyncClient, tmp_path: Path) -> None:
        files = adapter_files(tmp_path / "a")
        assert_problem(await push(admin, files, SERVED_NAME), 422, "name_reserved")
        for name in ("Upper", "a@v1", "-a", "a" * 64, "a%0Ab"):
            answer = await push(admin, files, name)
            assert answer.status_code in (400, 404), name
        assert_problem(await push(admin, files, tenant="nobody"), 404, "tenant_not_found")
        assert_problem(await push(admin, files, "..%2f..%2fetc"), 404, "not_found")

    async def test_quotas(self, admin: httpx.AsyncClient, plane: AdminPlane, tmp_path: Path) -> None:
        plane.make_tenant("small", limits={"max_adapters": 1})
        assert (await push(admin, adapter_files(tmp_path / "a"), "one", "small")).status_code == 201
        refused = await push(admin, adapter_files(tmp_path / "b", seed=2), "two", "small")
        assert_problem(refused, 422, "quota_exceeded")

    async def test_deleting(self, admin: httpx.AsyncClient, plane: AdminPlane) -> None:
        plane.make_adapter(seed=1)
        plane.make_adapter(seed=2)
        digests = list(plane.services.artifacts.store.digests())
        assert len(digests) == 2
        base = "/tenants/acme/adapters/support"
        assert_problem(await admin.delete(f"{base}/versions/v1"), 409, "conflict")  # it is released
        assert_problem(await admin.delete(f"{base}/versions/v01"), 404, "version_not_found")
        assert (await admin.delete(f"{base}/versions/v2")).status_code == 204
        assert len(plane.engine.drops) == 1
        assert_problem(await admin.delete(f"{base}/versions/v2"), 404, "version_not_found")
        assert (await admin.delete(base)).status_code == 204
        assert sorted(plane.engine.drops) == digests
        assert_problem(await admin.get(base), 404, "adapter_not_found")
        assert list(plane.services.artifacts.store.digests()) == []

    async def test_shared_bytes_stay_until_the_last_one_goes(
        self, admin: httpx.AsyncClient, plane: AdminPlane
    ) -> None:
        plane.make_tenant("other")
        plane.make_adapter(seed=1)
        plane.make_adapter(seed=1, tenant="other")
        assert (await admin.delete("/tenants/acme/adapters/support")).status_code == 204
        assert plane.engine.drops == []
        assert (await admin.delete("/tenants/other")).status_code == 200
        assert len(plane.engine.drops) == 1
        assert list(plane.services.artifacts.store.digests()) == []

    async def test_a_deletion_stands_though_the_engine_is_away(
        self, admin: httpx.AsyncClient, plane: AdminPlane, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def away(_digest: str) -> None:
            raise EngineUnavailable("the engine is being replaced")

        plane.make_adapter()
        monkeypatch.setattr(plane.engine, "drop", away)
        assert (await admin.delete("/tenants/acme/adapters/support")).status_code == 204


async def test_version_that_takes_traffic_is_prefetched(
    admin: httpx.AsyncClient, plane: AdminPlane, tmp_path: Path
) -> None:
    plane.make_tenant("acme")
    first = (await push(admin, adapter_files(tmp_path / "a", seed=1))).json()["digest"]
    second = (await push(admin, adapter_files(tmp_path / "b", seed=2))).json()["digest"]
    assert plane.engine.prefetches == [], "an upload's check has loaded it"
    path = "/tenants/acme/adapters/support/release"
    targets = [{"version": "v1", "weight": 0}, {"version": "v2", "weight": 1}]
    assert (await admin.put(path, json={"targets": targets})).status_code == 200
    assert (await admin.post(f"{path}/promote", json={"version": "v1"})).status_code == 200
    assert (await admin.post(f"{path}/rollback")).status_code == 200
    assert plane.engine.prefetches == [second, first, second]


class TestPins:
    @pytest.fixture(autouse=True)
    def _adapter(self, plane: AdminPlane) -> None:
        plane.make_tenant("acme")
        plane.make_adapter()

    PATH = "/tenants/acme/adapters/support/versions/v1/pin"

    async def test_pin_and_unpin(self, admin: httpx.AsyncClient, plane: AdminPlane) -> None:
        for _ in range(2):
            assert (await admin.put(self.PATH)).json() == {"name": "support", "version": "v1", "pinned": True}
        (digest,) = plane.engine.pins
        assert plane.services.catalog.pinned()[0].digest == digest
        assert (await admin.delete(self.PATH)).json()["pinned"] is False
        assert plane.engine.pins == {}
        assert plane.services.catalog.pinned() == []
        assert_problem(await admin.put(self.PATH.replace("v1/pin", "v7/pin")), 404, "version_not_found")

    async def test_version_pinned_by_another_name_stays_pinned(
        self, admin: httpx.AsyncClient, plane: AdminPlane
    ) -> None:
        plane.make_adapter("twin")
        await admin.put(self.PATH)
        await admin.put(self.PATH.replace("support", "twin"))
        await admin.delete(self.PATH)
        assert len(plane.engine.pins) == 1

    @pytest.mark.parametrize(
        "path",
        [PATH.removesuffix("/pin"), "/tenants/acme/adapters/support", "/tenants/acme"],
        ids=["version", "adapter", "tenant"],
    )
    async def test_a_pin_goes_with_its_version_where_another_tenant_has_the_same_bytes(
        self, admin: httpx.AsyncClient, plane: AdminPlane, path: str
    ) -> None:
        plane.make_tenant("rival")
        plane.make_adapter("parrot", "rival")
        await admin.put(self.PATH)
        assert len(plane.engine.pins) == 1
        assert (await admin.delete(path)).status_code in (200, 204)
        assert plane.engine.pins == {}
        assert plane.engine.drops == []  # the bytes are the other's

    async def test_a_pin_stays_while_another_tenant_has_pinned_the_same_bytes(
        self, admin: httpx.AsyncClient, plane: AdminPlane
    ) -> None:
        plane.make_tenant("rival")
        plane.make_adapter("parrot", "rival")
        await admin.put(self.PATH)
        await admin.put("/tenants/rival/adapters/parrot/versions/v1/pin")
        await admin.delete("/tenants/acme")
        assert len(plane.engine.pins) == 1
        assert plane.engine.forgotten_tenants == ["acme"]

    async def test_an_engine_that_refuses_or_is_away(
        self, admin: httpx.AsyncClient, plane: AdminPlane, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        failure: Exception = ServingError("it does not fit")

        async def fail(*_: object) -> None:
            raise failure

        monkeypatch.setattr(plane.engine, "pin", fail)
        assert "does not fit" in assert_problem(await admin.put(self.PATH), 409, "conflict")["detail"]
        failure = EngineUnavailable("the engine is being replaced")
        answer = await admin.put(self.PATH)
        assert_problem(answer, 503, "engine_restarting")
        assert int(answer.headers["retry-after"]) >= 1
        assert plane.services.catalog.pinned() == []


class TestEngine:
    async def test_engine(self, admin: httpx.AsyncClient, plane: AdminPlane) -> None:
        shown = (await admin.get("/engine")).json()
        assert shown["healthy"] is True
        assert shown["info"]["model_name"] == "tiny-bytes"
        assert "memory" not in shown["info"]
        assert shown["memory"] == {
            "weights": 1 << 19, "arena": 1 << 24, "kv": 1 << 20,
            "workspace": None, "others": None, "free": None, "total": None,
        }  # fmt: skip
        document = (await admin.get(str(admin.base_url.copy_with(path="/openapi.json")))).json()
        schema = document["components"]["schemas"]["EngineMemory"]
        assert set(schema["required"]) == set(shown["memory"])
        assert shown["stats"]["num_running"] == 0
        plane.engine.unhealthy_reason = "it died"
        shown = (await admin.get("/engine")).json()
        assert (shown["healthy"], shown["unhealthy_reason"], shown["stats"]) == (False, "it died", None)

    async def test_rows_by_expert(self, admin: httpx.AsyncClient, plane: AdminPlane) -> None:
        assert (await admin.get("/engine/experts")).json() == {"layers": []}
        plane.engine.expert_counts = {11: (5, 0), 2: (1, 4)}
        expected = [{"layer": 2, "rows": [1, 4]}, {"layer": 11, "rows": [5, 0]}]
        assert (await admin.get("/engine/experts")).json() == {"layers": expected}

    async def test_cache_shows_every_version_of_every_tenant(
        self, admin: httpx.AsyncClient, plane: AdminPlane
    ) -> None:
        for tenant in ("acme", "other"):
            plane.make_tenant(tenant)
            plane.make_adapter("support", tenant, seed=1)
            plane.make_adapter("support", tenant, seed=2)
        await admin.put("/tenants/acme/adapters/support/versions/v1/pin")
        hot = plane.services.catalog.get_version("acme", "support", "v1").ref()
        warm = plane.services.catalog.get_version("acme", "support", "v2").ref()
        plane.engine.entries = [
            CacheEntry(
                hot, "hot", pinned=True, leases=2, device_bytes=100, idle_s=0.5, load_seconds={"read": 0.1}
            ),
            CacheEntry(warm, "warm", host_bytes=50),
        ]
        rows, cursor = [], None
        while True:
            page = (
                await admin.get("/cache", params={"limit": 3} | ({"cursor": cursor} if cursor else {}))
            ).json()
            rows += page["data"]
            assert plane.engine.looked_up == {row["digest"] for row in page["data"]}, "no more than the page"
            if not (cursor := page["next_cursor"]):
                break
        assert [(r["tenant_id"], r["version"]) for r in rows] == [
            ("acme", "v1"),
            ("acme", "v2"),
            ("other", "v1"),
            ("other", "v2"),
        ]
        assert rows[0]["residency"] == ["device", "disk"]
        assert (rows[0]["pinned"], rows[0]["leases"], rows[0]["device_bytes"]) == (True, 2, 100)
        assert rows[0]["load_seconds"] == {"read": 0.1}
        assert rows[1]["residency"] == ["host", "disk"]
        # The same bytes of another tenant share the memory, not the pin.
        assert (rows[2]["residency"], rows[2]["pinned"]) == (["device", "disk"], False)
        assert_problem(await admin.get("/cache?cursor=YQ=="), 400, "invalid_cursor")
        chosen = (await admin.get("/cache?tenant=other&adapter=support")).json()["data"]
        assert chosen == rows[2:]
        assert (await admin.get("/cache?adapter=another")).json()["data"] == []

    async def test_cache_sums_up_what_the_tiers_hold_and_lost(
        self, admin: httpx.AsyncClient, plane: AdminPlane
    ) -> None:
        plane.engine.engine_stats = EngineStats(
            num_arena_pages=8, num_arena_pages_used=3, host_bytes=1000, host_bytes_used=400,
            adapter_loads=7, adapter_copies=5, adapter_load_seconds={"disk": 1.5, "copy": 0.25},
            evictions={"device": {"room": 2, "cap": 1}, "host": {"deleted": 4}},
            num_pins=3, num_pins_held=1, num_pins_coming=1, num_adapter_waits=6, adapter_wait_s=2.5,
            num_kv_host_blocks=9, num_kv_host_blocks_used=3,
            kv_host=KVHostCounts(8, 7, 2, 1, 0.5, states_written=11, states_restored=10, states_evicted=9),
            kv_disk_bytes=90, kv_disk_bytes_used=30, num_kv_disks_off=1,
            kv_disk=KVDiskCounts(written=6, restored=5, evicted=4, refused=3, damaged=2, late=1),
        )  # fmt: skip
        page, block = plane.engine.info.arena_page_bytes, plane.engine.info.kv_host_block_bytes
        assert (await admin.get("/cache")).json()["totals"] == {
            "device": {
                "bytes_used": 3 * page, "bytes_capacity": 8 * page, "loads": 5, "load_seconds": 0.25,
                "evictions": {"room": 2, "cap": 1},
            },
            "host": {
                "bytes_used": 400, "bytes_capacity": 1000, "loads": 7, "load_seconds": 1.5,
                "evictions": {"deleted": 4},
            },
            "prefixes": {
                "bytes_used": 3 * block, "bytes_capacity": 9 * block, "written": 8, "restored": 7, "evicted": 2,
                "refused": 1, "states_written": 11, "states_restored": 10, "states_evicted": 9,
                "restore_seconds": 0.5,
                "disk": {
                    "bytes_used": 30, "bytes_capacity": 90, "written": 6, "restored": 5, "evicted": 4, "refused": 3,
                    "damaged": 2, "late": 1, "off": 1,
                },
            },
            "pins": {"pinned": 3, "held": 1, "coming": 1},
            "queue_waits": 6,
            "queue_seconds": 2.5,
        }  # fmt: skip
