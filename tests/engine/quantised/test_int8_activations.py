"""Linears of 4 bits that are multiplied with activations of 8 bits: where, how far off, and what adapters read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loraplex.adapters.base_weights.schemes import read_scheme
from loraplex.engine.logprobs import join_scores
from loraplex.engine.model.layers.adapted_linears import AdaptedLinears, Linear
from loraplex.kernels.backend import make_kernels
from loraplex.kernels.linear.numba_int8 import PackedIntegers
from loraplex.kernels.linear.stored import GroupedWeight
from loraplex.kernels.weight_form import WeightForm, served_form
from support.engine.local_engine import LocalEngine
from support.models.checkpoints import FAMILIES, save_tiny
from support.models.loading import outline_model, plan_model
from support.models.quantised_formats import FORMATS, write_quantised

pytestmark = pytest.mark.usefixtures("one_torch_thread")

CPU = torch.device("cpu")
MADE_FOR_THEM = ("compressed int8, a scale a row", "compressed int8 in groups, zeros")
"""Formats of 8 bits whose config says that activations have 8 bits too."""
SIZES = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 16,
    "attention_bias": True,
}
"""Outputs are whole blocks of 32, so that no processor's packing fills any up."""
MEMORY = {"kv_cache_memory": 8 << 20, "adapter_memory": 8 << 20, "adapter_cpu_memory": 8 << 20}


def rounded_bits(config: dict[str, Any], backend: str = "numba", *, rounds: bool = True) -> int:
    """The most bits of codes that are multiplied with activations in 8 bits; 0: none."""
    scheme = read_scheme(config)
    assert scheme is not None
    form = served_form(scheme.form, backend, round_activations=rounds)
    return form.bits if form.activations == "int8" else 0


@pytest.mark.parametrize("name", FORMATS)
def test_checkpoints_of_4_bits_and_those_made_for_them_take_them_unless_a_dtype_is_named(name: str) -> None:
    raw = {"quantization_config": FORMATS[name].config}
    in_groups = name != "compressed int4, zeros"  # those of 16 inputs are no groups of 32
    bits = 4 if ("int4" in name and in_groups) or name == "awq" else 0
    if name in MADE_FOR_THEM:
        bits = 8
    assert rounded_bits(raw) == bits
    assert rounded_bits(raw, rounds=False) == 0
    assert rounded_bits(raw, "torch") == 0


def test_codes_of_8_bits_take_them_only_where_all_groups_of_the_config_say_so() -> None:
    right = FORMATS[MADE_FOR_THEM[0]].config
    inputs = right["config_groups"]["group_0"]["input_activations"]
    for found, expected in (
        ([inputs, inputs], 8),
        ([inputs, None], 0),
        ([{**inputs, "type": "float"}], 0),
        ([{**inputs, "num_bits": 4}], 0),
    ):
        group = right["config_groups"]["group_0"]
        groups = {f"group_{at}": {**group, "input_activations": each} for at, each in enumerate(found)}
        raw = {"quantization_config": {**right, "config_groups": groups}}
        assert rounded_bits(raw) == expected


def test_gguf_files_by_the_kinds_of_their_blocks() -> None:
    for kinds, expected in ((["Q4_1", "Q8_0"], 4), (["Q4_K"], 4), (["Q8_0", "Q6_K"], 0)):
        raw = {"num_attention_heads": 4, "quantization_config": {"quant_method": "gguf", "kinds": kinds}}
        assert rounded_bits(raw) == expected


@pytest.mark.parametrize("name", ["gptq int4, zeros", *MADE_FOR_THEM])
def test_an_engine_with_them_is_near_and_its_reports_name_them(name: str, tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", FAMILIES["llama"] | SIZES)
    made, _ = write_quantised(base, tmp_path, name)
    logprobs, infos = [], []
    for dtype in ("float32", "auto"):
        engine = LocalEngine(made, tmp_path / dtype, kernels="numba", dtype=dtype, num_threads=1, **MEMORY)
        infos.append(engine.built.info)
        engine.add("r", range(3, 60), max_tokens=1, logprobs=0, prompt_logprobs=0)
        engine.run()
        found = join_scores([event.scores for event in engine.events["r"] if event.scores is not None]).prompt
        assert found is not None
        logprobs.append(torch.frombuffer(bytearray(found.values), dtype=torch.float32))
        engine.close()
    exact, rounded = infos
    assert (exact.dtype, rounded.dtype) == ("float32", "float32")
    assert (exact.activations, rounded.activations) == ("", "int8")
    assert exact.numerics != rounded.numerics
    assert rounded.same_bits
    assert rounded.memory is not None
    assert exact.memory is not None
    # Offsets of 8-bit codes and their scales take as many bytes in both forms.
    assert (rounded.memory.weights < exact.memory.weights) is (name != "compressed int8 in groups, zeros")
    for dtype, info in (("float32", exact), ("auto", rounded)):
        planned = outline_model(made, CPU, dtype).weight_bytes
        assert abs(planned - info.memory.weights) < 0.03 * planned
    difference = (logprobs[0] - logprobs[1]).abs()
    assert 0 < difference.mean() < (0.15 if name in MADE_FOR_THEM else 0.1)
    bits = 8 if name in MADE_FOR_THEM else 4
    told = f", float32, {bits}-bit linears with 8-bit activations in groups of 32"
    assert plan_model(made, kernels="numba").explain().endswith(told)
    assert plan_model(made, "cpu", "float32", kernels="numba").explain().endswith(", float32")


class _Lora:
    """Keeps what adapters read, and adds to what they add to."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def apply(self, layer: int, group: str, x: torch.Tensor, y: torch.Tensor) -> None:
        self.seen.append(x)
        y += 1


@pytest.mark.parametrize("group", ["qkv", "o", "gate_up", "down"])
def test_adapters_read_the_activations_before_they_are_rounded(group: str) -> None:
    kernels = make_kernels("numba", CPU)
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(-8, 8, (64, 64), generator=generator).to(torch.int8)
    weight = GroupedWeight(codes, torch.full((64, 2), 0.01), None, 32)
    x, kept = (torch.randn(3, 64, generator=torch.Generator().manual_seed(2)) for _ in range(2))
    found, lora = {}, _Lora()
    exact = WeightForm("groups", 4, 32)
    for name, form in (("int8", replace(exact, activations="int8")), ("exact", exact)):
        packed = kernels.ops.pack(weight, form, x.dtype)
        assert isinstance(packed, PackedIntegers) == (name == "int8")
        batch: Any = SimpleNamespace(lora=lora)
        linears, linear = AdaptedLinears(kernels.ops, 1e-5, {}), Linear(packed, None, 0, group)
        if group == "gate_up":
            found[name] = linears.gate(linear, x, batch, "silu")
        elif group == "qkv":
            found[name] = linears.apply(linear, x, batch)
        else:
            found[name] = linears.apply_and_norm(linear, x, batch, torch.ones(64))
    assert all(seen is x for seen in lora.seen)
    assert len(lora.seen) == 2
    assert torch.equal(x, kept)
    assert not torch.equal(found["int8"], found["exact"])
    assert (found["int8"] - found["exact"]).abs().max() < 0.05
