"""A family that the source does not know: one row of the table and its config's fields, and nothing else.

Its layers are of two kinds that differ in all that a row can say: heads, KV heads, head size, window, rope, width,
activation, biases, norms. The reference is torch over whole prompts, without a cache.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import gelu, linear, rms_norm, silu
from transformers import AutoConfig, PretrainedConfig

from loraplex.adapters.device.arena import AdapterArena
from loraplex.adapters.device.host_image import build_image
from loraplex.adapters.device.layout import ArenaLayout
from loraplex.engine.kv.layers import CacheKind
from loraplex.engine.model.base import ModelUnsupported
from loraplex.engine.model.families import table
from loraplex.engine.model.families.rows import Family, LayerRow
from loraplex.engine.model.fused import attention_needs
from loraplex.kernels.attention.triton_tiling import AttentionShape
from loraplex.kernels.backend import resolve_kernels
from support.adapters.lora_zoo import ZooAdapter, make_adapter
from support.engine.local_engine import LocalEngine
from support.engine.repeater import Repeater
from support.engine.same_bits import Asked, Question
from support.models.checkpoints import PagedRun
from support.models.loading import load_model, plan_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")

HIDDEN, VOCAB, EPS = 32, 131, 1e-6
FULL = LayerRow(qkv_bias=True, o_bias=False, mlp_bias=False)
SLIDING = LayerRow(
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    qk_norm=True,
    norms_behind=True,
    activation="gelu_tanh",
    activation_field="swa_act",
    num_heads="swa_heads",
    kv_heads="swa_kv_heads",
    head_dim="swa_head_dim",
    mlp_size="swa_size",
    window="sliding_window",
    scale="swa_scale",
    softcap="swa_softcap",
)
ROW = Family({"full_attention": FULL, "sliding_attention": SLIDING}, norm_offset=0.5, rope_by_kind=True)
CONFIG: dict[str, Any] = {
    "model_type": "two_kinds", "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 48, "hidden_act": "silu",
    "swa_heads": 6, "swa_kv_heads": 3, "swa_head_dim": 8, "swa_size": 24, "swa_act": "gelu_pytorch_tanh",
    "swa_scale": 5.0, "swa_softcap": 3.0, "sliding_window": 9,
    "rms_norm_eps": EPS, "max_position_embeddings": 512, "tie_word_embeddings": False,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}  # fmt: skip
SIZES = {"full_attention": (2, 1, 16, 48), "sliding_attention": (6, 3, 8, 24)}
"""Heads, KV heads, head size, width of the feed-forward."""


class TwoKindsConfig(PretrainedConfig):  # type: ignore[misc]
    model_type = "two_kinds"


def make_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    for index, kind in enumerate(CONFIG["layer_types"]):
        heads, kv_heads, dim, size = SIZES[kind]
        own: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj.weight": (heads * dim, HIDDEN),
            "self_attn.k_proj.weight": (kv_heads * dim, HIDDEN),
            "self_attn.v_proj.weight": (kv_heads * dim, HIDDEN),
            "self_attn.o_proj.weight": (HIDDEN, heads * dim),
            "mlp.gate_proj.weight": (size, HIDDEN),
            "mlp.up_proj.weight": (size, HIDDEN),
            "mlp.down_proj.weight": (HIDDEN, size),
            "input_layernorm.weight": (HIDDEN,),
            "post_attention_layernorm.weight": (HIDDEN,),
        }
        if kind == "full_attention":
            own |= {f"self_attn.{name}_proj.bias": own[f"self_attn.{name}_proj.weight"][:1] for name in "qkv"}
        else:
            own |= {f"self_attn.{name}_norm.weight": (dim,) for name in "qk"}
            own |= {f"{place}_feedforward_layernorm.weight": (HIDDEN,) for place in ("pre", "post")}
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in own.items()}
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * 0.3 + (0.5 if "norm" in name else 0.0)
        for name, shape in shapes.items()
    }


def reference_logits(weights: dict[str, torch.Tensor], tokens: list[int]) -> torch.Tensor:
    """[T, V]"""

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(x, x.shape[-1:], weights[f"{name}.weight"] + 0.5, EPS)

    def rotate(x: torch.Tensor, theta: float) -> torch.Tensor:
        half = x.shape[-1] // 2
        angles = torch.arange(len(x))[:, None] / theta ** (torch.arange(half) / half)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        a, b = x.split(half, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    x, count = weights["model.embed_tokens.weight"][tokens], len(tokens)
    distance = torch.arange(count)[:, None] - torch.arange(count)
    for index, kind in enumerate(CONFIG["layer_types"]):
        layer = f"model.layers.{index}."
        attention, slides = f"{layer}self_attn.", kind == "sliding_attention"
        heads, kv_heads, dim, _ = SIZES[kind]
        y = norm(x, f"{layer}input_layernorm")
        q, k, v = (
            linear(
                y, weights[f"{attention}{name}_proj.weight"], weights.get(f"{attention}{name}_proj.bias")
            ).view(count, -1, dim)
            for name in "qkv"
        )
        if slides:
            q, k = norm(q, f"{attention}q_norm"), norm(k, f"{attention}k_norm")
        theta = CONFIG["rope_parameters"][kind]["rope_theta"]
        q, k = rotate(q, theta), rotate(k, theta)
        k, v = (each.repeat_interleave(heads // kv_heads, 1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * (5.0 if slides else dim) ** -0.5
        hidden = distance < 0
        if slides:
            scores, hidden = 3.0 * (scores / 3.0).tanh(), hidden | (distance >= CONFIG["sliding_window"])
        shares = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        y = linear(torch.einsum("hqk,khd->qhd", shares, v).flatten(1), weights[f"{attention}o_proj.weight"])
        y = norm(y, f"{layer}post_attention_layernorm") if slides else y
        x = x + y
        y = norm(x, f"{layer}{'pre_feedforward' if slides else 'post_attention'}_layernorm")
        gate, up = (linear(y, weights[f"{layer}mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        gate = gelu(gate, approximate="tanh") if slides else silu(gate)
        y = linear(gate * up, weights[f"{layer}mlp.down_proj.weight"])
        x = x + (norm(y, f"{layer}post_feedforward_layernorm") if slides else y)
    return linear(norm(x, "model.norm"), weights["lm_head.weight"])


def merged(weights: dict[str, torch.Tensor], adapter: ZooAdapter) -> dict[str, torch.Tensor]:
    changed = dict(weights)
    for (layer, site), (a, b, scaling) in adapter.dense.items():
        part = "mlp" if site.removesuffix("_proj") in ("gate", "up", "down") else "self_attn"
        changed[f"model.layers.{layer}.{part}.{site}.weight"] += scaling * b @ a
    return changed


@pytest.fixture
def model_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(table.FAMILIES, "two_kinds", ROW)  # type: ignore[arg-type]
    AutoConfig.register("two_kinds", TwoKindsConfig, exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(make_weights(), tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("kernels", ["torch", "numba"])
def test_a_family_of_two_kinds_is_one_row(kernels: str, model_dir: Path) -> None:
    """Rows of the base and of an adapter on all linears, in one batch, in slices."""
    model = load_model(model_dir, "cpu", "float32", kernels=kernels)
    assert model.shape.caches == (CacheKind(3, 8, 9), CacheKind(1, 16)) * 2
    layout = ArenaLayout(model.site_groups, model.num_layers, model.dtype, max_rank=8)
    adapter = make_adapter(model_dir / "adapter", model.site_groups, rank=5, layers=range(4), std=0.2)
    assert len(adapter.dense) == 4 * 7
    image = build_image(adapter.spec, adapter.path, layout)
    arena = AdapterArena(layout, image.num_pages, 1, resolve_kernels(kernels, torch.device("cpu")))
    arena.write(image, 0, tuple(range(image.num_pages)))
    rng = random.Random(0)
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in (1, 17, 40, 40)]
    slots = [0, -1, 0, -1]
    run = PagedRun(model, prompts)
    while alive := [i for i, p in enumerate(prompts) if run.done[i] < len(p)]:
        chosen = rng.sample(alive, rng.randint(1, len(alive)))
        counts = {i: min(rng.choice([1, 1, 5, 16]), len(prompts[i]) - run.done[i]) for i in chosen}
        ends = list(accumulate(counts.values()))
        segments = [(slots[i], end - counts[i], counts[i]) for i, end in zip(counts, ends, strict=True)]
        run.step(counts, arena.lora_pass(segments, ends[-1]))
    for index, (prompt, slot) in enumerate(zip(prompts, slots, strict=True)):
        weights = make_weights() if slot < 0 else merged(make_weights(), adapter)
        expected = reference_logits(weights, prompt)
        torch.testing.assert_close(run.result(index), expected, atol=2e-4, rtol=1e-4)


def test_a_kind_that_the_row_has_not_is_refused(model_dir: Path) -> None:
    assert "two_kinds on the fused decoder" in plan_model(model_dir).explain()
    (model_dir / "config.json").write_text(json.dumps(CONFIG | {"layer_types": ["strided_attention"] * 4}))
    with pytest.raises(ModelUnsupported, match="full_attention or sliding_attention 4 times"):
        plan_model(model_dir)


ENGINE: dict[str, Any] = {
    "dtype": "float32", "num_threads": 1, "max_model_len": 256, "adapter_memory": 1 << 20,
    "adapter_cpu_memory": 1 << 20,
}  # fmt: skip


@pytest.mark.parametrize("kernels", ["torch", "numba"])
def test_the_window_gives_its_blocks_back(kernels: str, model_dir: Path) -> None:
    settings = {**ENGINE, "kv_cache_memory": 1 << 20, "max_num_batched_tokens": 40}
    engine = LocalEngine(model_dir, model_dir / "work", kernels=kernels, **settings)
    prompt = [random.Random(1).randrange(VOCAB) for _ in range(150)]
    engine.add("long", prompt, max_tokens=50)
    held = []
    while engine.core.has_work:
        engine.step()
        held.append(engine.core.stats().num_kv_blocks_used)
    tokens = engine.tokens("long")
    engine.close()
    expected = reference_logits(make_weights(), prompt + tokens[:-1])[len(prompt) - 1 :].argmax(-1)
    assert tokens == expected.tolist()
    # 13 blocks of the layers that see all, and of the others what 9 positions may reach into.
    assert engine.built.info.kv_groups == 2
    assert held[-2] == 13 + 2
    assert max(held) <= 13 + 5


@pytest.mark.usefixtures("quick_interpreter")
@pytest.mark.parametrize(("window", "groups"), [(9, 2), pytest.param(1000, 1, marks=pytest.mark.slow)])
def test_steps_on_triton_are_laid_out_for_each_size(
    window: int, groups: int, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In groups of their own, and in one where all layers keep everything; chunks, and decodes that are recorded."""
    monkeypatch.setitem(CONFIG, "sliding_window", window)
    (model_dir / "config.json").write_text(json.dumps(CONFIG))
    recorder = Repeater()
    settings = {**ENGINE, "kv_cache_memory": 1 << 18, "max_num_batched_tokens": 16, "max_num_seqs": 1}
    engine = LocalEngine(model_dir, model_dir / "work", kernels="triton", recorder=recorder, **settings)
    assert engine.built.info.kv_groups == groups
    prompt = [random.Random(3).randrange(VOCAB) for _ in range(20)]
    engine.add("a", prompt, max_tokens=3)
    engine.run()
    engine.close()
    assert recorder.replays
    tokens = engine.tokens("a")
    expected = reference_logits(make_weights(), prompt + tokens[:-1])[len(prompt) - 1 :].argmax(-1)
    assert tokens == expected.tolist()


def test_a_layer_may_read_anothers_blocks_with_a_window_of_its_own(model_dir: Path) -> None:
    """Attention is laid out for it too."""
    spec = plan_model(model_dir).spec
    assert spec is not None
    sliding, full = spec.layers[:2]
    cache = replace(sliding.mixer.cache, window=4, shares=0)
    reader = replace(sliding, mixer=msgspec.structs.replace(sliding.mixer, cache=cache))
    needs = attention_needs(replace(spec, layers=(sliding, full, reader)))
    small, large = AttentionShape(6, 3, 8, 16), AttentionShape(2, 1, 16, 16)
    assert needs.groups == (((small, 9), (small, 4)), ((large, None),))


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_bits_do_not_depend_on_neighbours(kv_cache_dtype: str, model_dir: Path, tmp_path: Path) -> None:
    rng = random.Random(2)
    shared = [rng.randrange(VOCAB) for _ in range(60)]
    asked = [
        Question(
            (
                *shared[: rng.choice([0, 20, 40])],
                *(rng.randrange(VOCAB) for _ in range(rng.choice([1, 9, 20]))),
            ),
            None,
            {"max_tokens": rng.choice([2, 60]), "temperature": 1.0, "seed": number},
        )
        for number in range(12)
    ]
    settings = {**ENGINE, "kernels": "numba", "kv_cache_dtype": kv_cache_dtype}
    lone = Asked(model_dir, tmp_path / "lone", {}, **settings, kv_cache_memory=4 << 20)
    expected = lone.each_alone(asked)
    lone.close()
    block = lone.engine.built.info.kv_bytes // lone.engine.built.info.num_kv_blocks
    cramped = {"kv_cache_memory": 14 * block, "max_model_len": 128, "max_num_batched_tokens": 30}
    crowd = Asked(model_dir, tmp_path / "crowd", {}, **settings | cramped)
    differing = crowd.wrong_among_neighbours(expected, rng, 30)
    stats = crowd.engine.core.stats()
    crowd.close()
    assert not differing
    assert min(stats.num_preemptions, stats.prefix_cache_hits) > 0
