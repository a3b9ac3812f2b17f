"""TRL's GRPOTrainer, unchanged, in a loop with a whole server: rollouts come from the newest version of a series, and
each step is pushed to it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from loraplex.contrib import series
from support.clients.outside_clients import INSTALLED, SCRIPTS, skip_unless_installed
from support.servers.live_server import TINY_SIZES, LiveServer, write_tiny_model

pytestmark = pytest.mark.slow

STEPS = 20
TIMEOUT_S = 400.0
LENT = ("peft", "httpx", "httpcore", "sniffio")
"""Packages that TRL's own installation lacks: those of the tests are used."""
SERVED = "tiny"


def lent_packages(folder: Path) -> Path:
    """A folder with the callback, and with links to packages that TRL's installation lacks."""
    folder.mkdir()
    shutil.copyfile(series.__file__, folder / "series_callback.py")
    for name in LENT:
        metadata = Path(str(importlib.metadata.distribution(name).locate_file("")))
        for path in (metadata / name, *metadata.glob(f"{name}-*.dist-info")):
            (folder / path.name).symlink_to(path)
    return folder


def trained(given: dict[str, Any], packages: Path, home: Path) -> dict[str, Any]:
    done = subprocess.run(
        [str(INSTALLED / "trl" / "bin" / "python"), str(SCRIPTS / "trl_grpo.py"), json.dumps(given)],
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "PYTHONPATH": str(packages),
            "TRL_EXPERIMENTAL_SILENCE": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_grpo_samples_from_each_step_and_agrees(tmp_path: Path) -> None:
    skip_unless_installed("trl")
    model = write_tiny_model(tmp_path / SERVED)
    packages = lent_packages(tmp_path / "lent")
    with LiveServer(
        model, tmp_path / "data", dtype="float32", served_model_name=SERVED, **TINY_SIZES
    ) as server:
        server.create_tenant("acme")
        key = server.create_key(
            "acme", scopes=["inference", "adapters:read", "adapters:write", "adapters:train"]
        )
        given = {
            "url": server.data_url,
            "key": key,
            "model": str(model),
            "base": SERVED,
            "out": str(tmp_path / "out"),
            "steps": STEPS,
        }
        found = trained(given, packages, tmp_path)
    pushed, sampled, rewards = found["pushed"], found["sampled"], found["rewards"]
    for one, reward in zip(pushed, rewards, strict=False):
        print(
            f"{one['step']:2d} {one['version']:>4} push {one['seconds']:.3f} s mean {one['mean']:.1e} "
            f"max {one['max']:.1e} kl {one['kl']:.1e} reward {reward:.2f}"
        )
    assert pushed[-1]["step"] == STEPS
    assert len(rewards) == STEPS
    assert max(one["max"] for one in pushed) < 1e-5
    # Each step's rollouts come from the version that the step before it made, and from no other.
    serving = {one["step"]: f"policy@{one['version']}" for one in pushed}
    assert [row["versions"] for row in sampled if row["after"] in serving] == [
        [serving[row["after"]]] for row in sampled if row["after"] in serving
    ]
    assert {row["after"] for row in sampled} == set(range(STEPS))
