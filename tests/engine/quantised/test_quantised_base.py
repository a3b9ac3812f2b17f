"""A base that is served as codes: equal to transformers and PEFT over the weights that the codes stand for."""

from __future__ import annotations

import json
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from loraplex.adapters.admission.base_model import BaseWeights, load_base_spec
from loraplex.adapters.errors import BaseModelInvalid, LoraplexError
from loraplex.app.base_model.source import ensure_model
from loraplex.engine.logprobs import join_scores
from loraplex.engine.model import stored_linears
from loraplex.engine.model.base import ModelUnsupported
from support.adapters.peft_zoo import PeftReference, cut_model, make_zoo
from support.adapters.tiny_adapters import ADAPTERS, KINDS, save_adapters
from support.engine.local_engine import LocalEngine
from support.models.checkpoints import FAMILIES, OTHERS, save_tiny
from support.models.gguf import CONTROL, MERGES, MIXES, convert_with_transformers, write_gguf
from support.models.loading import load_model, outline_model, plan_model
from support.models.quantised import dequantised
from support.models.quantised_formats import FORMATS, write_quantised

pytestmark = pytest.mark.usefixtures("one_torch_thread")

CHOSEN = {name: (ADAPTERS | KINDS)[name] for name in ("all", "many-ranks", "dora")}
# PEFT saves a head's base weight along with its adapter, and would load that one: the real model has heads.
NUM_OUTPUTS = 6


def engine_of(base: Path, work: Path, **settings: Any) -> LocalEngine:
    sizes = {"kv_cache_memory": 64 << 20, "adapter_memory": 128 << 20, "adapter_cpu_memory": 128 << 20}
    given = {"kernels": "numba", "quantise": "int8", "max_num_batched_tokens": 40, "num_threads": 1, **sizes}
    return LocalEngine(base, work, **given | settings)


def worst_error(
    engine: LocalEngine, reference: PeftReference, adapters: dict[str, Path], prompts: Any
) -> float:
    """Largest difference of a log probability, over base and adapters in one engine at once. Fails where a token is
    not the reference's likeliest."""
    refs = {name: engine.publish(folder, name=name) for name, folder in adapters.items()}
    asked = [(name, number) for name in (None, *adapters) for number in range(len(prompts))]
    for name, number in asked:
        ref = None if name is None else refs[name]
        engine.add(f"{name}/{number}", prompts[number], ref, max_tokens=NUM_OUTPUTS, logprobs=0)
    engine.run()
    worst = 0.0
    for name, number in asked:
        key, prompt = f"{name}/{number}", list(prompts[number])
        tokens = engine.tokens(key)
        logits = reference.logits(name, prompt + tokens)[len(prompt) - 1 : -1]
        assert tokens == logits.argmax(-1).tolist(), key
        found = join_scores([event.scores for event in engine.events[key] if event.scores is not None]).output
        assert found is not None
        expected = logits.log_softmax(-1)[range(len(tokens)), tokens]
        values = torch.from_numpy(np.frombuffer(found.values, "<f4").copy()).reshape(len(tokens), -1)[:, 0]
        worst = max(worst, float((values - expected).abs().max()))
    return worst


@pytest.mark.usefixtures("quick_interpreter")
@pytest.mark.parametrize(
    ("family", "kernels"),
    [
        ("llama-biases", "numba"),
        ("llama-tied", "triton"),
        ("llama-tied", "torch"),
        ("qwen3_5-2", "numba"),
        *(pytest.param(family, "numba", marks=pytest.mark.soak) for family in ("olmo_hybrid", "nemotron_h")),
        pytest.param("phi3", "numba", marks=pytest.mark.soak),
        pytest.param("gemma2", "numba", marks=pytest.mark.soak),
        pytest.param("qwen3", "torch", marks=pytest.mark.soak),
    ],
)
def test_tokens_and_log_probabilities_equal_peft_over_what_the_codes_stand_for(
    family: str, kernels: str, tmp_path: Path
) -> None:
    # Interpreted kernels take a hundred times as long, and all adapters lie beside the codes in the same way.
    short = {"num_hidden_layers": 1} if kernels == "triton" else {}
    base = save_tiny(tmp_path / "base", FAMILIES[family] | short)
    adapters = save_adapters(base, tmp_path, {"all": CHOSEN["all"]} if kernels == "triton" else CHOSEN)
    reference = PeftReference(dequantised(base, tmp_path / "dense"), adapters, torch.float32)
    engine = engine_of(base, tmp_path / "work", kernels=kernels, dtype="float32")
    try:
        assert worst_error(engine, reference, adapters, [range(3, 60), (5, 9, 4)]) < 1e-4
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.usefixtures("quick_interpreter")
@pytest.mark.parametrize("name", ["fp8, blocks", pytest.param("fp8, a scale a row", marks=pytest.mark.soak)])
def test_8_bit_floats_keep_their_bytes_where_kernels_multiply_with_them(name: str, tmp_path: Path) -> None:
    """Equal to PEFT over what they stand for, and as many bytes as planned for a GPU."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "attention_bias": True}
    base = save_tiny(tmp_path / "base", FAMILIES["llama"] | sizes)
    made, dense = write_quantised(base, tmp_path, name)
    adapters = save_adapters(dense, tmp_path, {"all": CHOSEN["all"]})
    reference = PeftReference(dense, adapters, torch.float32)
    engine = engine_of(made, tmp_path / "work", kernels="triton", dtype="float32", quantise="none")
    try:
        assert engine.built.info.stored_codes == "fp8"
        weights = engine.built.info.memory
        assert weights is not None
        planned = outline_model(made, torch.device("cuda"), "float32").weight_bytes
        assert abs(planned - weights.weights) < 0.02 * planned
        assert planned < 0.7 * outline_model(made, torch.device("cpu"), "float32").weight_bytes
        assert worst_error(engine, reference, adapters, [range(3, 9)]) < 1e-4
    finally:
        engine.close()


FAST = ("compressed int4", "gptq int4, zeros")
SLOW = ("fp8, blocks", "compressed int8 in groups, zeros", "awq", "nf4", "bitsandbytes int8")
"""One of each way to store codes; their bytes are read by tests/adapters/base_weights/test_formats.py."""


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *(
            pytest.param(
                "llama",
                name,
                marks=() if name in FAST else pytest.mark.slow if name in SLOW else pytest.mark.soak,
            )
            for name in FORMATS
        ),
        ("qwen3_5-2", "gptq int4, zeros"),
        pytest.param("olmo_hybrid", "compressed int4", marks=pytest.mark.soak),
    ],
)
def test_checkpoints_of_other_tools_equal_peft_over_what_their_codes_stand_for(
    family: str, name: str, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "attention_bias": True}
    # Outputs are whole blocks of 32, so that no processor's packing fills any up.
    # Those of both gates of a delta net too.
    heads = {} if family == "llama" else {"linear_num_key_heads": 8, "linear_num_value_heads": 16}
    base = save_tiny(tmp_path / "base", FAMILIES[family] | sizes | heads | {"vocab_size": 160})
    made, dense = write_quantised(base, tmp_path, name)
    if not FORMATS[name].exact:
        dense = dequantised(dense, tmp_path / "as codes", head=False)
    adapters = save_adapters(dense, tmp_path, CHOSEN)
    reference = PeftReference(dense, adapters, torch.float32)
    engine = engine_of(made, tmp_path / "work", dtype="float32", quantise="none")
    try:
        assert engine.built.info.stored_codes
        # Zeros of 8-bit codes are offsets, and what is left of two large sums has their rounding.
        most = 5e-4 if name.endswith("int8, zeros") or "in groups, zeros" in name else 1e-4
        assert worst_error(engine, reference, adapters, [range(3, 60), (5, 9, 4)]) < most
        weights = engine.built.info.memory
        assert weights is not None
        planned = outline_model(made, torch.device("cpu"), "float32").weight_bytes
        assert abs(planned - weights.weights) < 0.05 * planned
    finally:
        engine.close()


@pytest.mark.usefixtures("quick_interpreter")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("gptq int4, zeros", marks=pytest.mark.slow),
        pytest.param("compressed int4", marks=pytest.mark.soak),
    ],
)
def test_on_a_gpu_two_codes_of_4_bits_are_held_in_a_byte(name: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "num_hidden_layers": 1}
    base = save_tiny(tmp_path / "base", FAMILIES["llama"] | sizes)
    made, dense = write_quantised(base, tmp_path, name)
    adapters = save_adapters(dense, tmp_path, {"all": CHOSEN["all"]})
    reference = PeftReference(dense, adapters, torch.float32)
    engine = engine_of(made, tmp_path / "work", dtype="float32", quantise="none", kernels="triton")
    try:
        assert worst_error(engine, reference, adapters, [range(3, 30)]) < 1e-4
        weights = engine.built.info.memory
        assert weights is not None
        planned = outline_model(made, torch.device("cuda"), "float32").weight_bytes
        assert abs(planned - weights.weights) < 0.01 * planned
        assert (
            plan_model(made, "cpu", "float32", kernels="triton")
            .explain()
            .endswith(", two codes of 4 bits in a byte, by Triton, since humming-kernels is for GPUs")
        )
        assert planned < 0.9 * outline_model(made, torch.device("cpu"), "float32").weight_bytes
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("mix", "tied"),
    [
        ("Q4_K_M", False),
        ("Q4_0", True),
        pytest.param("Q8_0", False, marks=pytest.mark.slow),
        *(pytest.param(mix, False, marks=pytest.mark.soak) for mix in ("Q5_K", "Q4_0")),
        *(pytest.param(mix, True, marks=pytest.mark.soak) for mix in MIXES if mix != "Q4_0"),
    ],
)
def test_a_gguf_file_equals_peft_over_what_its_blocks_stand_for(
    mix: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORAPLEX_MODEL_CACHE", str(tmp_path / "cache"))
    # 288 tokens are whole blocks of 32 outputs, so that no processor's packing fills any up.
    more = islice(
        (f"{a} {b}" for a, b in product("ABCDEF", repeat=2)), 288 - 256 - len(CONTROL) - len(MERGES)
    )
    path = write_gguf(
        tmp_path / "tiny.gguf",
        tied=tied,
        kinds=MIXES[mix],
        hidden=256,
        inner=512,
        merges=(*MERGES, *more),
    )
    made, dense = ensure_model(str(path)), tmp_path / "dense"
    convert_with_transformers(path, dense, "float32")
    adapters = save_adapters(dense, tmp_path, CHOSEN)
    reference = PeftReference(dense, adapters, torch.float32)
    engine = engine_of(made, tmp_path / "work", dtype="float32", quantise="none")
    try:
        assert engine.built.info.stored_codes.startswith("gguf Q")
        # What is left of two large sums, of codes and of offsets, has their rounding.
        assert worst_error(engine, reference, adapters, [range(3, 60), (5, 9, 4)]) < 5e-4
        weights = engine.built.info.memory
        assert weights is not None
        planned = outline_model(made, torch.device("cpu"), "float32").weight_bytes
        assert abs(planned - weights.weights) < 0.01 * planned
        on_gpu = outline_model(made, torch.device("cuda"), "float32").weight_bytes
        assert (on_gpu < planned) == mix.startswith("Q4")
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("architecture", "mix"),
    [
        ("qwen2", "Q8_0"),
        ("phi3", "Q8_0"),
        ("gemma3", "Q5_0"),
        *(pytest.param(name, "Q8_0", marks=pytest.mark.soak) for name in ("qwen3", "gemma2")),
    ],
)
def test_a_gguf_file_of_another_family_equals_peft_too(
    architecture: str, mix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are not interleaved, packed linears, biases, norms that have their offset, windows, two ropes."""
    monkeypatch.setenv("LORAPLEX_MODEL_CACHE", str(tmp_path / "cache"))
    path = write_gguf(
        tmp_path / "tiny.gguf", architecture=architecture, split="qwen2", kinds=MIXES[mix], hidden=256
    )
    made, dense = ensure_model(str(path)), tmp_path / "dense"
    convert_with_transformers(path, dense, "float32")
    adapters = save_adapters(dense, tmp_path, CHOSEN)
    reference = PeftReference(dense, adapters, torch.float32)
    engine = engine_of(made, tmp_path / "work", dtype="float32", quantise="none")
    try:
        kinds = "Q5_0 Q5_1 Q8_0" if mix == "Q5_0" else mix
        assert engine.built.info.stored_codes == f"gguf {kinds}"
        assert worst_error(engine, reference, adapters, [range(3, 60), (5, 9, 4)]) < 5e-4
    finally:
        engine.close()


def test_a_head_that_gptq_has_quantised_is_served(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "tie_word_embeddings": False}
    base = save_tiny(tmp_path / "base", FAMILIES["llama"] | sizes)
    made, dense = write_quantised(base, tmp_path, "gptq int4", head=True)
    adapters = save_adapters(dense, tmp_path, {"all": CHOSEN["all"]})
    reference = PeftReference(dense, adapters, torch.float32)
    engine = engine_of(made, tmp_path / "work", dtype="float32", quantise="none")
    try:
        assert worst_error(engine, reference, adapters, [range(3, 60)]) < 1e-4
        weights = engine.built.info.memory
        assert weights is not None
        planned = outline_model(made, torch.device("cpu"), "float32").weight_bytes
        assert abs(planned - weights.weights) < 0.05 * planned
    finally:
        engine.close()


def test_a_scale_of_the_neighbouring_group_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = save_tiny(tmp_path / "base", FAMILIES["llama"] | {"hidden_size": 128})
    reference = PeftReference(
        dequantised(base, tmp_path / "dense"),
        save_adapters(base, tmp_path, {"all": CHOSEN["all"]}),
        torch.float32,
    )
    right = stored_linears.quantise_int8

    def wrong(weight: Any) -> Any:
        found = right(weight)
        return type(found)(found.codes, np.roll(found.scales, 1, axis=1), None, found.group)

    monkeypatch.setattr(stored_linears, "quantise_int8", wrong)
    engine = engine_of(base, tmp_path / "work", dtype="float32")
    try:
        with pytest.raises(AssertionError):
            assert worst_error(engine, reference, {}, [range(3, 60)]) < 1e-4
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "gptq int4",
        pytest.param("--quantise", marks=pytest.mark.soak),
        pytest.param("compressed int4, zeros", marks=pytest.mark.soak),
        pytest.param("awq", marks=pytest.mark.soak),
    ],
)
def test_the_real_model_equals_peft_over_what_the_codes_stand_for(
    name: str, real_model_dir: Path, tmp_path: Path
) -> None:
    made = cut_model(real_model_dir, tmp_path / "base", 6 if name == "gptq int4" else 8)
    if name == "--quantise":
        dense, quantise = dequantised(made, tmp_path / "dense"), "int8"
    else:
        made, dense = write_quantised(made, tmp_path / "written", name)
        quantise = "none"
    adapters = make_zoo(dense, tmp_path)
    reference = PeftReference(dense, adapters, torch.float32)
    engine = engine_of(
        made, tmp_path / "work", dtype="float32", quantise=quantise, max_num_batched_tokens=192
    )
    try:
        assert worst_error(engine, reference, adapters, [range(500, 600)]) < 1e-3
    finally:
        engine.close()


def test_doras_norms_see_the_weights_that_are_served(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", FAMILIES["llama-tied"])
    dense = load_file(dequantised(base, tmp_path / "dense") / "model.safetensors")
    weights = BaseWeights(load_base_spec(base, quantise="int8"))
    for layer, site, name in ((1, "up_proj", "model.layers.1.mlp.up_proj"), (0, "lm_head", "lm_head")):
        found = np.concatenate(list(weights.rows(layer, site, np.dtype(np.float16))))
        np.testing.assert_array_equal(found, dense[f"{name}.weight"].numpy())


def test_memory_is_half_of_bfloat16_and_is_what_the_plan_says(real_model_dir: Path, tmp_path: Path) -> None:
    base = cut_model(real_model_dir, tmp_path / "base", 2)
    found = {
        quantise: load_model(base, "cpu", torch.bfloat16, kernels="numba", quantise=quantise)
        for quantise in (False, True)
    }
    embedding = found[True].shape.vocab_size * 576
    plain, codes = (found[quantise].weight_bytes - 2 * embedding for quantise in (False, True))
    assert codes < 0.55 * plain
    assert found[True].num_weights == found[False].num_weights == 2 * 3_540_096 - 2 * 2 * 576 + embedding
    for quantise, model in found.items():
        outline = outline_model(base, torch.device("cpu"), "bfloat16", quantise=quantise)
        assert abs(outline.weight_bytes - model.weight_bytes) < 0.001 * model.weight_bytes
        assert abs(outline.num_weights - model.num_weights) < 0.001 * model.num_weights


def test_what_is_not_served_is_refused_by_name(tmp_path: Path) -> None:
    wrapped = save_tiny(tmp_path / "granite", OTHERS["granite"])
    with pytest.raises(ModelUnsupported, match="--quantise: granite runs through transformers"):
        load_model(wrapped, "cpu", torch.float32, kernels="numba", quantise=True)
    with pytest.raises(ModelUnsupported, match="--quantise: granite runs through transformers"):
        outline_model(wrapped, torch.device("cpu"), "float32", quantise=True)
    base = save_tiny(tmp_path / "base", FAMILIES["llama"])
    path = base / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(
        ModelUnsupported, match=r"model\.layers\.1\.mlp\.up_proj\.weight: a weight of the base"
    ):
        load_model(base, "cpu", torch.float32, kernels="numba", quantise=True)
    with pytest.raises(BaseModelInvalid, match="up_proj of layer 1: a weight of the base"):
        list(BaseWeights(load_base_spec(base, quantise="int8")).rows(1, "up_proj", np.dtype(np.float32)))


def test_a_quantization_config_of_null_is_none(tmp_path: Path) -> None:
    for name, family, kernels in (
        ("llama", FAMILIES["llama"], "triton"),
        ("granite", OTHERS["granite"], "torch"),
    ):
        base = save_tiny(tmp_path / name, family)
        path = base / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": None}))
        assert load_model(base, "cpu", torch.float32, kernels=kernels).num_weights
        assert not load_base_spec(base).stored
        outline_model(base, torch.device("cpu"), "float32")


def test_an_answers_fingerprint_names_the_codes(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", FAMILIES["llama"])
    infos = []
    for quantise in ("none", "int8"):
        engine = engine_of(base, tmp_path / quantise, dtype="float32", quantise=quantise)
        infos.append(engine.built.info)
        engine.close()
    plain, codes = infos
    assert plain.numerics != codes.numerics
    assert (plain.quantise, codes.quantise) == ("none", "int8")
    # Versions that were uploaded before stay those of this base.
    assert plain.base_fingerprint == codes.base_fingerprint
    assert codes.same_bits


def test_the_engine_refuses_it_in_one_line(tmp_path: Path) -> None:
    wrapped = save_tiny(tmp_path / "granite", OTHERS["granite"])
    with pytest.raises(LoraplexError, match="--quantise: granite"):
        engine_of(wrapped, tmp_path / "work", kernels="torch", dtype="float32")
