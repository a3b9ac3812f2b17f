"""Rows of the embedding and the head in an upload, and LoRA on the embedding: what is read, and each refusal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loraplex.adapters.admission.base_model import load_base_spec
from loraplex.adapters.admission.config.token_indices import MAX_TOKEN_ROWS
from loraplex.adapters.admission.inspection import inspect_adapter
from loraplex.adapters.numerics import EMBEDDING_ROWS, HEAD_ROWS
from loraplex.adapters.numerics.upload import Upload, UploadedRows
from loraplex.adapters.spec import AdapterSpec, BaseSpec
from support.adapters.admission import ARCH, halves, refusal
from support.adapters.drafts import AdapterDraft, TinyBase, base_tensors, draft_adapter, write_base
from support.adapters.peft_zoo import train

EMBED, HEAD = "base_model.model.model.embed_tokens", "base_model.model.lm_head"
TIED = TinyBase(tied=True)
C, V = ARCH.hidden, ARCH.vocab


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, BaseSpec]:
    root = tmp_path_factory.mktemp("bases")
    return {
        "untied": load_base_spec(write_base(root / "untied", ARCH)),
        "tied": load_base_spec(write_base(root / "tied", TIED)),
    }


def with_rows(indices: Any, rows: dict[str, int], suffix: str = "", **config: Any) -> AdapterDraft:
    draft = draft_adapter(ARCH, trainable_token_indices=indices, **config)
    for module, count in rows.items():
        draft.tensors[f"{module}.token_adapter.trainable_tokens_delta{suffix}"] = halves(count, C)
    return draft


def with_lora(**config: Any) -> AdapterDraft:
    """On the embedding, beside q_proj and v_proj."""
    draft = draft_adapter(ARCH, **{"target_modules": ["q_proj", "v_proj", "embed_tokens"], **config})
    draft.tensors[f"{EMBED}.lora_embedding_A"] = halves(4, V)
    draft.tensors[f"{EMBED}.lora_embedding_B"] = halves(C, 4)
    return draft


def inspect(draft: AdapterDraft, directory: Path, base: BaseSpec) -> AdapterSpec:
    files = draft.write(directory)
    return inspect_adapter(files.config, files.tensors, base, max_rank=16)


@pytest.mark.parametrize("suffix", ["", ".default"])
@pytest.mark.parametrize(
    ("base", "indices", "rows", "expected"),
    [
        ("tied", [5, 1], {EMBED: 2}, {"model.embed_tokens": ((5, 1), True, True)}),
        ("untied", [5, 1], {EMBED: 2}, {"model.embed_tokens": ((5, 1), True, False)}),
        ("tied", {"lm_head": [3]}, {HEAD: 1}, {"lm_head": ((3,), False, True)}),
        ("tied", {"model.embed_tokens": [3], "lm_head": [3]}, {EMBED: 1}, {"model.embed_tokens": ((3,), True, True)}),
        (
            "tied",
            {"embed_tokens": [3], "lm_head": [4, 2]},
            {EMBED: 1, HEAD: 2},
            {"model.embed_tokens": ((3,), True, False), "lm_head": ((4, 2), False, True)},
        ),
        (
            "untied",
            {"embed_tokens": [3], "lm_head": [3]},
            {EMBED: 1, HEAD: 1},
            {"model.embed_tokens": ((3,), True, False), "lm_head": ((3,), False, True)},
        ),
    ],
)  # fmt: skip
def test_rows_are_read_as_peft_reads_them(
    base: str,
    indices: Any,
    rows: dict[str, int],
    expected: dict[str, Any],
    suffix: str,
    tmp_path: Path,
    bases: dict[str, BaseSpec],
) -> None:
    draft = with_rows(indices, rows, suffix, **({"infix": "default"} if suffix else {}))
    spec = inspect(draft, tmp_path, bases[base])
    assert {t.module_path: (t.ids, t.in_embedding, t.in_head) for t in spec.tokens} == expected
    plain = inspect(draft_adapter(ARCH), tmp_path / "plain", bases[base])
    added = sum(len(ids) for ids, _, _ in expected.values()) * C
    assert spec.report["parameters"] == plain.report["parameters"] + added


@pytest.mark.parametrize(
    "indices", [[5, 1], {"embed_tokens": [5, 1]}, {"embed_tokens": [5, 1], "lm_head": [5, 1]}]
)
def test_rows_of_a_tied_head_that_are_the_embeddings_are_a_copy(
    indices: Any, tmp_path: Path, bases: dict[str, BaseSpec]
) -> None:
    """As PEFT saves them with `save_embedding_layers`, or after a vocabulary was resized."""
    draft = with_rows(indices, {HEAD: 2, EMBED: 2})
    for module in (EMBED, HEAD):
        draft.tensors[f"{module}.token_adapter.base_layer.weight"] = base_tensors(TIED)[
            "model.embed_tokens.weight"
        ]
    spec = inspect(draft, tmp_path, bases["tied"])
    once = inspect(with_rows(indices, {EMBED: 2}), tmp_path / "once", bases["tied"])
    assert [(t.module_path, t.ids, t.in_embedding, t.in_head) for t in spec.tokens] == [
        (t.module_path, t.ids, t.in_embedding, t.in_head) for t in once.tokens
    ]
    assert spec.report["parameters"] == once.report["parameters"]
    second = Upload(tmp_path / "adapter_config.json", tmp_path / "adapter_model.safetensors", bases["tied"])
    assert {site for _, site in second.sites} == {"q_proj", "v_proj", EMBEDDING_ROWS, HEAD_ROWS}
    for site in (EMBEDDING_ROWS, HEAD_ROWS):
        rows = second.read(0, site)
        assert isinstance(rows, UploadedRows)
        assert (rows.ids.tolist(), rows.rows.shape) == ([1, 5], (2, C))


def test_the_way_to_save_again_that_is_proposed_is_served(tmp_path: Path) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    directory = write_base(tmp_path / "base", TIED, dtype="F32")
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], trainable_token_indices=[3, 4])
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32), config)
    train(model, 0, 0.1)
    base = load_base_spec(directory)
    found = {}
    for saved in (True, False):
        out = tmp_path / str(saved)
        model.save_pretrained(str(out), save_embedding_layers=saved)
        files = out / "adapter_config.json", out / "adapter_model.safetensors"
        found[saved] = inspect_adapter(*files, base, max_rank=16)
    assert [t.ids for t in found[True].tokens] == [t.ids for t in found[False].tokens] == [(3, 4)]


def test_lora_on_the_embedding_is_a_site_and_copies_of_it_are_dropped(
    tmp_path: Path, bases: dict[str, BaseSpec]
) -> None:
    draft = with_lora()
    draft.tensors[f"{EMBED}.base_layer.weight"] = base_tensors(ARCH)["model.embed_tokens.weight"]
    spec = inspect(draft, tmp_path, bases["untied"])
    (site,) = [site for site in spec.sites if site.site == "embed_tokens"]
    assert (site.layer, site.rank, site.scaling) == (0, 4, 2.0)
    assert (site.a.shape, site.b.shape) == ((4, V), (C, 4))
    assert spec.targets == ("q_proj", "v_proj", "embed_tokens")
    assert spec.report["rank_by_module"]["model.embed_tokens"] == 4
    assert spec.report["modules_ignored"] == 1


Case = tuple[str, str, str | None, Callable[[], AdapterDraft], str]


def _tensor(draft: AdapterDraft, name: str, value: np.ndarray) -> AdapterDraft:
    draft.tensors[name] = value
    return draft


REFUSALS: dict[str, Case] = {
    "a token beyond the vocabulary": (
        "untied", "base_mismatch", None, lambda: with_rows([V], {EMBED: 1}), f"model.embed_tokens has {V} rows",
    ),
    "a token twice": ("untied", "config_invalid", None, lambda: with_rows([3, 3], {EMBED: 2}), "token 3 twice"),
    "a negative token": ("untied", "config_invalid", None, lambda: with_rows([-1], {EMBED: 1}), "not -1"),
    "too many tokens": (
        "untied", "too_large", None, lambda: with_rows(list(range(MAX_TOKEN_ROWS + 1)), {}), "at most 1024 rows",
    ),
    "fewer rows than tokens": (
        "untied", "shape_mismatch", None, lambda: with_rows([3, 4], {EMBED: 1}), "each of the 2 tokens",
    ),
    "rows of another width": (
        "untied", "shape_mismatch", None,
        lambda: _tensor(with_rows([3], {}), f"{EMBED}.token_adapter.trainable_tokens_delta", halves(1, C + 1)), "of 32",
    ),
    "no rows": ("untied", "missing_tensor", None, lambda: with_rows([3], {}), "no trainable_tokens_delta came for it"),
    "rows of the head that nobody named": (
        "untied", "unexpected_tensor", None, lambda: with_rows([3], {EMBED: 1, HEAD: 1}), "does not name its tokens",
    ),
    "other rows of a tied head than of the embedding": (
        "tied", "unexpected_tensor", None,
        lambda: _tensor(with_rows([3], {EMBED: 1}), f"{HEAD}.token_adapter.trainable_tokens_delta", halves(1, C) * 2),
        "other rows of trainable_token_indices for lm_head",
    ),
    "rows of a tied head in another dtype": (
        "tied", "unexpected_tensor", None,
        lambda: _tensor(
            with_rows({"embed_tokens": [3], "lm_head": [3]}, {EMBED: 1}),
            f"{HEAD}.token_adapter.trainable_tokens_delta", halves(1, C).astype(np.float16),
        ),
        "other rows of trainable_token_indices for lm_head",
    ),
    "rows of a linear": (
        "untied", "unsupported_feature", "trainable_token_indices",
        lambda: with_rows({"q_proj": [1]}, {"base_model.model.model.layers.0.self_attn.q_proj": 1}), "names 'q_proj'",
    ),
    "rows named twice": (
        "untied", "unsupported_feature", "trainable_token_indices",
        lambda: with_rows({"embed_tokens": [1], "model.embed_tokens": [2]}, {EMBED: 1}), "each named once",
    ),
    "other rows of a head that is to be tied": (
        "tied", "config_invalid", None,
        lambda: with_rows({"embed_tokens": [1], "lm_head": [2]}, {EMBED: 1, HEAD: 1}, ensure_weight_tying=True),
        "ensure_weight_tying is set",
    ),
    "rows that are not finite": (
        "untied", "non_finite", None,
        lambda: _tensor(
            with_rows([3], {}), f"{EMBED}.token_adapter.trainable_tokens_delta", np.full((1, C), np.nan, np.float32)
        ),
        "NaN or infinite",
    ),
    "rows of integers": (
        "untied", "unsupported_feature", "dtype_I8",
        lambda: _tensor(
            with_rows([3], {}), f"{EMBED}.token_adapter.trainable_tokens_delta", np.zeros((1, C), np.int8)
        ),
        "stored as I8",
    ),
    "rows outside of a token adapter": (
        "untied", "unexpected_tensor", None,
        lambda: _tensor(with_rows([3], {EMBED: 1}), f"{EMBED}.trainable_tokens_delta", halves(1, C)), "token_adapter",
    ),
    "both ways to train an embedding": (
        "untied", "unsupported_feature", "trainable_token_indices",
        lambda: _tensor(
            with_lora(trainable_token_indices=[3]), f"{EMBED}.token_adapter.trainable_tokens_delta", halves(1, C)
        ),
        "take one of the two",
    ),
    "DoRA on the embedding": (
        "untied", "unsupported_feature", "use_dora",
        lambda: _tensor(with_lora(dora=True), f"{EMBED}.lora_magnitude_vector", halves(C)), "DoRA on model.embed",
    ),
    "an embedding's A on a linear": (
        "untied", "unexpected_tensor", None,
        lambda: AdapterDraft(
            draft_adapter(ARCH).config,
            {
                name.replace(".lora_", ".lora_embedding_").removesuffix(".weight"): tensor
                for name, tensor in draft_adapter(ARCH).tensors.items()
            },
        ),
        "which PEFT gives to embeddings alone",
    ),
    "an embedding of a larger vocabulary": (
        "untied", "base_mismatch", None,
        lambda: _tensor(with_lora(), f"{EMBED}.base_layer.weight", halves(V + 3, C)), "the vocabulary was resized",
    ),
    "LoRA on an embedding of a larger vocabulary": (
        "untied", "base_mismatch", None,
        lambda: _tensor(with_lora(), f"{EMBED}.lora_embedding_A", halves(4, V + 3)), f"{V} -> {C} in the base",
    ),
    "A that is not finite": (
        "untied", "non_finite", None,
        lambda: _tensor(with_lora(), f"{EMBED}.lora_embedding_A", np.full((4, V), np.inf, np.float32)), "infinite",
    ),
    "a tied head without its adapter": (
        "tied", "missing_tensor", None, lambda: with_lora(ensure_weight_tying=True), "set ensure_weight_tying to false",
    ),
    "a tied head without its adapter, of an expression": (
        "tied", "missing_tensor", None,
        lambda: with_lora(ensure_weight_tying=True, target_modules="(q_proj|v_proj|embed_tokens)"),
        "set ensure_weight_tying to false",
    ),
    "a tied head with another adapter": (
        "tied", "unexpected_tensor", None,
        lambda: _tensor(
            _tensor(with_lora(ensure_weight_tying=True), f"{HEAD}.lora_A.weight", halves(4, C)),
            f"{HEAD}.lora_B.weight", halves(V, 4) / 2,
        ),
        "the file holds another one for lm_head",
    ),
    "a head's adapter where nothing is tied": (
        "untied", "unexpected_tensor", None,
        lambda: _tensor(
            _tensor(with_lora(ensure_weight_tying=True), f"{HEAD}.lora_A.weight", halves(4, C)),
            f"{HEAD}.lora_B.weight", halves(V, 4),
        ),
        "lm_head, which the config does not name",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case: str, tmp_path: Path, bases: dict[str, BaseSpec]) -> None:
    base, code, feature, draft, says = REFUSALS[case]
    error = refusal(draft(), tmp_path, bases[base])
    assert (error.code, error.feature) == (code, feature), error.message
    assert says in error.message
