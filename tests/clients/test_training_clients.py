"""TRL's clients, unchanged, load the checkpoints of a training into a whole server."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support.adapters.drafts import make_adapter
from support.clients.outside_clients import INSTALLED, SCRIPTS, skip_unless_installed
from support.http.admin_plane import ARCH
from support.http.whole_server import WholeServer, bearer, whole_server

pytestmark = pytest.mark.slow

TIMEOUT_S = 240.0


def checkpoint(folder: Path, seed: int) -> str:
    folder.mkdir(parents=True)
    make_adapter(folder, ARCH, seed=seed)
    return str(folder)


def told(given: dict[str, Any], home: Path) -> dict[str, dict[str, Any]]:
    """What TRL's clients returned."""
    done = subprocess.run(
        [str(INSTALLED / "trl" / "bin" / "python"), str(SCRIPTS / "trl_conversation.py"), json.dumps(given)],
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "TRL_EXPERIMENTAL_SILENCE": "1",
            "HF_HUB_OFFLINE": "1",
        },
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def served(server: WholeServer, key: str) -> dict[str, str]:
    """The digest by name of what this key may use."""
    listed = server.http.get(f"{server.data_url}/v1/models", headers=bearer(key)).json()["data"]
    return {model["id"]: model["root"] for model in listed}


def test_trl_loads_and_unloads_the_policies_of_a_training(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    skip_unless_installed("trl")
    folder = tmp_path / "checkpoints"
    with whole_server(
        tmp_path_factory.mktemp("server"), adapter_sources=[f"file://{folder}/{{tenant}}"]
    ) as server:
        for tenant in ("acme", "rival"):
            server.plane.make_tenant(tenant)
        key = server.plane.make_key("acme", "inference", "adapters:read", "adapters:write")
        given = {
            # TRL's clients send no header: the key is the URL's password.
            "url": server.data_url.replace("http://", f"http://key:{key}@"),
            "folders": [checkpoint(folder / "acme" / f"step-{step}", step) for step in (1, 2, 3)],
            "missing": str(folder / "acme" / "step-9"),
            "foreign": checkpoint(folder / "rival" / "step-1", 4),
        }
        found = told(given, tmp_path)
        for name, calls in found.items():
            for call in ("ready", "load 1", "load 2", "load 3", "unload 1", "unload 1 again"):
                assert calls[call] is None, (name, call)
            assert calls["max_model_len"] > 0
            assert "does not expose" in calls["no folder"]  # what TRL takes every 404 for
            assert "403" in calls["another tenant's"]
            assert "source_not_allowed" in calls["another tenant's"]
        names = served(server, key)
        assert {f"{name}-v{number}" for name in found for number in (2, 3)} <= names.keys()
        assert not {f"{name}-v1" for name in found} & names.keys()
        # Both clients loaded the same folders.
        assert names["grpo-v2"] == names["distillation-v2"] != names["grpo-v3"]
        server.settle()
        server.plane.check_integrity()
