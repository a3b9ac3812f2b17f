"""`GET …/release/shadow/texts`: the kept texts of the release in force."""

from __future__ import annotations

import httpx
import pytest

from loraplex.control.catalog.shadow_store import ShadowKey, ShadowStore, ShadowSums
from support.http.admin_plane import AdminPlane, assert_problem

PATH = "/tenants/acme/adapters/support/release"


@pytest.fixture(autouse=True)
def _versions(plane: AdminPlane) -> None:
    plane.make_tenant("acme")
    for seed in (1, 2):
        plane.make_adapter(seed=seed)


async def test_the_texts_of_the_release_in_force_are_listed(
    plane: AdminPlane, admin: httpx.AsyncClient
) -> None:
    shadow = {"version": "v2", "sample": 1, "keep_texts": True}
    body = {"targets": [{"version": "v1", "weight": 1}], "shadow": shadow}
    revision = (await admin.put(PATH, json=body)).json()["revision"]
    kept = ShadowSums()
    for number in range(3):
        kept.add_texts(f"question {number}", "yes", "no")
    ShadowStore(plane.database).add({ShadowKey("acme", "support", revision, 2): kept})
    found = (await admin.get(f"{PATH}/shadow/texts", params={"limit": 2})).json()["data"]
    assert [one["prompt"] for one in found] == ["question 2", "question 1"]
    assert {key: found[0][key] for key in ("version", "answer", "shadow_answer")} == {
        "version": "v2",
        "answer": "yes",
        "shadow_answer": "no",
    }
    await admin.put(PATH, json=body | {"shadow": None})
    assert (await admin.get(f"{PATH}/shadow/texts")).json() == {"data": []}


async def test_a_name_without_a_release_and_a_wrong_limit_are_refused(admin: httpx.AsyncClient) -> None:
    assert_problem(
        await admin.get("/tenants/acme/adapters/other/release/shadow/texts"), 404, "release_not_found"
    )
    assert_problem(await admin.get(f"{PATH}/shadow/texts", params={"limit": 201}), 400, "invalid_value")
