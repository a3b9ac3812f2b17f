"""The form field `serving` of an upload."""

from __future__ import annotations

import io
import json
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from loraplex.admin.app import create_admin_app
from loraplex.serving.errors import TemplateError
from support.adapters.drafts import draft_adapter
from support.http.admin_plane import ARCH, AdminPlane, adapter_files, admin_client, assert_problem

PATH = "/tenants/acme/adapters/support/versions"


async def push(client: httpx.AsyncClient, files: dict[str, Any], serving: object) -> httpx.Response:
    text = serving if isinstance(serving, str) else json.dumps(serving)
    return await client.post(PATH, files=files, data={"serving": text})


@pytest.fixture(autouse=True)
def _tenant(plane: AdminPlane) -> None:
    plane.make_tenant("acme")


async def test_a_version_keeps_its_formats(admin: httpx.AsyncClient, tmp_path: Path) -> None:
    files = adapter_files(tmp_path)
    told = {"tool_format": "llama3", "reasoning_format": None, "chat_digest": None, "alora": None}
    made = await push(admin, files, {"tool_format": "llama3"})
    assert (made.status_code, made.json()["serving"]) == (201, told)
    assert (await admin.get(f"{PATH}/v1")).json()["serving"] == told
    again = await push(admin, files, {"tool_format": "llama3", "reasoning_format": None, "alora": None})
    assert (again.status_code, again.json()["version"]) == (200, "v1")
    other = await push(admin, files, {"tool_format": "none", "reasoning_format": "think_tags"})
    assert (other.status_code, other.json()["version"]) == (201, "v2")
    assert other.json()["serving"] == told | {"tool_format": "none", "reasoning_format": "think_tags"}
    plain = await admin.post(PATH, files=files)
    assert (plain.status_code, plain.json()["version"]) == (201, "v3")
    assert plain.json()["serving"] == told | {"tool_format": None}
    rows = (await admin.get("/audit")).json()["data"]
    uploads = [row["after"] for row in rows if row["action"] == "version.upload"]
    assert sorted(str(after["tool_format"]) for after in uploads) == ["None", "llama3", "llama3", "none"]


async def test_a_version_keeps_what_becomes_of_a_prompt_without_its_invocation(
    admin: httpx.AsyncClient, tmp_path: Path
) -> None:
    files = adapter_files(tmp_path, alora_invocation_tokens=[5, 6])
    made = await push(admin, files, {"alora": "append"})
    assert (made.status_code, made.json()["serving"]["alora"]) == (201, "append")
    assert made.json()["invocation"] == [5, 6]
    plain = await push(admin, files, {"alora": "refuse"})
    assert (plain.status_code, plain.json()["version"]) == (201, "v2")
    again = await push(admin, files, {})
    assert (again.status_code, again.json()["version"], again.json()["serving"]["alora"]) == (200, "v2", None)


async def test_a_choice_for_an_invocation_needs_one(admin: httpx.AsyncClient, tmp_path: Path) -> None:
    problem = assert_problem(
        await push(admin, adapter_files(tmp_path), {"alora": "base"}), 422, "unsupported_feature"
    )
    assert problem["feature"] == "alora"


async def test_an_archive_may_have_formats(admin: httpx.AsyncClient, tmp_path: Path) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, (_, data) in adapter_files(tmp_path).items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    made = await push(admin, {"archive": ("a.tar", packed.getvalue())}, {"tool_format": "phi"})
    assert (made.status_code, made.json()["serving"]["tool_format"]) == (201, "phi")


@pytest.mark.parametrize(
    ("serving", "code", "param"),
    [
        ("{", "invalid_value", "serving"),
        ([], "invalid_value", "serving"),
        ('{"a":' * 1000, "too_large", "serving"),
        ('{"a":' * 800, "invalid_value", "serving"),
        ({"tool_format": "xml"}, "invalid_value", "serving.tool_format"),
        ({"tool_format": ["hermes"]}, "invalid_value", "serving.tool_format"),
        ({"tool_format": "think_tags"}, "invalid_value", "serving.tool_format"),
        ({"reasoning_format": True}, "invalid_value", "serving.reasoning_format"),
        ({"tool_fromat": "hermes"}, "unknown_field", "serving"),
        ({"alora": {"tokens": [1]}}, "invalid_value", "serving.alora"),
        ({"alora": "ignore"}, "invalid_value", "serving.alora"),
    ],
)
async def test_wrong_values_are_refused_by_name(
    admin: httpx.AsyncClient, plane: AdminPlane, tmp_path: Path, serving: object, code: str, param: str
) -> None:
    answer = await push(admin, adapter_files(tmp_path), serving)
    assert_problem(answer, 413 if code == "too_large" else 400, code)
    assert answer.json()["param"] == param
    assert (await admin.get(PATH)).status_code == 404
    assert plane.leftovers() == []


async def test_a_name_that_comes_twice_is_refused(admin: httpx.AsyncClient, tmp_path: Path) -> None:
    twice = '{"tool_format": "llama3", "reasoning_format": null, "tool_format": "hermes"}'
    problem = assert_problem(await push(admin, adapter_files(tmp_path), twice), 400, "invalid_value")
    assert "names the key 'tool_format' twice" in problem["detail"]
    assert problem["param"] == "serving"
    assert (await admin.get(PATH)).status_code == 404


async def test_a_format_that_the_base_does_not_keep(plane: AdminPlane, tmp_path: Path) -> None:
    def refuse(tool_format: str | None, reasoning_format: str | None) -> None:
        if tool_format == "phi" or reasoning_format == "think_brackets":
            raise TemplateError("it is lost")

    services = replace(plane.services, check_formats=refuse)
    async with admin_client(create_admin_app(services)) as admin:
        files = adapter_files(tmp_path)
        for name, value in (("tool_format", "phi"), ("reasoning_format", "think_brackets")):
            problem = assert_problem(await push(admin, files, {name: value}), 422, "unsupported_feature")
            assert problem["feature"] == name
            assert "it is lost" in problem["detail"]
        assert (await admin.get(PATH)).status_code == 404
        assert (await push(admin, files, {"tool_format": "json"})).status_code == 201


async def test_a_version_keeps_the_labels_that_its_upload_brings(
    admin: httpx.AsyncClient, tmp_path: Path
) -> None:
    draft = draft_adapter(ARCH, task_type="SEQ_CLS", modules_to_save=["classifier", "score"])
    draft.tensors["base_model.model.score.weight"] = np.ones((2, ARCH.hidden), np.float32)
    written = draft.write(tmp_path)
    files = {path.name: (path.name, path.read_bytes()) for path in (written.config, written.tensors)}
    named = {"config.json": ("config.json", json.dumps({"id2label": {"0": "ham", "1": "spam"}}).encode())}
    told = {"task": "classify", "labels": ["ham", "spam"], "problem_type": "single_label_classification"}
    told |= {"pad_id": None, "prompt": None}
    made = await admin.post(PATH, files=files | named)
    assert (made.status_code, made.json()["head"], made.json()["embedding"]) == (201, told, None)
    assert (await admin.get(f"{PATH}/v1")).json()["head"] == told
    bare = await admin.post(PATH, files=files)
    assert (bare.json()["version"], bare.json()["head"]["labels"]) == ("v2", ["LABEL_0", "LABEL_1"])
    again = await admin.post(PATH, files=files | named)
    assert (again.status_code, again.json()["version"]) == (200, "v1")
    wrong = {"config.json": ("config.json", b'{"id2label": {"0": "\\u0000"}}')}
    assert_problem(await admin.post(PATH, files=files | wrong), 422, "config_invalid")


async def test_a_version_keeps_the_vectors_that_it_was_trained_for(
    admin: httpx.AsyncClient, tmp_path: Path
) -> None:
    pooling = {"1_Pooling/config.json": ("config.json", b'{"pooling_mode_lasttoken": true}')}
    made = await admin.post(PATH, files=adapter_files(tmp_path) | pooling)
    assert made.status_code == 201
    assert made.json()["embedding"] == {"pooling": "last", "normalize": True, "dimensions": None}
    assert made.json()["head"] is None
