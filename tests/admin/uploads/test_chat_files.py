"""What a fine-tune brings besides weights: taken by every door, told in the report, and given back."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from loraplex.adapters.admission.chat_files import ChatFiles
from loraplex.adapters.store.files import CONFIG_NAME, TENSORS_NAME, TOKENIZER_BYTES, TOKENIZER_NAME
from loraplex.control.db.tables import AdapterVersion
from loraplex.control.types import Serving
from loraplex.serving.text.own_chat import ChatFound, compare_chat
from loraplex.serving.text.processor import TextProcessor
from support.adapters.archives import MAKERS, make_tar
from support.http.admin_plane import AdminPlane, adapter_files, admin_client, assert_problem
from support.models.byte_tokenizer import CHAT_TEMPLATE, EOS_ID, START_ID, write_byte_tokenizer

VERSIONS = "/tenants/acme/adapters/support/versions"
TEMPLATE = "{% for m in messages %}### {{ m.role }}: {{ m.content }}\n{% endfor %}### assistant:"
OWN = {
    "chat_template.jinja": TEMPLATE.encode(),
    "tokenizer_config.json": json.dumps(
        {
            "eos_token": {"content": "<|start|>"},
            "model_max_length": 10**30,
            "added_tokens_decoder": {"256": {"content": "<|end|>"}, "300": {"content": "<|mine|>"}},
        }
    ).encode(),
    "generation_config.json": json.dumps({"eos_token_id": [EOS_ID, 99_999]}).encode(),
}


@pytest.fixture
def seen() -> list[bytes | None]:
    """The tokenizers that uploads bring to be looked at."""
    return []


@pytest.fixture
def plane(tmp_path: Path, seen: list[bytes | None]) -> Iterator[AdminPlane]:
    """Its base has the byte tokenizer."""
    text = TextProcessor(write_byte_tokenizer(tmp_path / "base"), max_model_len=4096)

    async def examine(tenant_id: str, files: ChatFiles, serving: Serving) -> ChatFound:
        seen.append(None if files.tokenizer is None else files.tokenizer.read_bytes())
        return compare_chat(files, text, {EOS_ID}, own_serves=False)

    made = AdminPlane(tmp_path, examine_chat=examine)
    made.make_tenant("acme")
    yield made
    made.close()


@pytest.fixture
async def admin(plane: AdminPlane) -> AsyncIterator[httpx.AsyncClient]:
    async with admin_client(plane.app) as client:
        yield client


@pytest.fixture
def two(tmp_path: Path) -> dict[str, bytes]:
    return {name: data for name, (_, data) in adapter_files(tmp_path / "files").items()}


def form(files: dict[str, bytes]) -> dict[str, tuple[str, bytes]]:
    return {name: (name, data) for name, data in files.items()}


def told(made: dict[str, Any], name: str) -> list[str]:
    return [check["detail"] for check in made["report"]["checks"] if check["name"] == name]


async def test_report_says_what_differs_from_the_base(
    admin: httpx.AsyncClient, two: dict[str, bytes]
) -> None:
    made = (await admin.post(VERSIONS, files=form(two | OWN))).json()
    (differs, lacking) = told(made, "chat template")
    assert "differs from the base's" in differs
    assert "--adapter-templates own" in differs
    assert "'<|mine|>'" in lacking
    assert told(made, "ends of answers") == [
        "warning: the base's tokenizer lacks token 99999, which ends the version's answers; it is ignored",
        f"warning: the version's answers end with '<|start|>' ({START_ID}) too, which the base's do not: they end "
        "there only on a server that is started with --adapter-templates own",
    ]
    assert len(made["serving"]["chat_digest"]) == 64


async def test_what_is_as_the_base_has_it_makes_no_other_version(
    admin: httpx.AsyncClient, two: dict[str, bytes]
) -> None:
    plain = (await admin.post(VERSIONS, files=form(two))).json()
    same = {
        "chat_template.jinja": f"{CHAT_TEMPLATE}\n".encode(),
        "generation_config.json": json.dumps({"eos_token_id": EOS_ID}).encode(),
    }
    again = await admin.post(VERSIONS, files=form(two | same))
    assert (again.status_code, again.json()["version"]) == (200, plain["version"])
    assert plain["serving"]["chat_digest"] is None


@pytest.mark.parametrize(
    "nothing",
    [
        {"chat_template.jinja": b" \n"},
        {"tokenizer_config.json": b'{"chat_template": ""}'},
        {"tokenizer_config.json": b'{"model_max_length": 1' + b"0" * 5000 + b"}"},
    ],
    ids=["an empty file", "an empty string", "a number that nobody reads"],
)
async def test_what_says_nothing_makes_no_other_version(
    admin: httpx.AsyncClient, two: dict[str, bytes], nothing: dict[str, bytes]
) -> None:
    plain = (await admin.post(VERSIONS, files=form(two))).json()
    again = await admin.post(VERSIONS, files=form(two | nothing))
    assert (again.status_code, again.json().get("version")) == (200, plain["version"]), again.text


async def test_a_template_for_tools_beside_the_default(
    admin: httpx.AsyncClient, two: dict[str, bytes]
) -> None:
    """As save_pretrained writes them: as parts, in an archive, and as a list in the config they are one version."""
    tools = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    files = {
        "chat_template.jinja": TEMPLATE.encode(),
        "additional_chat_templates/tool_use.jinja": tools.encode(),
    }
    listed = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": tools}]
    config = {"tokenizer_config.json": json.dumps({"chat_template": listed}).encode()}
    first = await admin.post(VERSIONS, files=form(two | files))
    assert first.status_code == 201, first.text
    packed = {f"run/{name}": data for name, data in (two | files).items()}
    packed["run/additional_chat_templates/rag.jinja"] = b"{% broken"
    again = [
        await admin.post(VERSIONS, files={"archive": ("a.tar", make_tar(packed))}),
        await admin.post(VERSIONS, files=form(two | config)),
    ]
    assert [answer.status_code for answer in again] == [200, 200], [answer.text for answer in again]
    assert {answer.json()["version"] for answer in again} == {first.json()["version"]}
    other = await admin.post(VERSIONS, files=form(two | {"chat_template.jinja": TEMPLATE.encode()}))
    assert other.json()["version"] != first.json()["version"]


async def test_equal_weights_with_another_template_are_another_version(
    admin: httpx.AsyncClient, two: dict[str, bytes]
) -> None:
    first = (await admin.post(VERSIONS, files=form(two))).json()
    own = (await admin.post(VERSIONS, files=form(two | OWN))).json()
    again = (await admin.post(VERSIONS, files=form(two | OWN))).json()
    assert own["digest"] == first["digest"]
    assert [first["version"], own["version"], again["version"]] == ["v1", "v2", "v2"]
    assert own["bytes"] > first["bytes"]


@pytest.mark.parametrize("kind", MAKERS)
async def test_archives_bring_what_lies_beside_the_adapter(
    admin: httpx.AsyncClient, two: dict[str, bytes], kind: str
) -> None:
    """Whatever comes first, and whatever else has such names in another folder."""
    others = {f"model/{name}": b"{" for name in OWN}
    own, adapter = ({f"a/{name}": data for name, data in files.items()} for files in (OWN, two))
    files = own | others | adapter
    by_archive = (await admin.post(VERSIONS, files={"archive": MAKERS[kind](files)})).json()
    by_form = (await admin.post(VERSIONS, files=form(two | OWN))).json()
    assert (by_archive["version"], by_form["version"]) == ("v1", "v1")


async def test_a_folder_brings_them(
    plane: AdminPlane, admin: httpx.AsyncClient, two: dict[str, bytes]
) -> None:
    folder = plane.root / "shared"
    folder.mkdir()
    for name, data in (two | OWN).items():
        (folder / name).write_bytes(data)
    imported = (await admin.post(VERSIONS, json={"source": f"file://{folder.resolve()}"})).json()
    by_form = (await admin.post(VERSIONS, files=form(two | OWN))).json()
    assert (imported["version"], by_form["version"]) == ("v1", "v1")


async def test_an_export_is_the_version_again(admin: httpx.AsyncClient, two: dict[str, bytes]) -> None:
    listed = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "{{ tools }}"}]
    several = {"tokenizer_config.json": json.dumps({"chat_template": listed}).encode()}
    for number, own in enumerate((OWN, several), 1):
        made = (await admin.post(VERSIONS, files=form(two | own))).json()
        exported = (await admin.get(f"{VERSIONS}/v{number}/archive")).content
        with tarfile.open(fileobj=io.BytesIO(exported)) as tar:
            names = tar.getnames()
        assert names[:2] == [CONFIG_NAME, TENSORS_NAME]
        assert len(names) > 2
        again = await admin.post(VERSIONS, files={"archive": exported})
        assert (again.status_code, again.json()["version"]) == (200, made["version"])


async def test_a_deleted_version_keeps_no_template(
    plane: AdminPlane, admin: httpx.AsyncClient, two: dict[str, bytes]
) -> None:
    await admin.post(VERSIONS, files=form(two))
    await admin.post(VERSIONS, files=form(two | OWN))
    await admin.delete(f"{VERSIONS}/v2")
    with plane.database.read() as session:
        kept = session.scalars(select(AdapterVersion.chat).order_by(AdapterVersion.number)).all()
    assert kept == [None, None]


@pytest.mark.parametrize(
    ("name", "content", "status", "code", "words"),
    [
        ("chat_template.jinja", b"\xff\xfe{{ x }}", 422, "config_invalid", "not UTF-8 (byte 0)"),
        ("chat_template.jinja", b"a\0b", 422, "config_invalid", "no character"),
        ("chat_template.jinja", b"x" * (1 << 20), 413, "too_large", "chat_template.jinja"),
        ("tokenizer_config.json", b"{", 422, "config_invalid", "tokenizer_config.json"),
        ("tokenizer_config.json", b"[" * 100_000, 422, "config_invalid", "nested too deeply"),
        ("tokenizer_config.json", b'{"chat_template": 7}', 422, "config_invalid", "neither a template"),
        ("tokenizer_config.json", b'{"chat_template": "\\ud800"}', 422, "config_invalid", "no character"),
        (
            "tokenizer_config.json",
            json.dumps({"chat_template": "x" * (1 << 20)}).encode(),
            413,
            "too_large",
            "131072 bytes",
        ),
        ("generation_config.json", b'{"eos_token_id": "x"}', 422, "config_invalid", "token id"),
        ("generation_config.json", b'{"eos_token_id": [true]}', 422, "config_invalid", "token id"),
    ],
)
async def test_what_cannot_be_read_is_refused_by_name(
    plane: AdminPlane,
    admin: httpx.AsyncClient,
    two: dict[str, bytes],
    name: str,
    content: bytes,
    status: int,
    code: str,
    words: str,
) -> None:
    answer = await admin.post(VERSIONS, files=form(two | {name: content}))
    assert words in assert_problem(answer, status, code)["detail"]
    by_archive = await admin.post(VERSIONS, files={"archive": make_tar(two | {name: content})})
    assert by_archive.json()["code"] == code
    assert 400 <= by_archive.status_code < 500
    assert plane.leftovers() == []


async def test_every_door_brings_the_tokenizer(
    plane: AdminPlane, admin: httpx.AsyncClient, two: dict[str, bytes], seen: list[bytes | None]
) -> None:
    files = {TOKENIZER_NAME: b"{}", **two}
    folder = plane.root / "shared"
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    made = [await admin.post(VERSIONS, files=form(files))]
    made += [await admin.post(VERSIONS, files={"archive": make(files)}) for make in MAKERS.values()]
    made.append(await admin.post(VERSIONS, json={"source": f"file://{folder.resolve()}"}))
    assert [answer.json()["version"] for answer in made] == ["v1"] * len(made)
    assert seen == [b"{}"] * len(made)
    assert plane.leftovers() == []


async def test_a_tokenizer_beyond_the_cap_is_left_out(
    plane: AdminPlane, admin: httpx.AsyncClient, two: dict[str, bytes], seen: list[bytes | None]
) -> None:
    folder = plane.root / "shared"
    folder.mkdir()
    large = {TOKENIZER_NAME: bytes(TOKENIZER_BYTES + 1), "tokenizer_config.json": b"{}"}
    for name, data in (two | large).items():
        (folder / name).write_bytes(data)
    archives = [data for make in MAKERS.values() if len(data := make(two | large)) < 1 << 20]
    assert len(archives) > 1  # the others are larger than an upload may be here
    made = [await admin.post(VERSIONS, files={"archive": data}) for data in archives]
    made.append(await admin.post(VERSIONS, json={"source": f"file://{folder.resolve()}"}))
    assert [answer.json().get("version") for answer in made] == ["v1"] * len(made), made[0].text
    assert seen == [None] * len(made)
