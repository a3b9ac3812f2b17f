"""gpt-oss in MXFP4: the codes are what transformers makes of the blocks, and the model computes with them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from loraplex.adapters.admission.base_model import (
    load_base_spec,
    locate_tensors,
    read_text_config,
    stored_scheme,
)
from loraplex.engine.logprobs import join_scores
from loraplex.engine.model.base import ModelUnsupported
from support.engine.local_engine import LocalEngine
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


Answer = tuple[list[int], bytes]


def ask(engine: LocalEngine, adapters: dict[str, Path], *groups: Sequence[str]) -> dict[str, Answer]:
    """Tokens and the bytes of their log probabilities. Each group is asked at once, when the one before it has
    ended."""
    for group in groups:
        for name in group:
            ref = engine.publish(adapters[name]) if name in adapters else None
            engine.add(name, PROMPT[len(name) :], ref, max_tokens=12, logprobs=0)
        engine.run()
    found = {}
    for name in (name for group in groups for name in group):
        scores = join_scores([event.scores for event in engine.events[name] if event.scores is not None])
        assert scores.output is not None
        found[name] = engine.tokens(name), bytes(scores.output.values)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_on_attention_have_the_same_bits_in_company_and_are_pefts(
    dtype: str, made: tuple[Path, Path], tmp_path: Path
) -> None:
    packed, dense = made
    torch.manual_seed(0)
    models: dict[str, Any] = {"base": AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32).eval()}
    for name, rank, modules in (("q and o", 8, ["q_proj", "o_proj"]), ("k and v", 3, ["k_proj", "v_proj"])):
        of = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
        model = get_peft_model(of, LoraConfig(r=rank, target_modules=modules, init_lora_weights=False))
        model.save_pretrained(tmp_path / name)
        models[name] = model.eval()
    adapters = {name: tmp_path / name for name in models if name != "base"}
    settings: dict[str, Any] = {
        "dtype": dtype, "kernels": "numba", "kv_cache_memory": 16 << 20, "adapter_memory": 4 << 20, "max_model_len": 80
    }  # fmt: skip
    with closing(LocalEngine(packed, tmp_path / "alone", **settings)) as engine:
        alone = ask(engine, adapters, *([name] for name in models))
    assert len({tuple(tokens) for tokens, _ in alone.values()}) == len(models)
    with closing(LocalEngine(packed, tmp_path / "together", **settings)) as engine:
        assert ask(engine, adapters, tuple(models)) == alone
    with closing(LocalEngine(packed, tmp_path / "cut", max_num_batched_tokens=16, **settings)) as engine:
        assert ask(engine, adapters, tuple(models)[::-1]) == alone
    for name, (tokens, values) in alone.items() if dtype == "float32" else ():
        prompt = PROMPT[len(name) :]
        with torch.no_grad():
            logits = models[name](torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
        assert tokens == logits.argmax(-1).tolist(), name
        found = torch.frombuffer(bytearray(values), dtype=torch.float32).view(len(tokens), -1)[:, 0]
        want = logits.log_softmax(-1)[range(len(tokens)), tokens]
        assert (found - want).abs().max() <= 2.5e-4 * logits.abs().max(), name
