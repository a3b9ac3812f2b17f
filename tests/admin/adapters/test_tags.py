"""Tags of adapters: set, shown, filtered by, refused with what is wrong, and gone with the adapter."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest

from loraplex.control.audit.log import AuditFilter
from support.http.admin_plane import AdminPlane, adapter_files, admin_client, assert_problem

ADAPTER = "/tenants/acme/adapters/support"


@pytest.fixture
def tagged(plane: AdminPlane) -> AdminPlane:
    for tenant in ("acme", "rival"):
        plane.make_tenant(tenant)
        plane.make_adapter("support", tenant)
    return plane


async def set_tags(admin: httpx.AsyncClient, *tags: str) -> list[str]:
    answer = await admin.patch(ADAPTER, json={"tags": tags})
    assert answer.status_code == 200, answer.text
    found: list[str] = answer.json()["tags"]
    return found


async def test_tags_are_shown_filtered_by_and_recorded(tagged: AdminPlane, admin: httpx.AsyncClient) -> None:
    assert (await admin.get(ADAPTER)).json()["tags"] == []
    assert await set_tags(admin, "team-a", "eu") == ["eu", "team-a"]
    assert await set_tags(admin, "eu", "0.9_x") == ["0.9_x", "eu"]
    assert (await admin.get(ADAPTER)).json()["tags"] == ["0.9_x", "eu"]
    listed = (await admin.get("/tenants/acme/adapters")).json()["data"]
    assert [row["tags"] for row in listed] == [["0.9_x", "eu"]]
    found = (await admin.get("/adapters", params={"tag": "eu"})).json()
    assert [(row["tenant"], row["tags"]) for row in found["data"]] == [("acme", ["0.9_x", "eu"])]
    assert found["totals"]["adapters"] == 1
    assert (await admin.get("/adapters", params={"tag": "team-a"})).json()["data"] == []
    rows = tagged.services.audit.list(AuditFilter(action="adapter.update")).items
    assert [(row.target, row.before, row.after) for row in rows[:1]] == [
        (ADAPTER.removeprefix("/"), {"tags": ["eu", "team-a"]}, {"tags": ["0.9_x", "eu"]})
    ]


async def test_eight_of_thirty_two_characters_are_the_most(
    tagged: AdminPlane, admin: httpx.AsyncClient
) -> None:
    most = [f"{number}".rjust(32, "a") for number in range(8)]
    assert await set_tags(admin, *most) == most


@pytest.mark.parametrize(
    ("tags", "words"),
    [
        (["ok", "Not"], "Tag 2, 'Not', has other characters than a-z, 0-9, '.', '_' and '-'."),
        (["a b"], "Tag 1, 'a b', has other"),
        ([""], "Tag 1, '', is empty."),
        (["a" * 33], f"Tag 1, '{'a' * 32}…', has 33 characters, and may have 32."),
        (["eu", "us", "eu"], "Tag 3, 'eu', is given twice."),
        ([f"t{number}" for number in range(9)], "at most 8 tags, and 9 were given."),
    ],
)
async def test_a_refusal_says_which_tag_and_why(
    tagged: AdminPlane, admin: httpx.AsyncClient, tags: list[str], words: str
) -> None:
    await set_tags(admin, "kept")
    found = assert_problem(await admin.patch(ADAPTER, json={"tags": tags}), 400, "invalid_value")
    assert words in found["detail"]
    assert (await admin.get(ADAPTER)).json()["tags"] == ["kept"]


async def test_two_who_edit_at_once_keep_each_others_tags(
    tagged: AdminPlane, admin: httpx.AsyncClient
) -> None:
    """Each adds and removes what was changed, from the same tags before."""
    await set_tags(admin, "old", "kept")
    edits = ({"add": ["eu", "kept"], "remove": ["old"]}, {"add": ["beta"]}, {"remove": ["old", "none"]})
    answers = await asyncio.gather(*(admin.patch(ADAPTER, json=edit) for edit in edits))
    assert [answer.status_code for answer in answers] == [200] * 3
    assert (await admin.get(ADAPTER)).json()["tags"] == ["beta", "eu", "kept"]
    rows = tagged.services.audit.list(AuditFilter(action="adapter.update")).items
    assert (rows[0].after, len(rows)) == ({"tags": ["beta", "eu", "kept"]}, 4)


async def upload(admin: httpx.AsyncClient, folder: Path, *tags: str, seed: int = 1) -> httpx.Response:
    files = adapter_files(folder, seed=seed)
    return await admin.post(
        f"{ADAPTER}/versions", params={"tags": ",".join(tags)} if tags else None, files=files
    )


async def test_an_upload_adds_tags_to_those_that_are_there(
    plane: AdminPlane, admin: httpx.AsyncClient, tmp_path: Path
) -> None:
    plane.make_tenant("acme")
    assert (await upload(admin, tmp_path / "a", "eu")).status_code == 201
    assert (await admin.get(ADAPTER)).json()["tags"] == ["eu"]
    assert (await upload(admin, tmp_path / "b", "eu", "beta", seed=2)).status_code == 201
    # The same bytes again, and nothing that it has not.
    assert (await upload(admin, tmp_path / "c", "beta", seed=2)).status_code == 200
    assert (await upload(admin, tmp_path / "d", seed=3)).status_code == 201
    assert (await admin.get(ADAPTER)).json()["tags"] == ["beta", "eu"]
    rows = plane.services.audit.list(AuditFilter(action="adapter.update")).items
    assert [row.after for row in rows] == [{"tags": ["beta", "eu"]}, {"tags": ["eu"]}]


@pytest.mark.parametrize(
    ("tags", "words", "param"),
    [
        (["ok", "Not"], "Tag 2, 'Not', has other", "tags.1"),
        (["eu", "us", "eu"], "Tag 3, 'eu', is given twice.", "tags.2"),
        (["a", "b"], "at most 8 tags, and this one would have 9.", "tags"),
    ],
)
async def test_an_upload_with_a_wrong_tag_is_refused_whole_and_before_it_is_read(
    tagged: AdminPlane, admin: httpx.AsyncClient, tags: list[str], words: str, param: str
) -> None:
    before = await set_tags(admin, *(f"t{number}" for number in range(7)))

    found = assert_problem(
        await admin.post(
            f"{ADAPTER}/versions",
            params={"tags": ",".join(tags)},
            content=b"no form",
            headers={"content-type": "multipart/form-data; boundary=b"},
        ),
        400,
        "invalid_value",
    )
    assert (words in found["detail"], found["param"]) == (True, param)
    shown = (await admin.get(ADAPTER)).json()
    assert (shown["tags"], shown["num_versions"]) == (before, 1)


async def test_tags_given_meanwhile_leave_no_room_for_those_of_an_upload(
    tagged: AdminPlane, admin: httpx.AsyncClient, tmp_path: Path
) -> None:
    """The last word is that of the transaction that makes the version: then nothing of the upload stays."""
    others = [f"t{number}" for number in range(8)]
    real = tagged.services.catalog.admit

    def late(*arguments: Any, **options: Any) -> Any:
        tagged.services.catalog.set_tags("acme", "support", others)
        return real(*arguments, **options)

    with mock.patch.object(tagged.services.catalog, "admit", late):
        found = assert_problem(await upload(admin, tmp_path / "a", "eu", seed=2), 400, "invalid_value")
    assert "would have 9" in found["detail"]
    assert tagged.leftovers() == []
    uploads = tagged.services.audit.list(AuditFilter(action="version.upload")).items
    assert [row.outcome for row in uploads] == ["refused", "done", "done"]
    shown = (await admin.get(ADAPTER)).json()
    assert (shown["tags"], shown["num_versions"]) == (others, 1)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        ({"add": ["ok", "Not"]}, "Tag 2, 'Not', has other"),
        ({"remove": ["a b"]}, "Tag 1, 'a b', has other"),
        ({"add": ["eu"], "remove": ["eu"]}, "The tag 'eu' is to be added and removed."),
        ({"add": ["a", "b"]}, "at most 8 tags, and this one would have 9."),
        ({"remove": [f"t{number}" for number in range(9)]}, "at most 8 tags, and 9 were given."),
    ],
)
async def test_a_refused_edit_changes_nothing(
    tagged: AdminPlane, admin: httpx.AsyncClient, edit: Any, words: str
) -> None:
    before = await set_tags(admin, *(f"t{number}" for number in range(7)))
    found = assert_problem(await admin.patch(ADAPTER, json=edit), 400, "invalid_value")
    assert words in found["detail"]
    assert (await admin.get(ADAPTER)).json()["tags"] == before


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"tags": None},
        {"tags": "eu"},
        {"tags": [1]},
        {"tags": [], "name": "b"},
        {"tags": [], "add": []},
        {"add": None},
        {"remove": "eu"},
    ],
)
async def test_another_body_is_refused(tagged: AdminPlane, admin: httpx.AsyncClient, body: Any) -> None:
    answer = await admin.patch(ADAPTER, json=body)
    assert answer.status_code == 400, answer.text


async def test_an_adapter_that_is_not_there_has_none(tagged: AdminPlane, admin: httpx.AsyncClient) -> None:
    answer = await admin.patch("/tenants/acme/adapters/none", json={"tags": ["eu"]})
    assert_problem(answer, 404, "adapter_not_found")
    secret = tagged.make_key("acme", "adapters:read")
    async with admin_client(tagged.app, secret) as reader:
        assert (await reader.patch(ADAPTER, json={"tags": ["eu"]})).status_code == 403


def deleted(tagged: AdminPlane, version: str) -> dict[str, Any]:
    """The row of the audit log with a version as it was before its deletion."""
    rows = tagged.services.audit.list(AuditFilter(action="version.delete")).items
    found = next(row.before for row in rows if row.target.endswith(version))
    assert found is not None
    return dict(found)


@pytest.mark.parametrize("path", [ADAPTER, f"{ADAPTER}/versions/v1"])
async def test_tags_go_with_the_last_version(tagged: AdminPlane, admin: httpx.AsyncClient, path: str) -> None:
    await set_tags(admin, "eu")
    tagged.make_adapter(seed=2)
    answer = await admin.delete(f"{ADAPTER}/versions/v2")
    assert answer.is_success, answer.text
    assert (await admin.get(ADAPTER)).json()["tags"] == ["eu"]
    assert (await admin.delete(path)).is_success
    last, first = tagged.services.audit.list(AuditFilter()).items[0], deleted(tagged, "v2")
    assert last.before is not None
    assert last.before["tags"] == ["eu"]
    assert "tags" not in first
    tagged.make_adapter(seed=3)
    assert (await admin.get(ADAPTER)).json()["tags"] == []
