"""What tenants have at hand instead of PEFT's two files, by each way that an upload takes."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from support.adapters.drafts import AdapterFiles, make_adapter
from support.adapters.mlx_adapters import MLX_TENSORS, mlx_config, mlx_files, mlx_tensors
from support.http.admin_plane import ARCH, AdminPlane, assert_problem

PUSH = "/tenants/acme/adapters/support/versions"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0a" * 32 + b"\nsize 80792096\n"


@pytest.fixture(autouse=True)
def tenant(plane: AdminPlane) -> None:
    plane.make_tenant("acme")


def packed(files: dict[str, bytes], folder: str = "") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(f"{folder}{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


async def push(admin: httpx.AsyncClient, files: dict[str, bytes]) -> httpx.Response:
    return await admin.post(PUSH, files={name: (name, content) for name, content in files.items()})


def mlx_upload(**fields: Any) -> dict[str, bytes]:
    return mlx_files(mlx_config(**fields), mlx_tensors(ARCH))


def written(path: Path, files: dict[str, bytes]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (path / name).write_bytes(content)
    return path


async def test_an_adapter_of_mlx_by_every_way_is_one_version(
    admin: httpx.AsyncClient, plane: AdminPlane, tmp_path: Path
) -> None:
    files = mlx_upload()
    made = await push(admin, files)
    assert made.status_code == 201, made.text
    version = made.json()
    assert [check["name"] for check in version["report"]["checks"]][:2] == ["mlx", "config"]
    renamed = {
        "adapter_config.json": files["adapter_config.json"],
        "adapter_model.safetensors": files[MLX_TENSORS],
    }
    for again in (files, renamed, {"archive": packed(files)}, {"archive": packed(renamed, "run/adapters/")}):
        answer = await push(admin, again)
        assert (answer.status_code, answer.json()["digest"]) == (200, version["digest"]), answer.text
    by_file_name = [("file", (name, content)) for name, content in files.items()]
    answer = await admin.post(PUSH, files=by_file_name)
    assert answer.status_code == 200, answer.text
    folder = written(tmp_path / "mlx", files)
    answer = await admin.post(PUSH, json={"source": f"file://{folder}"})
    assert (answer.status_code, answer.json()["digest"]) == (200, version["digest"]), answer.text
    assert plane.leftovers() == []


async def test_what_is_stored_of_mlx_is_peft_s_form(admin: httpx.AsyncClient) -> None:
    version = (await push(admin, mlx_upload())).json()["version"]
    archive = await admin.get(f"{PUSH}/{version}/archive")
    with tarfile.open(fileobj=io.BytesIO(archive.content)) as tar:
        config, tensors = (tar.extractfile(name) for name in tar.getnames())
        assert config is not None
        assert tensors is not None
        stored = json.loads(config.read())
        content = tensors.read()
    assert (stored["peft_type"], stored["lora_alpha"], stored["r"]) == ("LORA", 80.0, 4)
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    name = "model.layers.0.self_attn.q_proj"
    entry = header[f"base_model.model.{name}.lora_A.weight"]
    start, end = (8 + length + offset for offset in entry["data_offsets"])
    ours = np.frombuffer(content[start:end], np.float32).reshape(entry["shape"])
    assert np.array_equal(ours, mlx_tensors(ARCH)[f"{name}.lora_a"].T)


@pytest.mark.parametrize("way", ["form", "archive", "import"])
@pytest.mark.parametrize("of", ["adapter_config.json", "adapter_model.safetensors"])
async def test_a_git_lfs_pointer_is_named_by_every_way(
    admin: httpx.AsyncClient, plane: AdminPlane, tmp_path: Path, way: str, of: str
) -> None:
    made: AdapterFiles = make_adapter(tmp_path / "a", ARCH)
    files = {path.name: path.read_bytes() for path in (made.config, made.tensors)} | {of: POINTER}
    if way == "form":
        answer = await push(admin, files)
    elif way == "archive":
        answer = await push(admin, {"archive": packed(files)})
    else:
        answer = await admin.post(PUSH, json={"source": f"file://{written(tmp_path / 'clone', files)}"})
    code = "config_invalid" if of == "adapter_config.json" else "not_safetensors"
    problem = assert_problem(answer, 422, code)
    assert "git lfs pull" in problem["detail"]
    assert plane.leftovers() == []


@pytest.mark.parametrize(
    ("name", "words"),
    [("adapter_model.bin", "torch.load("), ("adapters.npz", "numpy.load("), ("adapter.gguf", "GGUF")],
)
async def test_a_part_of_another_format_is_named(
    admin: httpx.AsyncClient, tmp_path: Path, name: str, words: str
) -> None:
    config = make_adapter(tmp_path / "a", ARCH).config.read_bytes()
    answer = await push(admin, {"adapter_config.json": config, name: b"\x80\x02}q\x00."})
    assert words in assert_problem(answer, 422, "not_safetensors")["detail"]
