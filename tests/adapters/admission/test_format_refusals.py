"""Admission against a base: each refusal with its code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loraplex.adapters.admission.base_model import load_base_spec
from loraplex.adapters.spec import BaseSpec
from support.adapters.admission import ARCH, Q0, halves, refusal
from support.adapters.drafts import (
    ALL_SITES,
    AdapterDraft,
    TinyBase,
    draft_adapter,
    site_module,
    write_base,
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseSpec:
    return load_base_spec(write_base(tmp_path_factory.mktemp("base"), ARCH))


def test_refusal_says_what_to_do(tmp_path: Path, base: BaseSpec) -> None:
    error = refusal(draft_adapter(ARCH, init_lora_weights="olora"), tmp_path, base)
    assert "path_initial_model_for_weight_conversion" in error.message


Change = Callable[[AdapterDraft], Any]


def _set(name: str, value: Any) -> Change:
    return lambda draft: draft.tensors.__setitem__(name, value)


def _drop(name: str) -> Change:
    return lambda draft: draft.tensors.pop(name)


def _config(**fields: Any) -> Change:
    return lambda draft: draft.config.update(fields)


def _retype(dtype: Any) -> Change:
    def change(draft: AdapterDraft) -> None:
        draft.tensors = {name: tensor.astype(dtype) for name, tensor in draft.tensors.items()}

    return change


def _dora(change: Callable[[np.ndarray], np.ndarray]) -> Change:
    """Make it DoRA, and change the first magnitude."""

    def apply(draft: AdapterDraft) -> None:
        draft.tensors.update(draft_adapter(ARCH, dora=True).tensors)
        draft.config["use_dora"] = True
        name = f"{Q0}.lora_magnitude_vector"
        draft.tensors[name] = change(draft.tensors[name])

    return apply


def _clear(draft: AdapterDraft) -> None:
    draft.tensors.clear()


REFUSALS: dict[str, tuple[str, str | None, Change]] = {
    "no tensors": ("missing_tensor", None, _clear),
    "A without B": ("missing_tensor", None, _drop(f"{Q0}.lora_B.weight")),
    "B without A": ("missing_tensor", None, _drop(f"{Q0}.lora_A.weight")),
    "a module of the targets without tensors": (
        "missing_tensor",
        None,
        lambda d: [d.tensors.pop(f"{Q0}.lora_{m}.weight") for m in "AB"],
    ),
    "a target without tensors": (
        "missing_tensor",
        None,
        _config(target_modules=["q_proj", "v_proj", "k_proj"]),
    ),
    "a target that is another module of the base": (
        "missing_tensor",
        None,
        _config(target_modules=["q_proj", "v_proj", "embed_tokens"]),
    ),
    "a site not among the targets": ("unexpected_tensor", None, _config(target_modules=["q_proj"])),
    "a layer not to transform": ("unexpected_tensor", None, _config(layers_to_transform=[0])),
    "a layer without tensors, beside one beyond the base": (
        "missing_tensor",
        None,
        lambda d: (
            d.config.update(layers_to_transform=[0, 1, 2]),
            d.tensors.update(draft_adapter(ARCH, layers=[0]).tensors),
            [d.tensors.pop(name) for name in list(d.tensors) if "layers.1." in name],
        ),
    ),
    "a name without PEFT's prefix": ("unexpected_tensor", None, _set("model.x.lora_A.weight", halves(4, 32))),
    "a name that is none of LoRA's": ("unexpected_tensor", None, _set(f"{Q0}.lora_A.extra", halves(4, 32))),
    "a weight that the base lacks": (
        "unexpected_tensor",
        None,
        _set("base_model.model.foo.weight", halves(4)),
    ),
    "a name of nothing": ("unexpected_tensor", None, _set("base_model.model.", halves(4))),
    "only the prefix and a matrix": (
        "unexpected_tensor",
        None,
        _set("base_model.model.lora_A.weight", halves(4)),
    ),
    "plain and infix for one module": (
        "unexpected_tensor",
        None,
        _set(f"{Q0}.lora_A.default.weight", halves(4, 32)),
    ),
    "two adapters in one file": (
        "unexpected_tensor",
        None,
        lambda d: d.tensors.update(
            {f"base_model.model.{site_module(1, 'k_proj')}.lora_{m}.other.weight": halves(4, 4) for m in "AB"}
        ),
    ),
    "a module of another model": (
        "base_mismatch",
        None,
        lambda d: d.tensors.update(
            {f"base_model.model.transformer.h.0.attn.c_attn.lora_{m}.weight": halves(4, 4) for m in "AB"}
        ),
    ),
    "a layer that the base lacks": (
        "base_mismatch",
        None,
        lambda d: d.tensors.update(
            {f"base_model.model.{site_module(7, 'q_proj')}.lora_{m}.weight": halves(4, 4) for m in "AB"}
        ),
    ),
    "magnitudes without use_dora": (
        "unexpected_tensor",
        None,
        _set(f"{Q0}.lora_magnitude_vector", halves(32)),
    ),
    "use_dora without magnitudes": ("missing_tensor", None, _config(use_dora=True)),
    "use_dora with one magnitude": (
        "missing_tensor",
        None,
        lambda d: (
            d.config.update(use_dora=True),
            d.tensors.update({f"{Q0}.lora_magnitude_vector": halves(32)}),
        ),
    ),
    "a magnitude without A and B": (
        "missing_tensor",
        None,
        _set("base_model.model.model.layers.0.mlp.up_proj.lora_magnitude_vector", halves(48)),
    ),
    "a magnitude of another width": ("shape_mismatch", None, _dora(lambda m: m[:-1])),
    "a magnitude with two dimensions": ("shape_mismatch", None, _dora(lambda m: m[None])),
    "integers as magnitudes": ("unsupported_feature", "dtype_I8", _dora(lambda m: m.astype(np.int8))),
    "NaN among the magnitudes": ("non_finite", None, _dora(lambda m: m * np.float32("nan"))),
    "a fused target on a base that is not": (
        "base_mismatch",
        None,
        lambda d: d.tensors.update(
            {
                f"base_model.model.model.layers.0.self_attn.qkv_proj.lora_{m}.weight": halves(4, 4)
                for m in "AB"
            }
        ),
    ),
    "the head, which all-linear leaves out": (
        "unexpected_tensor",
        None,
        lambda d: (
            d.config.update(target_modules="all-linear"),
            d.tensors.update(draft_adapter(ARCH, targets=[*ALL_SITES, "lm_head"]).tensors),
        ),
    ),
    "an excluded module": ("unexpected_tensor", None, _config(exclude_modules=["q_proj"])),
    "a rank that no expression names": (
        "shape_mismatch",
        None,
        _config(r=8, rank_pattern={".*q_proj": 16, ".*v_proj": 3}),
    ),
    "rows that the config does not name": (
        "unexpected_tensor",
        None,
        _set("base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta", halves(2, 32)),
    ),
    "64-bit floats beyond 32 bits": (
        "non_finite",
        None,
        lambda d: d.tensors.update({f"{Q0}.lora_A.weight": np.full((4, 32), 1e200)}),
    ),
    "PiSSA, with what to do": (
        "unsupported_feature",
        "init_lora_weights",
        _config(init_lora_weights="pissa_niter_4"),
    ),
    "a bias of B": ("unsupported_feature", "lora_bias", _set(f"{Q0}.lora_B.bias", halves(32))),
    "half of an embedding adapter": (
        "missing_tensor",
        None,
        _set("base_model.model.model.embed_tokens.lora_embedding_A", halves(4, 64)),
    ),
    "a rank above the maximum": (
        "rank_exceeds_max",
        None,
        lambda d: d.tensors.update(
            {f"{Q0}.lora_A.weight": halves(17, 32), f"{Q0}.lora_B.weight": halves(32, 17)}
        ),
    ),
    "a rank other than the config's": ("shape_mismatch", None, _config(r=8)),
    "a rank other than the pattern's": ("shape_mismatch", None, _config(rank_pattern={"v_proj": 3})),
    "rank zero": (
        "shape_mismatch",
        None,
        lambda d: d.tensors.update(
            {f"{Q0}.lora_A.weight": halves(0, 32), f"{Q0}.lora_B.weight": halves(32, 0)}
        ),
    ),
    "A and B of different ranks": ("shape_mismatch", None, _set(f"{Q0}.lora_B.weight", halves(32, 5))),
    "A with three dimensions": ("shape_mismatch", None, _set(f"{Q0}.lora_A.weight", halves(4, 32, 1))),
    "A as a scalar": ("shape_mismatch", None, _set(f"{Q0}.lora_A.weight", np.array(1, np.float32))),
    "A transposed": ("shape_mismatch", None, _set(f"{Q0}.lora_A.weight", halves(32, 4))),
    "one A of another width": ("shape_mismatch", None, _set(f"{Q0}.lora_A.weight", halves(4, 33))),
    "one B of another width": ("shape_mismatch", None, _set(f"{Q0}.lora_B.weight", halves(31, 4))),
    "integers": ("unsupported_feature", "dtype_I8", _retype(np.int8)),
    "NaN in A": ("non_finite", None, _set(f"{Q0}.lora_A.weight", np.full((4, 32), np.nan, np.float32))),
    "infinity in B": ("non_finite", None, _set(f"{Q0}.lora_B.weight", np.full((32, 4), -np.inf, np.float32))),
    "a scaling that overflows": (
        "non_finite",
        None,
        lambda d: (
            d.config.update(lora_alpha=1e6),
            d.tensors.update({f"{Q0}.lora_B.weight": np.full((32, 4), 3e38, np.float32)}),
        ),
    ),
    "no effect: B is zero": (
        "no_effect",
        None,
        lambda d: d.tensors.update({k: v * 0 for k, v in d.tensors.items() if "lora_B" in k}),
    ),
    "no effect: A is zero": (
        "no_effect",
        None,
        lambda d: d.tensors.update({k: v * 0 for k, v in d.tensors.items() if "lora_A" in k}),
    ),
    "no effect: alpha is zero": ("no_effect", None, _config(lora_alpha=0)),
    "no effect: alpha is too small": ("no_effect", None, _config(lora_alpha=1e-320)),
    "no effect: A and B are too small": (
        "no_effect",
        None,
        lambda d: d.tensors.update({k: np.full_like(v, 1e-40) for k, v in d.tensors.items()}),
    ),
    "PiSSA": ("unsupported_feature", "init_lora_weights", _config(init_lora_weights="pissa")),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(tmp_path: Path, base: BaseSpec, case: str) -> None:
    code, feature, change = REFUSALS[case]
    draft = draft_adapter(ARCH)
    change(draft)
    error = refusal(draft, tmp_path, base)
    assert (error.code, error.feature) == (code, feature), error.message


def test_an_adapter_of_a_wider_model_is_a_base_mismatch(tmp_path: Path, base: BaseSpec) -> None:
    wider = TinyBase(hidden=64, heads=8, kv_heads=4)
    error = refusal(draft_adapter(wider, targets=["v_proj", "down_proj"]), tmp_path, base)
    assert error.code == "base_mismatch"
    assert "32 -> 16 in the base, 64 -> 32 in the adapter" in error.message
