"""Every served family is read the same under the transformers that a GPU machine may have and under ours.

`make clients` installs that version beside ours; without it, these are skipped.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.models.checkpoints import FAMILIES, OTHERS, edit_config, save_tiny, save_tiny_gemma3_with_vision

ROOT = Path(__file__).parents[3]
REQUIREMENTS = ROOT / "tests/clients/requirements-transformers_gpu.txt"
SITE = (
    ROOT
    / ".clients/transformers_gpu/lib"
    / f"python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
)
LOGIT_TOLERANCE = 1e-4
"""Of logits whose standard deviation is about 5."""
PUBLISHED = {
    # As Meta and Mistral publish them: RoPE's fields at the top. Newer versions write rope_parameters.
    "llama-published": (
        "llama-3.1",
        {
            "rope_parameters": None,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "mistral-published": ("mistral-window", {"rope_parameters": None, "rope_theta": 1000000.0}),
    "qwen2-published": (
        "qwen2-yarn",
        {
            "rope_parameters": None,
            "rope_theta": 10000.0,
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        },
    ),
    "gemma3-published": (
        "gemma3",
        {
            "rope_parameters": None,
            "rope_theta": 100000.0,
            "rope_local_base_freq": 100.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "layer_types": None,
            "sliding_window_pattern": 3,
        },
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("families")
    for name, options in (FAMILIES | OTHERS).items():
        save_tiny(folder / name, options)
    save_tiny_gemma3_with_vision(folder / "gemma3-vision", FAMILIES["gemma3"])
    for name, (family, changes) in PUBLISHED.items():
        save_tiny(folder / name, FAMILIES[family])
        edit_config(folder / name, **changes)
    return folder


def read(checkpoints: Path, out: Path, *before: Path) -> dict:
    path = os.pathsep.join(
        [*map(str, before), *os.environ.get("PYTHONPATH", "").split(os.pathsep), str(ROOT / "tests")]
    )
    command = [sys.executable, "-m", "support.models.read_families", str(checkpoints), str(out)]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict = torch.load(out)
    return found


@pytest.mark.slow
def test_every_family_is_read_the_same(checkpoints, tmp_path):
    if not SITE.is_dir():
        pytest.skip("make clients installs the older transformers")
    ours, theirs = read(checkpoints, tmp_path / "ours"), read(checkpoints, tmp_path / "theirs", SITE)
    (wanted,) = re.findall(r"^transformers==(\S+)", REQUIREMENTS.read_text(), re.MULTILINE)
    assert theirs["version"] == wanted != ours["version"]
    differing = []
    for name, our in ours["families"].items():
        assert "error" not in our, (name, our)
        their = theirs["families"][name]
        if "error" in their:
            differing.append(f"{name}: {their['error']}")
        elif their["plan"] != our["plan"]:
            differing.append(f"{name}: {their['plan']}, not {our['plan']}")
        elif not torch.allclose(their["logits"], our["logits"], rtol=0, atol=LOGIT_TOLERANCE):
            differing.append(f"{name}: logits differ by {(their['logits'] - our['logits']).abs().max():.1e}")
    assert not differing, "\n".join(differing)
