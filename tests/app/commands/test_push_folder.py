"""What `loraplex adapter push` makes of a directory that does not hold PEFT's two files, before a byte is sent."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.adapters.mlx_adapters import mlx_config, mlx_tensors, write_mlx
from support.http.admin_plane import ARCH
from support.servers.shell import Shell, shell_in

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0a" * 32 + b"\nsize 80792096\n"


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    with shell_in(tmp_path) as shell:
        shell.ok("tenant", "create", "acme")
        yield shell


def push(folder: Path | str) -> tuple[str, ...]:
    return ("adapter", "push", "support", str(folder), "-t", "acme")


def test_a_pickle_alone_names_the_conversion(shell: Shell) -> None:
    folder = Path(shell.adapter())
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.bin").write_bytes(pickle.dumps({}))
    (folder / "training_args.bin").write_bytes(pickle.dumps({}))
    said = shell.fails(*push(folder))
    assert "'adapter_model.bin'" in said
    assert "torch.load('adapter_model.bin'" in said


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_git_lfs_pointer_is_named_with_its_path(shell: Shell, name: str) -> None:
    path = Path(shell.adapter()) / name
    path.write_bytes(POINTER)
    said = " ".join(shell.fails(*push(path.parent)).split())
    assert str(path) in said.replace(" ", "")
    assert "git lfs pull" in said


def test_the_folder_of_mlx_is_pushed_as_it_is(shell: Shell) -> None:
    folder = write_mlx(shell.root / "adapters", mlx_config(), mlx_tensors(ARCH))
    (folder / "0000100_adapters.safetensors").write_bytes(b"x")
    assert "accepted as v1" in shell.ok(*push(folder))


def test_the_one_checkpoint_of_a_folder(shell: Shell) -> None:
    shell.adapter("out/checkpoint-500")
    assert "checkpoint-500 was pushed" in shell.ok(*push(shell.root / "out"))
    shutil.copytree(shell.root / "out" / "checkpoint-500", shell.root / "out" / "checkpoint-900")
    said = shell.fails(*push(shell.root / "out"))
    assert "checkpoint-500" in said
    assert "checkpoint-900" in said
    shell.adapter("out", seed=2)
    assert "accepted as v2" in shell.ok(*push(shell.root / "out"))
