"""Settings of a generation_config.json that no answer follows: each is named, and none that asks for nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from loraplex.adapters.end_tokens import read_end_tokens, read_not_followed
from loraplex.adapters.generation_settings import NotFollowed, not_followed

NEUTRAL: list[dict[str, Any]] = [
    {},
    {"eos_token_id": [1, 2], "bos_token_id": 1, "pad_token_id": 2, "transformers_version": "5.23.0"},
    {"do_sample": True, "temperature": 1.0, "top_p": 1, "top_k": 0, "repetition_penalty": 1.0, "min_p": None},
    {
        "num_beams": 1,
        "suppress_tokens": [],
        "bad_words_ids": None,
        "guidance_scale": 1.0,
        "sequence_bias": {},
    },
    {"max_length": 4096, "max_new_tokens": 512, "use_cache": True, "output_scores": True},
    {"num_assistant_tokens": 20, "assistant_confidence_threshold": 0.4, "is_assistant": False},
    {"stop_strings": "<|end|>"},
    {"stop_strings": ["<|end|>", "<|im_end|>"]},
]
ASKED: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": 0.6, "top_p": 0.9}, "temperature 0.6, top_p 0.9", ""),
    ({"do_sample": False, "top_k": 20, "min_p": 0.1}, "do_sample false, top_k 20, min_p 0.1", ""),
    ({"suppress_tokens": [3, 4]}, "", "suppress_tokens [3, 4]"),
    ({"bad_words_ids": [[5]]}, "", "bad_words_ids [[5]]"),
    ({"forced_bos_token_id": 7}, "", "forced_bos_token_id 7"),
    ({"no_repeat_ngram_size": 3, "guidance_scale": 1.5}, "", "no_repeat_ngram_size 3, guidance_scale 1.5"),
    ({"sequence_bias": {"a": 1}, "temperature": 0.7}, "temperature 0.7", 'sequence_bias {"a": 1}'),
    ({"stop_strings": ["\n\nUser:"]}, "", 'stop_strings ["\\n\\nUser:"]'),
    ({"stop_strings": [["x"]]}, "", 'stop_strings [["x"]]'),
    ({"num_beams": 4}, "", "num_beams 4"),
    ({"a_setting_of_tomorrow": True}, "", "a_setting_of_tomorrow true"),
    ({f"a{number}": 1 for number in range(9)}, "", "a0 1, a1 1, a2 1, a3 1, a4 1, a5 1 and 3 more"),
]  # fmt: skip


def of(given: dict[str, Any]) -> NotFollowed | None:
    return not_followed(given, {"<|end|>", "<|im_end|>"}.__contains__)


@pytest.mark.parametrize("given", NEUTRAL)
def test_what_asks_for_nothing_is_not_named(given: dict[str, Any]) -> None:
    assert of(given) is None


@pytest.mark.parametrize(("given", "of_requests", "of_none"), ASKED)
def test_what_asks_for_something_is_named_with_its_value(
    given: dict[str, Any], of_requests: str, of_none: str
) -> None:
    assert of(given) == NotFollowed(of_requests, of_none)


def test_every_setting_of_transformers_has_its_place() -> None:
    """What transformers writes of its own defaults asks for nothing."""
    assert of({**GenerationConfig._get_default_generation_params(), "do_sample": True}) == NotFollowed(
        "top_k 50", ""
    )
    assert of(json.loads(GenerationConfig(do_sample=True).to_json_string(use_diff=False))) is None


def test_stop_strings_of_a_base_that_are_tokens_end_a_turn(tmp_path: Path) -> None:
    tokenizer = {"added_tokens": [{"id": 5, "content": "<|end|>", "special": True}], "model": {"vocab": {}}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"stop_strings": ["<|end|>", "\nUser:"]}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    (end,) = read_end_tokens(tmp_path).found
    assert (end.id, end.sources) == (5, ("generation_config.json's stop_strings",))
    asked = read_not_followed(tmp_path)
    assert asked is not None
    assert asked.told == ('generation_config.json has stop_strings ["\\nUser:"]: nothing here follows it')
