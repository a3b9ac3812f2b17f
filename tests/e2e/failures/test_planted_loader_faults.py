"""An engine whose loader has a fault, and weights that the served dtype cannot hold: the upload is refused by its
numbers, and takes no traffic. The files themselves are read without fault."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from support.servers.live_server import (
    ADAPTER_FILES,
    TINY_TORCH,
    LiveServer,
    importable_tests,
    post_version,
    write_tiny_adapter,
)

pytestmark = pytest.mark.slow

FAULTS = {
    "scaling": "scaling(1.02)",
    "exchanged sites": "exchange(1, 'gate_proj', 'up_proj')",
    "transposed B": "transposed_b(1, 'q_proj')",
}
SITES = ("q_proj", "v_proj", "gate_proj", "up_proj")
PLANTED = """import sys

if "loraplex.engine.ipc.process" in sys.orig_argv:
    import pytest
    from support.adapters import loader_faults

    loader_faults.{fault}(pytest.MonkeyPatch())
"""


@contextmanager
def serving(model: Path, work: Path, fault: str | None = None) -> Iterator[LiveServer]:
    """A server; the loader of its engine has a fault."""
    environment = {}
    if fault is not None:
        planted = work / "planted"
        planted.mkdir()
        (planted / "sitecustomize.py").write_text(PLANTED.format(fault=fault))
        environment["PYTHONPATH"] = os.pathsep.join([str(planted), importable_tests()])
    with LiveServer(model, work / "data", environment=environment, dtype="bfloat16", **TINY_TORCH) as server:
        server.create_tenant("acme")
        yield server


def push(server: LiveServer, folder: Path, name: str = "support") -> httpx.Response:
    files = {part: (part, (folder / part).read_bytes()) for part in ADAPTER_FILES}
    return post_version(server.admin, f"tenants/acme/adapters/{name}/versions", files)


def check_refused(
    server: LiveServer, answer: httpx.Response, verdict: str, name: str = "support"
) -> dict[str, Any]:
    """Returns the figures of its check."""
    assert (answer.status_code, answer.json()["code"]) == (422, "numerical_mismatch"), answer.text
    error: dict[str, Any] = answer.json()["report"]["reference_error"]
    assert error["verdict"] == verdict
    with server.client(server.create_key("acme")) as client:
        body = {"model": name, "prompt": "one", "max_tokens": 3}
        assert client.post("/v1/completions", json=body).status_code == 404
    return error


@pytest.mark.parametrize(
    "fault", [name if name == "scaling" else pytest.param(name, marks=pytest.mark.soak) for name in FAULTS]
)
def test_a_fault_of_the_loader_is_found_by_the_upload(fault: str, tiny_model: Path, tmp_path: Path) -> None:
    folder = write_tiny_adapter(tmp_path / "sound", targets=SITES)
    with serving(tiny_model, tmp_path, FAULTS[fault]) as server:
        error = check_refused(server, push(server, folder), "mismatch")
    assert error["max"] > 2 * error["tolerance"]


def test_sound_weights_are_ready_and_enormous_ones_are_not(tiny_model: Path, tmp_path: Path) -> None:
    with serving(tiny_model, tmp_path) as server:
        sound = write_tiny_adapter(tmp_path / "sound", targets=SITES)
        assert push(server, sound).json()["state"] == "ready"
        for number, (side, size) in enumerate([("A", 1e20), ("B", 1e20), ("A", 1e38), ("B", 1e38)]):
            folder = write_tiny_adapter(tmp_path / f"{side}-{size}")
            path = folder / "adapter_model.safetensors"
            tensors = load_file(path)
            name = next(name for name in sorted(tensors) if f"lora_{side}" in name)
            tensors[name] = np.full_like(tensors[name], size)
            save_file(tensors, path)
            check_refused(server, push(server, folder, f"huge-{number}"), "overflow", f"huge-{number}")
        with server.client(server.create_key("acme")) as client:
            body = {"model": "support", "prompt": "one", "max_tokens": 3}
            assert client.post("/v1/completions", json=body).status_code == 200
