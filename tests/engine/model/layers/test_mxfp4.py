"""gpt-oss in MXFP4: the codes are what transformers makes of the blocks, and the model computes with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from loraplex.adapters.admission.base_model import (
    load_base_spec,
    locate_tensors,
    read_text_config,
    stored_scheme,
)
from loraplex.engine.model.base import ModelUnsupported
from support.models.checkpoints import FAMILIES, VOCAB, PagedRun, reference_logits, save_tiny
from support.models.loading import load_model, outline_model, plan_model
from support.models.quantised_formats import write_mxfp4

pytestmark = pytest.mark.usefixtures("one_torch_thread")

EXPERTS = "model.layers.1.mlp.experts"
PROMPT = [number * 7 % VOCAB for number in range(40)]
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint in MXFP4, and the same as transformers decodes it."""
    root = tmp_path_factory.mktemp("mxfp4")
    base = save_tiny(root / "base", FAMILIES["gpt_oss"] | {"intermediate_size": 32})
    return write_mxfp4(base, root)


@pytest.mark.parametrize("kernels", ["torch", pytest.param("numba", marks=pytest.mark.slow)])
def test_a_model_computes_what_the_codes_stand_for(kernels: str, made: tuple[Path, Path]) -> None:
    packed, dense = made
    run = PagedRun(load_model(packed, "cpu", "float32", kernels=kernels), [PROMPT])
    run.step({0: 25})
    run.step({0: 15})
    (want,) = reference_logits(dense, [PROMPT])
    assert (run.result(0) - want).abs().max() < 1e-4


def test_the_plan_counts_codes_of_experts_alone(made: tuple[Path, Path]) -> None:
    packed, dense = made
    assert plan_model(packed).summary.stored_codes == "mxfp4"
    outline = outline_model(packed, torch.device("cpu"), "float32")
    assert outline.weight_bytes == load_model(packed, "cpu", "float32", kernels="torch").weight_bytes
    assert outline.weight_bytes < outline_model(dense, torch.device("cpu"), "float32").weight_bytes
    ours, theirs = load_base_spec(packed), load_base_spec(dense)
    assert (ours.experts, ours.sites) == (theirs.experts, theirs.sites)
    assert ours.fingerprint != theirs.fingerprint


def change(made: tuple[Path, Path], out: Path, changes: Tensors) -> Path:
    path = out / "changed"
    path.mkdir()
    tensors = load_file(made[0] / "model.safetensors") | changes
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_bytes((made[0] / "config.json").read_bytes())
    return path


def test_every_byte_and_scale_is_decoded_as_by_transformers(made: tuple[Path, Path], tmp_path: Path) -> None:
    """To the bit, in float32 and bfloat16."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 1, 16).expand(253, 16, 1, 16).contiguous()
    scales = torch.arange(253, dtype=torch.uint8).view(253, 1, 1).expand(253, 16, 1).contiguous()
    tensors = {f"{EXPERTS}.gate_up_proj_blocks": blocks, f"{EXPERTS}.gate_up_proj_scales": scales}
    path = change(made, tmp_path, tensors)
    stored = stored_scheme(read_text_config(path), locate_tensors(path))
    assert stored is not None
    for dtype in (torch.float32, torch.bfloat16):
        want = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
        for scale in range(253):
            for number, site in enumerate(("gate_proj", "up_proj")):
                rows = np.concatenate([*stored.dense_rows(f"{EXPERTS}.{scale}.{site}")])
                assert torch.equal(torch.from_numpy(rows).to(dtype), want[scale, :, number::2].T), scale


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("down_proj_scales", torch.full((6, 32, 1), 253, dtype=torch.uint8), "scale 253 for expert 0"),
        ("down_proj_scales", torch.ones(6, 32, 2, dtype=torch.uint8), r"down_proj_scales is U8 \[6, 32, 2\]"),
        ("gate_up_proj_blocks", torch.ones(6, 64, 1, 8, dtype=torch.uint8), "gate_up_proj_blocks is U8"),
        ("gate_up_proj_blocks", torch.ones(5, 64, 1, 16, dtype=torch.uint8), r"is U8 \[6, 64, 1\]"),
        ("gate_up_proj_blocks", torch.ones(6, 64, 1, 16), "gate_up_proj_blocks is F32"),
    ],
)
def test_blocks_that_are_no_such_linears_are_refused_by_name(
    name: str, tensor: torch.Tensor, words: str, made: tuple[Path, Path], tmp_path: Path
) -> None:
    path = change(made, tmp_path, {f"{EXPERTS}.{name}": tensor})
    with pytest.raises(ModelUnsupported, match=words):
        load_model(path, "cpu", "float32", kernels="torch")
