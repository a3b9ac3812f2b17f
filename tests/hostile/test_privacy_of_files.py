"""Other users of the server's machine: what they can read, and where the engine's socket is."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from support.servers.live_server import TINY_TORCH, LiveServer, write_tiny_adapter, write_tiny_model

pytestmark = pytest.mark.slow

WITHOUT_CONTENT = {"lock", "servers"}
"""Files that are locked only. A base's fingerprint (`base-…`) is no secret either."""


def open_to_others(folder: Path) -> set[str]:
    """Files and folders below that others than their owner may read, write or enter."""
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if stat.S_IMODE(path.lstat().st_mode) & 0o077 and not path.is_socket()
    }


def test_a_running_server_is_its_users_alone(tmp_path: Path) -> None:
    """Even where the user's umask allows everything."""
    model = write_tiny_model(tmp_path / "model")
    temporary = tmp_path / "t"
    temporary.mkdir()
    before = os.umask(0)
    try:
        server = LiveServer(
            model, tmp_path / "data", dtype="float32", environment={"TMPDIR": str(temporary)}, **TINY_TORCH
        )
        server.start(wait=False)
    finally:
        os.umask(before)
    try:
        modes: set[int] = set()

        def socket_is_there() -> bool:
            modes.update(stat.S_IMODE(at.parent.stat().st_mode) for at in temporary.glob("loraplex-*/*"))
            return bool(modes) or server.get("/readyz") == 200

        server.wait(socket_is_there)
        assert modes == {0o700}
        server.wait_ready()
        assert list(temporary.glob("loraplex-*/*")) == []
        server.create_tenant("acme")
        key = server.create_key("acme")
        server.upload("acme", "a", write_tiny_adapter(tmp_path / "a"))
        with server.client(key) as client:
            asked = {"model": "a", "prompt": "x", "max_tokens": 2}
            assert client.post("/v1/completions", json=asked).status_code == 200
        assert stat.S_IMODE(server.data_dir.stat().st_mode) == 0o700
        open_files = {Path(path).name for path in open_to_others(server.data_dir)}
        assert {name for name in open_files if not name.startswith("base-")} <= WITHOUT_CONTENT
    finally:
        server.reap()
