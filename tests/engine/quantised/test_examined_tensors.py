"""Checkpoints with modules that quantising tools left out, and doctor's look at a checkpoint: it says what the start
says."""

from __future__ import annotations

import json
import resource
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from loraplex.app.doctor.torch_checks import _model, _plan
from loraplex.engine.model.base import ModelUnsupported
from loraplex.engine.model.outline import examine_tensors
from support.adapters.peft_zoo import PeftReference
from support.adapters.tiny_adapters import ADAPTERS, save_adapters
from support.models.checkpoints import FAMILIES, save_tiny
from support.models.loading import load_model, plan_model
from support.models.quantised_formats import FORMATS, write_quantised

from .test_quantised_base import engine_of, worst_error

pytestmark = pytest.mark.usefixtures("one_torch_thread")
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_hidden_layers": 2}
_STATE = "weight.quant_state.bitsandbytes__nf4"
Q_PROJ = "model.layers.1.self_attn.q_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("base") / "base", FAMILIES["llama"] | SIZES)


def test_modules_that_a_tool_left_out_are_read_by_their_tensors(base: Path, tmp_path: Path) -> None:
    """One of the three that are multiplied together, and a whole linear of one layer."""
    left_out = ("q_proj", "layers.1.mlp.down_proj")
    made, dense = write_quantised(base, tmp_path, "gptq int4", left_out=left_out)
    config = json.loads((made / "config.json").read_text())
    config["quantization_config"]["dynamic"] = {"-:.*q_proj": {}, r"-:.*\.1\.mlp\.down_proj": {}}
    (made / "config.json").write_text(json.dumps(config))
    # Old tools saved a bias of 0 beside the codes of each linear.
    path = made / "model.safetensors"
    save_file(load_file(path) | {"model.layers.0.mlp.up_proj.bias": torch.zeros(96)}, path, {"format": "pt"})
    examine_tensors(plan_model(made))
    adapters = save_adapters(dense, tmp_path, {"all": ADAPTERS["all"]})
    engine = engine_of(made, tmp_path / "work", dtype="float32", quantise="none")
    try:
        assert engine.built.info.stored_codes == "gptq int4"
        reference = PeftReference(dense, adapters, torch.float32)
        assert worst_error(engine, reference, adapters, [range(3, 60)]) < 1e-4
    finally:
        engine.close()


def _tensors(**change: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        for leaf, changed in change.items():
            name = f"{Q_PROJ}.{leaf}" if leaf == _STATE or "__" not in leaf else leaf.replace("__", ".")
            found = changed(tensors.get(name, torch.zeros(3)))
            tensors.pop(name, None)
            if found is not None:
                tensors[name] = found.contiguous()
        save_file(tensors, path, {"format": "pt"})

    return write


def _config(**change: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))

    return write


def _cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def _header(raw: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / "model.safetensors").write_bytes(raw) and None


_ENTRY = b'{"a":{"dtype":"F32","shape":[%d,%d],"data_offsets":[0,%d]}}'
FAULTS: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "a weight of other rows": ("gptq int4", _tensors(qweight=lambda t: torch.cat((t, t), 1)), "q_proj"),
    "no scales": ("gptq int4", _tensors(scales=lambda t: None), "lacks .*q_proj.scales"),
    "an order by activation": ("gptq int4", _tensors(g_idx=lambda t: t.flip(0)), "ordered by activation"),
    "zeros against sym": ("gptq int4", _tensors(qzeros=lambda t: t + 1), "says sym: true"),
    "a scale that is no number": ("awq", _tensors(scales=lambda t: t * float("nan")), "q_proj.scales has a scale"),
    "codes as floats": ("awq", _tensors(qweight=lambda t: t.float()), "q_proj.qweight is F32"),
    "a tensor too many": ("awq", _tensors(extra=lambda t: t), "has 1 tensors that llama does not know: .*q_proj.extra"),
    "a bias that is not 0": ("awq", _tensors(bias=lambda t: t + 1), "does not know: .*q_proj.bias"),
    "no norm": ("awq", _tensors(model__norm__weight=lambda t: None), "lacks model.norm.weight"),
    "a short norm": ("awq", _tensors(model__norm__weight=lambda t: t[:-1]), r"model.norm.weight has the shape \[63\]"),
    "an integer norm": ("awq", _tensors(model__norm__weight=lambda t: t.int()), "model.norm.weight is stored as I32"),
    "blocks that do not divide": ("fp8, blocks", _tensors(weight_scale_inv=lambda t: t[1:]), "q_proj.weight_scale_inv"),
    "a state of nf4 cut short": (
        "nf4", _tensors(**{_STATE: lambda t: t[:9]}), "is no JSON",
    ),
    "another hidden size": ("awq", _config(hidden_size=128), "has the shape"),
    "more layers than tensors": ("awq", _config(num_hidden_layers=9), r"lacks model\.layers\.2"),
    "layers without end": ("awq", _config(num_hidden_layers=1 << 40), "num_hidden_layers is 1099511627776"),
    "no heads": ("awq", _config(num_attention_heads=0), "num_attention_heads is 0, not a number from 1"),
    "a text for a size": ("awq", _config(vocab_size="many"), "vocab_size is 'many', not a number"),
    "a file cut short": ("awq", _cut, "cannot read .*model.safetensors"),
    "a header of 2^60 bytes": ("awq", _header(struct.pack("<Q", 1 << 60) + b"{}"), "its header claims"),
    "a shape of 2^80 numbers": (
        "awq", _header(struct.pack("<Q", 99) + (_ENTRY % (1 << 40, 1 << 40, 1 << 60)).ljust(99)), "number is too large",
    ),
    "a tensor beyond the end": (
        "awq", _header(struct.pack("<Q", 99) + (_ENTRY % (1 << 20, 1 << 20, 1 << 42)).ljust(99)), "cannot read",
    ),
    "settings of another type": ("awq", _config(quantization_config=["awq"]), "is not an object"),
    "groups of another type": (
        "compressed int4",
        _config(quantization_config=FORMATS["compressed int4"].config | {"config_groups": {"a": {"weights": 4}}}),
        "has no weights",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_doctor_says_what_the_start_says(fault: str, base: Path, tmp_path: Path) -> None:
    name, damage, words = FAULTS[fault]
    made, _ = write_quantised(base, tmp_path, name)
    damage(made)
    began, memory = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ModelUnsupported, match=words) as doctors:
        examine_all(made)
    assert time.monotonic() - began < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 1 << 20
    with pytest.raises(ModelUnsupported) as starts:
        load_model(made, "cpu", torch.float32, kernels="torch")
    assert doctors.value.message == starts.value.message
    assert "\n" not in doctors.value.message


def examine_all(model_dir: Path) -> str:
    """Doctor's check of a model, in this process."""
    from loraplex.app.doctor.torch_checks import Questions

    asked = Questions(
        device="cpu", dtype="float32", quantise="none", kv_cache_dtype="auto", kernels="torch", attention="auto",
        threads=1, max_model_len=0, batch_invariant=False, speculation="off", model_dir=str(model_dir),
    )  # fmt: skip
    return _model(_plan(asked))


@pytest.mark.parametrize("name", FORMATS)
def test_whole_checkpoints_pass(name: str, base: Path, tmp_path: Path) -> None:
    examine_tensors(plan_model(write_quantised(base, tmp_path, name)[0]))
