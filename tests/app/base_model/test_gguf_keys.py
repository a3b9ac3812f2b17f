"""The keys of a GGUF file: each is read, changes nothing, or refuses the file by its name."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from loraplex.adapters.admission.base_model import load_base_spec
from loraplex.adapters.end_tokens import read_end_tokens, read_not_followed
from loraplex.app.base_model.convert import GgufUnsupported, convert
from loraplex.app.base_model.gguf_keys import ARCHITECTURE, FILE, MODEL, OWN, READ, TOKENIZER, UNUSED, rule_of
from loraplex.app.base_model.gguf_model import make_model
from loraplex.app.base_model.gguf_rope import FREQUENCIES, LONG, SHORT
from loraplex.serving.text.processor import TextProcessor, base_turn_ends
from loraplex.serving.text.text_build import text_build
from support.models.checkpoints import PagedRun, edit_config, reference_logits
from support.models.gguf import MIXES, OF_QUICKSTART, TEMPLATE, write_gguf
from support.models.loading import load_model

PLAIN = dict.fromkeys(OF_QUICKSTART, "F32")
HEAD_DIM, CONTEXT, THETA = 16, 512, 50_000.0
SCALING = "llama.rope.scaling."
YARN = {SCALING + "type": "yarn", SCALING + "factor": 4.0, SCALING + "original_context_length": 128}
BOS = {"tokenizer.ggml.add_bos_token": True}
RAISED = [1.0, 1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 8.0]
"""Factors by frequency, as Llama 3's rope has them."""


def made(tmp_path: Path, **given: Any) -> Path:
    convert(write_gguf(tmp_path / "m.gguf", kinds=PLAIN, **given), tmp_path / "model")
    return tmp_path / "model"


def config_of(tmp_path: Path, **given: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((made(tmp_path, **given) / "config.json").read_text())
    return found


def refusal(tmp_path: Path, **given: Any) -> str:
    """Raised alike by both ways to serve a file."""
    said = []
    for kinds, read in ((PLAIN, convert), (MIXES["Q8_0"], make_model)):
        path = write_gguf(tmp_path / "m.gguf", kinds=kinds, **given)
        with pytest.raises(GgufUnsupported) as caught:
            read(path, tmp_path / "model")
        said.append(str(caught.value))
    assert said[1].startswith(said[0])
    return said[0]


def names_of(group: type) -> Iterator[str]:
    for name, value in vars(group).items():
        if isinstance(value, type):
            yield from names_of(value)
        elif isinstance(value, str) and not name.startswith("__"):
            yield value.format(arch=ARCHITECTURE, name="tool_use", id=0, dense="dense_2")


def test_the_table_has_every_key_of_the_library() -> None:
    """A newer one may bring more: say in gguf_keys.py what each does to a Llama."""
    names = set(names_of(gguf.Keys))
    assert len(names) > 180
    lacking = {name for name in names if rule_of(name) is None}
    # Of a namespace that no tool but the library writes.
    spaces = {name.partition(".")[0] for name in FILE} | {ARCHITECTURE, "tokenizer"}
    lacking |= {name for name in names if name.partition(".")[0] not in spaces}
    assert lacking == set()


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"llama.logit_scale": 0.5}, "its metadata's llama.logit_scale is 0.5, which is not served; served is 0.0 or"),
        ({"llama.residual_scale": 0.25}, "llama.residual_scale is 0.25"),
        ({"llama.embedding_scale": 12.0}, "llama.embedding_scale is 12.0"),
        ({"llama.attention.scale": 0.5}, "llama.attention.scale is 0.5; served is 0.25"),
        ({"llama.attn_logit_softcapping": 50.0}, "llama.attn_logit_softcapping is 50.0"),
        ({"llama.final_logit_softcapping": 30.0}, "llama.final_logit_softcapping is 30.0"),
        ({"llama.expert_count": 8}, "llama.expert_count is 8"),
        ({"llama.attention.causal": False}, "llama.attention.causal is false"),
        ({"llama.attention.key_length": 8}, "llama.rope.dimension_count is 16, and a head has 8"),
        ({"llama.attention.value_length": 8}, "llama.attention.value_length is 8, and a head has 16"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count is 8, and a head has 16"),
        ({"llama.attention.sliding_window": "32"}, "its llama.attention.sliding_window is '32', not a finite number"),
        ({"llama.attention.key_length": 0}, "its llama.attention.key_length is 0, not a number above 0"),
        ({"llama.vocab_size": 7}, "llama.vocab_size is 7, and it has 265 tokens"),
        ({"llama.ssm.state_size": 4}, "llama.ssm.state_size is 4"),
        ({"llama.brand_new": 1}, "have llama.brand_new, which is not known here"),
        ({SCALING + "type": "ntk"}, SCALING + "type is 'ntk'"),
        ({SCALING + "factor": -2.0}, SCALING + "factor is -2.0, no number above 0"),
        ({SCALING + "factor": math.nan}, SCALING + "factor is NaN, no number above 0"),
        ({SCALING + "factor": "4"}, SCALING + "factor is '4', no number above 0"),
        ({SCALING + "alpha": 1000.0}, SCALING + "alpha is 1000.0"),
        (YARN | {SCALING + "yarn_log_multiplier": 0.1}, SCALING + "yarn_log_multiplier is 0.1"),
        (YARN | {SCALING + "yarn_ext_factor": 0.5}, SCALING + "yarn_ext_factor is 0.5"),
        (YARN | {SCALING + "attn_factor": 1.5}, SCALING + "attn_factor is 1.5"),
        ({SCALING + "type": "linear", SCALING + "attn_factor": 1.5}, SCALING + "attn_factor is 1.5"),
        ({SCALING + "type": "longrope"}, "type is longrope, and it has no rope_factors_short.weight"),
        ({"tokenizer.ggml.add_eos_token": True}, "tokenizer.ggml.add_eos_token is true"),
        ({"tokenizer.ggml.remove_extra_whitespaces": True}, "tokenizer.ggml.remove_extra_whitespaces is true"),
        (BOS | {"tokenizer.ggml.bos_token_id": None}, "have no tokenizer.ggml.bos_token_id"),
        ({"tokenizer.ggml.brand_new": 1}, "have tokenizer.ggml.brand_new, which is not known here"),
        ({"tokenizer.ggml.token_type": [2] * 265}, "its tokenizer.ggml.token_type has 2: tokens of these types"),
        ({"split.count": 3}, "split.count is 3"),
        ({"general.type": "adapter"}, "general.type is 'adapter'"),
    ],
)  # fmt: skip
def test_a_key_that_would_be_passed_over_refuses_the_file(
    metadata: dict[str, Any], words: str, tmp_path: Path
) -> None:
    assert words in refusal(tmp_path, metadata=metadata)


@pytest.mark.parametrize(
    ("factors", "metadata", "words"),
    [
        ({FREQUENCIES: RAISED}, YARN, "it has rope_freqs.weight, and its metadata's llama.rope.scaling.type is yarn"),
        ({LONG: RAISED}, {}, "it has rope_factors_long.weight, and its metadata's llama.rope.scaling.type is no"),
        ({FREQUENCIES: RAISED[1:]}, {}, "its tensor rope_freqs.weight is not 8 numbers above 0"),
        ({FREQUENCIES: [0.0, *RAISED[1:]]}, {}, "its tensor rope_freqs.weight is not 8 numbers above 0"),
        ({FREQUENCIES: [1.0] * 5000}, {}, "the tensor rope_freqs.weight is not at most 4096 F32 numbers"),
    ],
)  # fmt: skip
def test_a_tensor_of_a_rope_that_is_not_computed_refuses_the_file(
    factors: dict[str, list[float]], metadata: dict[str, Any], words: str, tmp_path: Path
) -> None:
    assert words in refusal(tmp_path, factors=factors, metadata=metadata)


NEUTRAL: dict[str, Any] = {
    "llama.logit_scale": 1.0,
    "llama.attention.scale": 0.25,
    "llama.attention.key_length": 16,
    "llama.attention.value_length": 16,
    "llama.attention.sliding_window": CONTEXT,
    "llama.expert_count": 0,
    "llama.attention.layer_norm_epsilon": 1e-6,
    "llama.tensor_data_layout": "Meta AI original pth",
    SCALING + "type": "none",
    SCALING + "factor": 4.0,
    SCALING + "finetuned": True,
    SCALING + "original_context_length": 64,
    "tokenizer.ggml.fim_pre_token_id": 3,
    "tokenizer.ggml.add_eos_token": False,
    "quantize.imatrix.file": "x",
    "split.count": 1,
    "a_tool.notes": "x",
}


@pytest.mark.parametrize("kept", [NEUTRAL, {SCALING + "factor": 1.0}, {"llama.rope.scale_linear": 0.0}])
def test_neutral_keys_change_nothing(kept: dict[str, Any], tmp_path: Path) -> None:
    changed = made(tmp_path, metadata=kept, factors={FREQUENCIES: [1.0] * (HEAD_DIM // 2)})
    plain = tmp_path / "plain"
    convert(write_gguf(tmp_path / "p.gguf", kinds=PLAIN), plain)
    for path in plain.iterdir():
        assert (changed / path.name).read_bytes() == path.read_bytes(), path.name


def yarn(factor: float, original: int, fast: float = 32.0, slow: float = 1.0, attention: float = 0.0) -> Any:
    return {
        "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, "beta_fast": fast,
        "beta_slow": slow, **({"attention_factor": attention} if attention else {}),
    }  # fmt: skip


def llama3(factor: float, original: int, low: float = 1.0, high: float = 4.0) -> list[float]:
    """The factors that llama.cpp's converter writes for Llama 3's rope."""
    found = []
    for place in range(0, HEAD_DIM, 2):
        turns = original * THETA ** (-place / HEAD_DIM) / (2 * math.pi)
        share = min(1.0, max(0.0, (turns - low) / (high - low)))
        found.append(1 / ((1 - share) / factor + share))
    return found


def longrope(short: list[float], long: list[float], original: int, attention: float = 1.0) -> dict[str, Any]:
    return {
        "rope_type": "longrope", "factor": CONTEXT / original, "short_factor": short, "long_factor": long,
        "attention_factor": attention, "original_max_position_embeddings": original,
    }  # fmt: skip


LONG_KEYS = {
    SCALING + "type": "longrope",
    SCALING + "attn_factor": 1.25,
    SCALING + "original_context_length": 256,
}
LINEAR = {"rope_type": "linear", "factor": 4.0}
ROPES: dict[str, tuple[dict[str, Any], dict[str, list[float]], dict[str, Any]]] = {
    "linear": ({SCALING + "type": "linear", SCALING + "factor": 4.0}, {}, LINEAR),
    "without a type": ({SCALING + "factor": 4.0}, {}, LINEAR),
    "the old name": ({"llama.rope.scale_linear": 4.0}, {}, LINEAR),
    "the new name before the old": (
        {"llama.rope.scale_linear": 8.0, SCALING + "factor": 4.0, SCALING + "attn_factor": 1.0}, {}, LINEAR,
    ),
    "yarn": (YARN, {}, yarn(4.0, 128)),
    "yarn of the whole length": (
        {SCALING + "type": "yarn", SCALING + "factor": 4.0}, {}, yarn(4.0, CONTEXT),
    ),
    "yarn with every key": (
        YARN | {
            SCALING + "yarn_beta_fast": 16.0, SCALING + "yarn_beta_slow": 2.0, SCALING + "yarn_attn_factor": 1.5,
            SCALING + "yarn_ext_factor": 1.0, SCALING + "yarn_log_multiplier": 0.0,
        },
        {}, yarn(4.0, 128, 16.0, 2.0, 1.5),
    ),
    "Llama 3's": (
        {}, {FREQUENCIES: llama3(8.0, 64)},
        {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "factors of its own and a scale": (
        {SCALING + "factor": 2.0}, {FREQUENCIES: RAISED},
        longrope([2 * each for each in RAISED], RAISED, CONTEXT),
    ),
    "longrope": (
        LONG_KEYS, {SHORT: RAISED, LONG: [3 * each for each in RAISED]}, longrope(RAISED, RAISED, 256, 1.25),
    ),
}  # fmt: skip


def in_chunks(model: Any, prompt: list[int]) -> torch.Tensor:
    run = PagedRun(model, [prompt])
    while run.done[0] < len(prompt):
        run.step({0: min(23, len(prompt) - run.done[0])})
    return run.result(0)


PROMPT = [(7 * number * number + 3) % 265 for number in range(200)]


@pytest.mark.parametrize("name", ROPES)
def test_a_scaled_rope_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    metadata, factors, expected = ROPES[name]
    path = made(tmp_path, metadata=metadata, factors=factors)
    ours = in_chunks(load_model(path, "cpu", "float32"), PROMPT)
    edit_config(path, rope_parameters={"rope_theta": THETA, **expected})
    (theirs,) = reference_logits(path, [PROMPT])
    torch.testing.assert_close(ours.log_softmax(-1), theirs.log_softmax(-1), atol=1e-3, rtol=0)
    edit_config(path, rope_parameters={"rope_theta": THETA, "rope_type": "default"})
    (plain,) = reference_logits(path, [PROMPT])
    assert (ours.log_softmax(-1) - plain.log_softmax(-1)).abs().max() > 0.05


def test_the_long_factors_serve_what_is_longer(tmp_path: Path) -> None:
    """As llama.cpp has them for a context above the original one, and transformers for a text above it."""
    metadata = LONG_KEYS | {SCALING + "original_context_length": 64}
    path = made(tmp_path, metadata=metadata, factors={SHORT: [1.0] * 8, LONG: RAISED})
    ours = in_chunks(load_model(path, "cpu", "float32", max_model_len=CONTEXT), PROMPT)
    (theirs,) = reference_logits(path, [PROMPT])
    torch.testing.assert_close(ours.log_softmax(-1), theirs.log_softmax(-1), atol=1e-3, rtol=0)


def test_a_window_makes_a_mistral(tmp_path: Path) -> None:
    path = made(tmp_path, metadata={"llama.attention.sliding_window": 32})
    config = json.loads((path / "config.json").read_text())
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 32)
    ours = in_chunks(load_model(path, "cpu", "float32"), PROMPT)
    edit_config(path, sliding_window=None)
    (plain,) = reference_logits(path, [PROMPT])
    torch.testing.assert_close(ours[:32], plain[:32], atol=1e-3, rtol=0)
    assert (ours[32:] - plain[32:]).abs().max() > 0.05


def test_heads_of_another_size_than_the_default(tmp_path: Path) -> None:
    sizes = {
        "llama.attention.key_length": 32,
        "llama.attention.value_length": 32,
        "llama.rope.dimension_count": 32,
    }
    assert config_of(tmp_path, metadata=sizes)["head_dim"] == 32


def test_the_fingerprint_tells_ropes_apart(tmp_path: Path) -> None:
    found = set()
    for number, (metadata, factors) in enumerate(
        [({}, {}), (YARN, {}), (YARN | {SCALING + "yarn_beta_fast": 8.0}, {}), ({}, {FREQUENCIES: RAISED})]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        found.add(load_base_spec(made(folder, metadata=metadata, factors=factors)).fingerprint)
    assert len(found) == 4


def test_what_is_added_to_a_text(tmp_path: Path) -> None:
    text = TextProcessor(made(tmp_path, metadata=BOS), max_model_len=CONTEXT)
    assert text.encode("the") == [1, *text.encode("the", add_special_tokens=False)]
    assert text_build(made_again(tmp_path)) != text_build(tmp_path / "model")


def test_tokens_that_a_user_added_are_whole_words(tmp_path: Path) -> None:
    """A token that is not special is found in a text all the same, and is part of an answer's."""
    types = [
        4,
        3,
        3,
        *[1] * 258,
        5,
        *[1] * 3,
    ]  # "<|endoftext|>" is one; the word behind the alphabet is unused
    path = made(tmp_path, metadata={"tokenizer.ggml.token_type": types})
    text = TextProcessor(path, max_model_len=CONTEXT)
    ids = text.encode("the<|endoftext|>the", add_special_tokens=False)
    assert ids == [*text.encode("the"), 0, *text.encode("the")]
    assert text.control_id("<|endoftext|>") is None
    assert text.decode(ids) == "the<|endoftext|>the"


def made_again(tmp_path: Path) -> Path:
    folder = tmp_path / "plain"
    folder.mkdir()
    return made(folder)


def test_templates_by_name_and_tokens_by_name(tmp_path: Path) -> None:
    metadata = {
        "tokenizer.chat_template.tool_use": "with tools",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.ggml.eot_token_id": 5,
        "tokenizer.ggml.eom_token_id": 1,
        "tokenizer.ggml.seperator_token_id": 0,
    }
    path = made(tmp_path, metadata=metadata)
    text = TextProcessor(path, max_model_len=CONTEXT)
    assert dict(text.template_sources) == {"default": TEMPLATE, "tool_use": "with tools"}
    named = json.loads((path / "tokenizer_config.json").read_text())
    assert (named["eom_token"], named["sep_token"]) == ("<|im_start|>", "<|endoftext|>")
    ends = {end.token: end.sources for end in read_end_tokens(path, base_turn_ends(path)).found}
    assert ends == {
        "<|im_start|>": ("tokenizer_config.json's eom_token",),
        "<|im_end|>": (
            "generation_config.json",
            "config.json",
            "tokenizer_config.json's eos_token",
            "the chat template",
        ),
        named["eot_token"]: ("tokenizer_config.json's eot_token",),
    }
    # A token that ends a turn is a control token, whatever its type.
    assert named["eot_token"] == text.names([5])[0]
    assert text.control_id(named["eot_token"]) == 5


def table_of_keys() -> list[str]:
    """The rows of docs/models.md."""
    rows = []
    own = [(f"`{architecture}.…`", rules) for architecture, rules in OWN.items() if rules]
    tables = [("`llama.…`", MODEL), *own, ("`tokenizer.…`", TOKENIZER), ("others", FILE)]
    for name, table in tables:
        read = ", ".join(f"`{key}`" for key, rule in table.items() if rule == READ)
        unused = ", ".join(f"`{key}`" for key, rule in table.items() if rule == UNUSED)
        harmless = ", ".join(
            f"`{key}` {' or '.join(map(json.dumps, rule))}"
            for key, rule in table.items()
            if isinstance(rule, tuple) and rule
        )
        rows.append(f"| {name} | {read} | {unused} | {harmless} |")
    return rows


def test_the_page_has_the_table() -> None:
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text("utf-8")
    for row in table_of_keys():
        assert row in page, row


def test_options_of_sampling_are_named_and_not_followed(tmp_path: Path) -> None:
    options = {"temp": 0.25, "penalty_repeat": 1.5, "top_k": 40, "mirostat": 2, "xtc_probability": 0.0}
    given = {f"general.sampling.{name}": value for name, value in options.items()}
    folder = made(tmp_path, metadata=given)
    asked = read_not_followed(folder)
    assert asked is not None
    assert asked.of_requests == "temperature 0.25, repetition_penalty 1.5, top_k 40"
    assert asked.of_none == "mirostat 2"
