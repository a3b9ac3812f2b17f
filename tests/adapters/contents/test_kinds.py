"""What is told of bytes that are not the file that was expected."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import re
import shlex
import struct
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from loraplex.adapters.admission.safetensors_header import read_header
from loraplex.adapters.contents.kinds import (
    CONVERT_NPZ,
    CONVERT_PICKLE,
    START_BYTES,
    Kind,
    identify,
    identify_config,
)
from loraplex.adapters.errors import AdapterRefused
from support.adapters.drafts import draft_adapter, encode_safetensors, peft_config
from support.adapters.whole_reads import parse_peft_config

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0a" * 32 + b"\nsize 80792096\n"


def torch_file(legacy: bool) -> bytes:
    import torch

    out = io.BytesIO()
    torch.save({"a": torch.ones(300)}, out, _use_new_zipfile_serialization=not legacy)
    return out.getvalue()


def packed(mode: str, name: str = "adapter_config.json") -> bytes:
    out = io.BytesIO()
    if mode == "zip":
        with zipfile.ZipFile(out, "w") as archive:
            archive.writestr(name, b"{}")
    else:
        with tarfile.open(fileobj=out, mode="w") as tar:
            tar.addfile(tarfile.TarInfo(name))
    return out.getvalue()


def numpy_file(npz: bool) -> bytes:
    out = io.BytesIO()
    np.savez(out, **{"layers.0.lora_a": np.ones(300)}) if npz else np.save(out, np.ones(300))
    return out.getvalue()


SAFETENSORS = encode_safetensors({"a": np.ones(3, np.float32)})
KINDS: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "a Git LFS pointer": (POINTER, ("Git LFS pointer", "80792096 bytes", "`git lfs pull`")),
    "a pointer of an older version": (POINTER.replace(b"git-lfs.github.com", b"hawser.github.com"), ("LFS",)),
    "a git-annex pointer": (b"/annex/objects/SHA256E-s1--00.bin\n", ("git annex get",)),
    "a page": (b"\xef\xbb\xbf\n <!DOCTYPE html>\n<html><head><title>Sign in</title>", ("HTML", "download")),
    "an answer of a bucket": (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code>", ("XML",)),
    "a pickle": (pickle.dumps({"a": list(range(300))}), ("pickle", CONVERT_PICKLE)),
    "torch's zip": (torch_file(legacy=False), ("pickle", "torch.load(")),
    "torch's older file": (torch_file(legacy=True), ("pickle", "weights_only=True")),
    "npz": (numpy_file(npz=True), ("NumPy archive", CONVERT_NPZ)),
    "npy": (numpy_file(npz=False), ("NumPy array",)),
    "GGUF": (b"GGUF\x03\0\0\0" + bytes(600), ("GGUF", "converted from")),
    "GGLA": (b"algg\x01\0\0\0" + bytes(600), ("GGML",)),
    "a zip": (packed("zip"), ("zip archive", "as the archive")),
    "a tar": (packed("tar"), ("tar archive", "as the archive")),
    "a tar of a folder whose name looks like something": (packed("tar", "GGUF/x"), ("tar archive",)),
    "gzip": (gzip.compress(b"x" * 900), ("gzip", "gunzip")),
    "Zstandard": (b"\x28\xb5\x2f\xfd" + bytes(600), ("Zstandard",)),
    "HDF5": (b"\x89HDF\r\n\x1a\n" + bytes(600), ("HDF5",)),
    "an index": (b'{"metadata": {}, "weight_map": {"a": "model-1.safetensors"}}', ("index", "one file")),
    "a config": (b' {"peft_type": "LORA"}', ("config", "adapter_config.json")),
    "other JSON": (b'[{"a": 1}]', ("JSON",)),
    "nothing": (b"", ("empty", "copy it again")),
    "zeros": (bytes(3000), ("zeros",)),
    "a message": (b"Entry not found\n", ("text that begins with 'Entry not found'", "download")),
    "text that is cut within a character": (b"a" + "é".encode() * 400, ("text that begins with",)),
}
NOT_OF_A_CONFIG = {"an index", "a config", "other JSON"}


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_is_named_with_what_to_do(tmp_path: Path, name: str) -> None:
    """In the refusal of a tensor file, and of a config except what is JSON."""
    content, words = KINDS[name]
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(AdapterRefused) as caught:
        read_header(path)
    assert caught.value.code == "not_safetensors"
    assert [word for word in words if word not in caught.value.message] == []
    if name not in NOT_OF_A_CONFIG:
        with pytest.raises(AdapterRefused) as caught:
            parse_peft_config(path, [])
        assert caught.value.code == "config_invalid"
        assert [word for word in words if word not in caught.value.message] == []


def test_the_two_files_exchanged(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(SAFETENSORS)
    with pytest.raises(AdapterRefused, match="exchanged"):
        parse_peft_config(path, [])


def test_what_is_right_is_of_no_kind() -> None:
    tensors = encode_safetensors(draft_adapter().tensors)
    assert identify(tensors[:START_BYTES], len(tensors)) is None
    assert identify(SAFETENSORS, len(SAFETENSORS)) is None
    config = repr(peft_config()).encode()
    assert identify_config(config[:START_BYTES].replace(b"'", b'"'), len(config)) is None


@given(st.binary(max_size=START_BYTES), st.integers(0, 1 << 40))
@example(struct.pack("<Q", 2**64 - 1) + b"{", 9)
@example(b"PK\x03\x04" + bytes(22) + b"\xff\xff", 30)
@example(b"\n\nsize 1\n" + POINTER, 200)
def test_no_bytes_make_it_fail(start: bytes, size: int) -> None:
    """And what is told may be shown anywhere."""
    for found in (identify(start, size), identify_config(start, size)):
        assert found is None or (str(found).isascii() and str(found).isprintable() and len(str(found)) < 1000)


@given(st.sampled_from(sorted(KINDS)), st.data())
def test_no_damaged_file_of_a_kind_makes_a_reader_fail(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    content = bytearray(KINDS[name][0][:2000])
    for _ in range(data.draw(st.integers(0, 8))):
        if content:
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged"
    path.write_bytes(content)
    readers: tuple[Any, ...] = (read_header, lambda at: parse_peft_config(at, []))
    for read in readers:
        with pytest.raises(AdapterRefused):
            read(path)


def run_command(command: str, folder: Path) -> None:
    program, *arguments = shlex.split(command)
    assert program == "python"
    subprocess.run([sys.executable, *arguments], cwd=folder, check=True, timeout=120)


@pytest.mark.parametrize("legacy", [False, True])
def test_the_command_for_a_pickle_converts_it(tmp_path: Path, legacy: bool) -> None:
    """Weights that share memory or are not contiguous too: PEFT's own are neither."""
    import torch
    from safetensors.torch import load_file

    weights = {"a": torch.arange(12.0).reshape(3, 4).T, "b": torch.ones(5, dtype=torch.bfloat16)}
    torch.save(weights, tmp_path / "adapter_model.bin", _use_new_zipfile_serialization=not legacy)
    run_command(CONVERT_PICKLE, tmp_path)
    found = load_file(tmp_path / "adapter_model.safetensors")
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)


def test_the_command_for_npz_converts_it(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    arrays = {"model.layers.0.lora_a": np.arange(6, dtype=np.float32).reshape(2, 3)}
    np.savez(tmp_path / "adapters.npz", **arrays)
    run_command(CONVERT_NPZ, tmp_path)
    assert np.array_equal(
        load_file(tmp_path / "adapters.safetensors")["model.layers.0.lora_a"], arrays["model.layers.0.lora_a"]
    )


def test_a_remedy_reads_as_a_sentence() -> None:
    assert str(Kind("a thing", "do this")) == "a thing; do this"
    assert not re.search(r"\s\s", str(identify(POINTER, len(POINTER))))
    assert os.linesep not in CONVERT_PICKLE
