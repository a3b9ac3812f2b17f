"""Ropes whose frequencies depend on the length: one choice holds for all sequences (ADR 0011)."""

from __future__ import annotations

import random

import pytest
import torch

from loraplex.engine.execution.kv_cache import SequenceTooLong, size_kv_cache
from loraplex.engine.model.base import ModelUnsupported
from support.models.checkpoints import FAMILIES, VOCAB, PagedRun, edit_config, reference_logits, save_tiny
from support.models.loading import load_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")

LONGROPE = FAMILIES["phi3-longrope"] | {
    "original_max_position_embeddings": 32,
    "max_position_embeddings": 200,
}
DYNAMIC = FAMILIES["llama-dynamic-rope"] | {"max_position_embeddings": 32}  # stretched by 4


def prompt(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(VOCAB) for _ in range(length)]


def in_slices(model, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Chunks of all sequences beside each other, the last five positions of each one by one."""
    run = PagedRun(model, prompts)
    while alive := [i for i, p in enumerate(prompts) if run.done[i] < len(p)]:
        run.step({i: min(19, max(1, len(prompts[i]) - 5 - run.done[i])) for i in alive})
    return [run.result(i) for i in range(len(prompts))]


def test_longrope_is_short_up_to_its_original_length(tmp_path, caplog):
    path = save_tiny(tmp_path, LONGROPE)
    for asked in (0, 20, 32):
        model = load_model(path, "cpu", "float32", max_model_len=asked)
        assert model.shape.max_positions == 32
    assert "up to 32 positions" in caplog.text
    prompts = [prompt(9), prompt(32)]
    for ours, theirs in zip(in_slices(model, prompts), reference_logits(path, prompts), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_longrope_is_long_for_all_where_more_is_asked_for(tmp_path):
    path = save_tiny(tmp_path / "m", LONGROPE)
    model = load_model(path, "cpu", "float32", max_model_len=33)
    assert model.shape.max_positions == 200
    prompts = [prompt(9), prompt(33), prompt(120)]
    ours = in_slices(model, prompts)
    for length, theirs in zip((33, 120), reference_logits(path, prompts[1:]), strict=True):
        torch.testing.assert_close(ours[1 if length == 33 else 2], theirs, atol=1e-4, rtol=1e-4)
    # A short one too: as a model would compute it that knows the long factors only.
    always = save_tiny(tmp_path / "always", LONGROPE)
    rope = LONGROPE["rope_parameters"]
    edit_config(
        always,
        rope_parameters=rope | {"short_factor": rope["long_factor"], "partial_rotary_factor": 1.0},
    )
    torch.testing.assert_close(ours[0], reference_logits(always, prompts[:1])[0], atol=1e-4, rtol=1e-4)
    assert (ours[0] - reference_logits(path, prompts[:1])[0]).abs().max() > 1e-2


def test_old_configs_of_phi_are_understood(tmp_path):
    """`su`, factors in rope_scaling, partial_rotary_factor outside."""
    rope = LONGROPE["rope_parameters"] | {"partial_rotary_factor": 0.5}
    options = LONGROPE | {"hidden_size": 64, "rope_parameters": rope}
    path = save_tiny(tmp_path / "old", options)
    edit_config(
        path, rope_parameters=None, rope_theta=10000.0, partial_rotary_factor=0.5,
        rope_scaling={"type": "su", "short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [1.0, 2.0, 5.0, 9.0]},
        resid_pdrop=0.0, embd_pdrop=0.0, attention_bias=False, lm_head_bias=False,
    )  # fmt: skip
    model = load_model(path, "cpu", "float32", max_model_len=90)
    theirs = reference_logits(save_tiny(tmp_path / "new", options), [prompt(70)])[0]
    torch.testing.assert_close(in_slices(model, [prompt(70)])[0], theirs, atol=1e-4, rtol=1e-4)


def test_ntk_is_plain_up_to_the_trained_length(tmp_path):
    path = save_tiny(tmp_path, DYNAMIC)
    model = load_model(path, "cpu", "float32", max_model_len=32)
    assert model.shape.max_positions == 32
    torch.testing.assert_close(
        in_slices(model, [prompt(32)])[0], reference_logits(path, [prompt(32)])[0], atol=1e-4, rtol=1e-4
    )


def test_ntk_is_stretched_for_all_where_more_is_asked_for(tmp_path):
    path = save_tiny(tmp_path / "m", DYNAMIC)
    model = load_model(path, "cpu", "float32", max_model_len=50)
    assert model.shape.max_positions == 4 * 32
    long = prompt(4 * 32)
    theirs = reference_logits(path, [long])[0]
    ours = in_slices(model, [long, long[:50]])
    torch.testing.assert_close(ours[0], theirs, atol=1e-4, rtol=1e-4)
    # One choice for all: a prefix of it has the same logits, whatever its own length.
    torch.testing.assert_close(ours[1], theirs[:50], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("options", "most"), [(LONGROPE, 200), (DYNAMIC, 128)])
def test_beyond_all_that_is_known_the_start_is_refused(options, most, tmp_path):
    path = save_tiny(tmp_path, options)
    shape = load_model(path, "cpu", "float32", max_model_len=most + 1).shape
    size_kv_cache(shape, torch.float32, torch.device("cpu"), kv_cache_memory=1 << 24, max_model_len=most)
    with pytest.raises(SequenceTooLong, match=str(most)):
        size_kv_cache(
            shape, torch.float32, torch.device("cpu"), kv_cache_memory=1 << 24, max_model_len=most + 1
        )


@pytest.mark.parametrize(
    ("base", "rope", "words"),
    [
        ("llama", {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "1 numbers in short_factor"),
        ("llama", {"rope_type": "axial"}, "axial"),
        ("llama", {"rope_type": "dynamic", "factor": 2.0, "alpha": 1000}, "alpha"),
        ("llama", {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("gemma3", {"rope_type": "linear", "factor": 2.0}, "no type of layer"),
        ("mistral", {"rope_type": "yarn", "factor": 2.0, "odd": 1}, "odd"),
    ],
)  # fmt: skip
def test_ropes_that_are_not_understood_are_refused(base, rope, words, tmp_path):
    path = save_tiny(tmp_path, FAMILIES[base])
    edit_config(path, rope_parameters={"rope_theta": 1e4, **rope})
    with pytest.raises(ModelUnsupported, match=words):
        load_model(path, "cpu")
