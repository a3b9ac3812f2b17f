"""/cluster, and engines' names in /cache."""

from __future__ import annotations

import httpx
import pytest

from loraplex.adapters.cache.residency import CacheEntry
from loraplex.adapters.ref import AdapterRef
from loraplex.serving.placement.placement import AdapterPlace
from support.engine.fake_engine import fake_engine_info
from support.http.admin_plane import AdminPlane, assert_problem
from support.placement.fake_cluster import fake_report

REFS = [AdapterRef("acme", f"a{number}", number, f"{number:064x}", 8) for number in range(5)]


@pytest.fixture(autouse=True)
def two(plane: AdminPlane) -> None:
    info = fake_engine_info(numerics="abc", base_fingerprint="f00")
    plane.engine.num_wanted = 2
    plane.engine.replicas = {
        "replica-1": fake_report("replica-1", info=info, num_hot=3, num_warm=1, num_live=2),
        "replica-2": fake_report("replica-2", "it is being started", pid=None, info=None),
    }
    plane.engine.places = {
        ref: (AdapterPlace("replica-1", "home"), AdapterPlace("replica-2", "copy")) for ref in reversed(REFS)
    }


async def test_engines_and_places(admin: httpx.AsyncClient) -> None:
    page = (await admin.get("/cluster?limit=1")).json()
    assert page["wanted"] == 2
    assert page["replicas"] == [
        {
            "id": "replica-1",
            "node": "here",
            "pid": 4711,
            "state": "ready",
            "reason": None,
            "restarts": 0,
            "live_requests": 2,
            "places": 64,
            "max_model_len": 4096,
            "mean_request_seconds": 2.0,
            "adapters": {"hot": 3, "warm": 1},
            "numerics": "abc",
            "base_fingerprint": "f00",
            "device": "cpu",
        },
        {
            "id": "replica-2",
            "node": "here",
            "pid": None,
            "state": "away",
            "reason": "it is being started",
            "restarts": 0,
            "live_requests": 0,
            "places": None,
            "max_model_len": None,
            "mean_request_seconds": 2.0,
            "adapters": {"hot": 0, "warm": 0},
            "numerics": None,
            "base_fingerprint": None,
            "device": None,
        },
    ]
    assert page["data"] == [
        {
            "digest": REFS[0].digest,
            "tenant_id": "acme",
            "name": "a0",
            "version": "v0",
            "places": [
                {"replica": "replica-1", "reason": "home"},
                {"replica": "replica-2", "reason": "copy"},
            ],
        }
    ]


async def test_places_come_in_pages(admin: httpx.AsyncClient) -> None:
    found: list[str] = []
    cursor = ""
    while cursor is not None:
        page = (
            await admin.get("/cluster", params={"limit": 2} | ({"cursor": cursor} if cursor else {}))
        ).json()
        assert 1 <= len(page["data"]) <= 2
        found += [row["digest"] for row in page["data"]]
        cursor = page["next_cursor"]
    assert found == [ref.digest for ref in REFS]


async def test_a_drained_engine(plane: AdminPlane, admin: httpx.AsyncClient) -> None:
    assert plane.engine.replicas is not None
    plane.engine.replicas["replica-2"] = fake_report("replica-2")
    answer = await admin.post("/cluster/replicas/replica-2/drain")
    assert (answer.status_code, answer.json()["state"]) == (200, "draining")
    states = [row["state"] for row in (await admin.get("/cluster")).json()["replicas"]]
    assert states == ["ready", "draining"]
    undone = await admin.delete("/cluster/replicas/replica-2/drain")
    assert (undone.status_code, undone.json()["state"]) == (200, "ready")
    again = await admin.delete("/cluster/replicas/replica-2/drain")  # nothing is left to undo
    assert (again.status_code, again.json()["state"]) == (200, "ready")
    audited = (await admin.get("/audit?action=replica.undrain")).json()["data"]
    assert len(audited) == 1, "what changes nothing is not recorded"


@pytest.mark.parametrize("name", ["replica-1", "replica-2"])
async def test_the_last_one_that_takes_requests_is_not_drained(
    plane: AdminPlane, admin: httpx.AsyncClient, name: str
) -> None:
    assert plane.engine.replicas is not None
    answer = await admin.post(f"/cluster/replicas/{name}/drain")
    if name == "replica-1":
        assert "replica-1" in assert_problem(answer, 409, "conflict")["detail"]
        assert plane.engine.replicas["replica-1"].state == "ready"
    else:
        assert answer.status_code == 200  # it takes none anyway, and will take none when it is up


async def test_an_unknown_engine(admin: httpx.AsyncClient) -> None:
    for method in ("POST", "DELETE"):
        answer = await admin.request(method, "/cluster/replicas/replica-9/drain")
        assert "replica-9" in assert_problem(answer, 404, "replica_not_found")["detail"]


async def test_the_cache_names_the_engines(plane: AdminPlane, admin: httpx.AsyncClient) -> None:
    plane.make_tenant()
    plane.make_adapter()
    (row,) = (await admin.get("/cache")).json()["data"]
    assert row["replicas"] == []
    ref = plane.services.catalog.get_version("acme", "support", "v1").ref()
    plane.engine.entries = [CacheEntry(ref, "hot", replicas=("replica-1", "replica-2"))]
    (row,) = (await admin.get("/cache")).json()["data"]
    assert row["replicas"] == ["replica-1", "replica-2"]
