"""Adapters on experts that releases of PEFT and transformers save: each is read as it was computed, or refused by name.
The releases are installed from the package index, into a folder of the test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from loraplex.adapters.errors import AdapterRefused
from loraplex.adapters.spec import ExpertShape
from support.models import save_expert_adapters as saving
from support.models.expert_adapters import changes, experts_of, read

FAMILIES = ["qwen3_moe", "olmoe", "mixtral", "glm4_moe", "gpt_oss"]
PEFT = ["0.18.0", "0.18.1", "0.19.0", "0.19.1", "0.20.0", "0.21.2"]
RELEASES = [*((peft, None) for peft in PEFT), *((peft, "4.57.3") for peft in ("0.17.1", *PEFT))]
TESTS = Path(saving.__file__).parents[2]


def run(*command: str | Path, **environment: str) -> None:
    subprocess.run([sys.executable, "-m", *command], check=True, env=os.environ | environment)


def why_refused(folder: Path, shape: ExpertShape, peft: str) -> str | None:
    config = json.loads((folder / "adapter_config.json").read_text())
    is_square = (
        shape.hidden_size == 2 * shape.inner_size and config.get("target_parameters") == saving.BOTH[:1]
    )
    if is_square and peft in ("0.18.0", "0.18.1", "0.19.0"):
        return "experts_orientation"
    return "experts_dora" if config["use_dora"] else None


@pytest.mark.soak
@pytest.mark.timeout(1800)  # minutes of it are the installation
@pytest.mark.parametrize(("peft", "transformers"), RELEASES)
def test_releases_save_what_is_read(peft: str, transformers: str | None, tmp_path: Path) -> None:
    packages, out = tmp_path / "packages", tmp_path / "saved"
    install = "pip", "install", "--quiet", "--no-compile", "--target", packages
    run(*install, "--no-deps", f"peft=={peft}")
    if transformers:
        run(*install, f"transformers=={transformers}")
    families = [family for family in FAMILIES if not (transformers and family == "gpt_oss")]
    run(saving.__name__, out, *families, PYTHONPATH=os.pathsep.join(map(str, (packages, TESTS))))
    number = 0
    for folder in sorted(out.iterdir()):
        expected = torch.load(folder / saving.CHANGES)
        if not expected:
            continue  # the recipe trained no expert
        shapes = experts_of(saving.tiny(folder.name.partition("-")[0]))
        feature = why_refused(folder, shapes[max(shapes)], peft)
        if feature is not None:
            with pytest.raises(AdapterRefused) as caught:
                read(folder, shapes)
            assert caught.value.feature == feature
            continue
        found = changes(folder, read(folder, shapes), shapes)
        for (layer, expert, site), change in expected.items():
            of, inner = found[layer, expert], shapes[layer].inner_size
            half = {"gate": slice(0, inner), "up": slice(inner, None)}.get(site)
            mine = of[site] if half is None else of["gate_up"][half]
            np.testing.assert_allclose(
                mine, change, atol=2e-6, err_msg=f"{folder.name} {layer} {expert} {site}"
            )
        number += 1
    assert number >= len(families)
