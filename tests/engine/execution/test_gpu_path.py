"""The path of GPUs through the whole engine, interpreted: lists of work, one copy a step, recorded steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from support.adapters.peft_zoo import PeftReference
from support.adapters.tiny_adapters import ADAPTERS, BY_TOKEN, save_adapters, with_gates
from support.engine.local_engine import LocalEngine
from support.engine.mixed_questions import ask_mixed, check_answers, cramped_engine
from support.engine.repeater import Repeater
from support.models.checkpoints import FAMILIES, OTHERS, save_tiny

pytestmark = pytest.mark.usefixtures("one_torch_thread", "quick_interpreter")
SHORT: dict[str, dict[str, Any]] = {
    "llama-biases": {"num_hidden_layers": 1},
    "gemma2": {"num_hidden_layers": 2},
    "qwen3_5-3": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "granite4-h": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "olmo_hybrid": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "qwen3_moe": {"num_hidden_layers": 2},
    "qwen3_5_moe": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "gemma4-e2b": {
        "num_hidden_layers": 3, "num_kv_shared_layers": 1,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    },
}  # fmt: skip
"""Changes of families for the short versions: a layer of each kind. In the long ones they have three."""
PROMPT = [40, 5, 41, 99, 42, 6, 50]
"""Among them are tokens whose rows are replaced."""


def of_a_family(family: str, *, short: bool) -> dict[str, Any]:
    return FAMILIES[family] | (SHORT.get(family, {}) if short else {})


@pytest.mark.parametrize(
    ("family", "attention", "lookahead", "prompt_rows", "requests", "tokens"),
    [
        pytest.param("llama-biases", "triton", 1, 80, 4, 3, marks=pytest.mark.slow),
        pytest.param("gemma4-e2b", "triton", 1, 40, 3, 3, marks=pytest.mark.slow),
        pytest.param("qwen3", "torch", 0, 40, 5, 4, marks=pytest.mark.slow),
        pytest.param("lfm2", "triton", 1, 80, 3, 4, marks=pytest.mark.slow),
        pytest.param("qwen3_5-3", "triton", 1, 80, 3, 4, marks=pytest.mark.slow),
        pytest.param("granite4-h", "triton", 1, 80, 3, 4, marks=pytest.mark.slow),
        pytest.param("olmo_hybrid", "triton", 1, 80, 3, 4, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "triton", 1, 80, 3, 4, marks=pytest.mark.slow),
        pytest.param("qwen3_5_moe", "triton", 1, 80, 3, 4, marks=pytest.mark.slow),
        *(
            pytest.param(family, "torch", lookahead, prompt_rows, 7, 9, marks=pytest.mark.soak)
            for family in ("llama-biases", "qwen3")
            for lookahead, prompt_rows in ((0, 40), (1, 0))
        ),
        *(
            pytest.param(family, "triton", lookahead, prompt_rows, 7, 9, marks=pytest.mark.soak)
            for family in (
                "llama-biases",
                "gemma3",
                "qwen3",
                "phi3",
                "gemma2",
                "mistral-window",
                "lfm3",
                "lfm2-biases",
                "granite4-h-limits",
                "nemotron_h",
                "olmoe",
                "mixtral",
                "glm4_moe",
                "qwen3_next",
            )
            for lookahead, prompt_rows in ((0, 80), (1, 0), (1, 40))
        ),
    ],
)
def test_tokens_are_those_of_transformers_and_peft(
    family, attention, lookahead, prompt_rows, requests, tokens, tmp_path
):
    """With each kernel of attention that runs here. Steps have 40 rows at most. With chunks of prompts, those with
    adapters are recorded where `prompt_rows` is 40, and all where it is 80."""
    base = save_tiny(tmp_path / "base", of_a_family(family, short=requests < 7))
    adapters = save_adapters(base, tmp_path, with_gates(ADAPTERS, FAMILIES[family]))
    recorder = Repeater()
    engine = cramped_engine(
        base,
        tmp_path / "work",
        recorder=recorder,
        kernels="triton",
        attention=attention,
        lookahead=lookahead,
        max_num_seqs=6,
        recorded_prompt_rows=prompt_rows,
    )
    answered = ask_mixed(engine, adapters, seed=family, requests=requests, tokens=tokens, loaded=True)
    engine.close()
    assert engine.built.info.attention == attention
    assert engine.built.info.recorded_decodes == (1, 2, 4, 6)
    assert engine.built.info.recorded_prompts == ((40,) if prompt_rows else ())
    replayed = {rows for rows, _ in recorder.replays}
    assert len(replayed - {40}) > 1
    assert (40 in replayed) == (prompt_rows > 0)
    check_answers(answered, base, adapters)


@pytest.mark.parametrize(
    ("family", "requests", "tokens"),
    [
        ("starcoder2", 3, 3),
        *(pytest.param(family, 7, 9, marks=pytest.mark.soak) for family in ("granite", "smollm3", "gemma")),
    ],
)
def test_adapters_of_a_model_through_transformers_travel_with_the_step(family, requests, tokens, tmp_path):
    """Its linears are one group each, and its attention takes no lists: nothing is recorded. Layers and head, prompts
    in chunks beside decodes."""
    options = OTHERS[family]
    base = save_tiny(tmp_path / "base", options)
    sites = ["q_proj", "v_proj", "o_proj", "down_proj", "lm_head"]
    chosen = {
        "all": {"r": 8, "lora_alpha": 16, "target_modules": sites},
        "many-ranks": {
            "r": 20,
            "lora_alpha": 10,
            "target_modules": ["k_proj", "v_proj"],
            "rank_pattern": {"v_proj": 1},
        },
    }
    adapters = save_adapters(base, tmp_path, chosen)
    recorder = Repeater()
    engine = cramped_engine(
        base, tmp_path / "work", recorder=recorder, kernels="triton", lookahead=1, max_num_seqs=6
    )
    answered = ask_mixed(engine, adapters, seed=family, requests=requests, tokens=tokens)
    engine.close()
    assert engine.built.info.decoder == "transformers"
    assert not recorder.replays
    check_answers(answered, base, adapters)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("gemma2", "rows-and-head"),
        pytest.param("gemma2", "embedding-rslora-and-layers", marks=pytest.mark.soak),
        pytest.param("llama-biases", "other-rows-of-head", marks=pytest.mark.soak),
    ],
)
def test_steps_that_change_by_token_are_not_replayed(family, name, tmp_path):
    """Those with other adapters alone are."""
    base = save_tiny(tmp_path / "base", of_a_family(family, short=name == "rows-and-head"))
    adapters = save_adapters(base, tmp_path, {"all": ADAPTERS["all"], "by token": BY_TOKEN[name]})
    recorder = Repeater()
    engine = cramped_engine(
        base,
        tmp_path / "work",
        recorder=recorder,
        kernels="triton",
        lookahead=1,
        max_num_seqs=4,
    )
    refs = {None: None, **{kind: engine.publish(folder, name=kind) for kind, folder in adapters.items()}}
    replays = []
    for chosen in ((None, "all"), ("by token",), (None, "all", "by token")):
        before = recorder.replays.total()
        for kind in chosen:
            engine.add(f"{chosen} {kind}", PROMPT, refs[kind], max_tokens=3)
        engine.run()
        replays.append(recorder.replays.total() - before)
        for kind in chosen:
            answer = kind, PROMPT, engine.tokens(f"{chosen} {kind}")
            check_answers([answer], base, {kind or "all": adapters[kind or "all"]})
    engine.close()
    assert replays[0] > 0
    # The adapters are there by now, so that all three of the last steps are one sequence of each.
    assert replays[1:] == [0, 0]


@pytest.mark.slow
def test_an_activated_adapter_has_two_slices_in_a_recorded_step(tmp_path):
    """Positions before the place on the base and those behind it with the adapter are in one step, alone and beside
    others; what was found in the prefix cache changes nothing."""
    base = save_tiny(tmp_path / "base", of_a_family("llama-biases", short=True))
    activated = ADAPTERS["all"] | {"alora_invocation_tokens": [1, 2]}
    adapters = save_adapters(base, tmp_path, {"activated": activated, "many-ranks": ADAPTERS["many-ranks"]})
    recorder = Repeater()
    engine = cramped_engine(
        base,
        tmp_path / "work",
        recorder=recorder,
        kernels="triton",
        lookahead=0,
        max_num_seqs=3,
        recorded_prompt_rows=80,
    )
    refs = {None: None, **{kind: engine.publish(folder, name=kind) for kind, folder in adapters.items()}}
    conversation = list(range(10, 28))
    invoked = [1, 2, *conversation, 1, 2, 9]
    engine.add("cold", invoked, refs["activated"], max_tokens=1)
    engine.run()
    assert engine.core.stats().num_steps == 1
    assert recorder.replays == {(40, 3): 1}
    asked = {
        "warm": ("activated", invoked),
        "base": (None, conversation),
        "other": ("many-ranks", invoked[18:]),
    }
    for name, (kind, prompt) in asked.items():
        engine.add(name, prompt, refs[kind], max_tokens=2 if name == "warm" else 1)
    engine.run()
    assert engine.events["warm"][-1].usage.cached_tokens == 16
    peft = PeftReference(base, adapters, torch.float32)
    for name, (kind, prompt) in (asked | {"cold": ("activated", invoked)}).items():
        answer, place = engine.tokens(name), len(prompt) - 3 if kind == "activated" else None
        want = peft.logits(kind, [*prompt, *answer[:-1]], acts_from=place)[len(prompt) - 1 :].argmax(-1)
        assert answer == want.tolist(), name
    engine.close()


@pytest.mark.parametrize(
    ("family", "num_blocks", "requests", "tokens", "preemptions"),
    [
        pytest.param("llama-biases", 8, 5, 20, 1, marks=pytest.mark.slow),
        pytest.param("gemma3", 14, 6, 4, 0, marks=pytest.mark.soak),
        pytest.param("lfm2", 14, 6, 4, 0, marks=pytest.mark.soak),
        pytest.param("qwen3_5-2", 14, 6, 4, 0, marks=pytest.mark.soak),
        pytest.param("granite4-h", 14, 6, 4, 0, marks=pytest.mark.soak),
        pytest.param("qwen3_moe", 14, 6, 4, 0, marks=pytest.mark.soak),
        pytest.param("glm4_moe", 14, 6, 4, 0, marks=pytest.mark.soak),
    ],
)
def test_bits_depend_on_neither_neighbours_nor_chunks_nor_preemption(
    family, num_blocks, requests, tokens, preemptions, tmp_path
):
    """With --batch-invariant: mixed, in chunks, recorded, preempted and with a prefix cache; and each text alone and
    whole, in one step that is not recorded."""
    base = save_tiny(tmp_path / "base", of_a_family(family, short=family == "llama-biases"))
    adapters = save_adapters(base, tmp_path)
    settings = {"kernels": "triton", "batch_invariant": True}
    recorder = Repeater()
    mixed = cramped_engine(
        base,
        tmp_path / "work",
        num_blocks=num_blocks,
        recorder=recorder,
        lookahead=1,
        max_num_seqs=6,
        recorded_prompt_rows=80,
        **settings,
    )
    assert mixed.built.info.same_bits
    answered = ask_mixed(
        mixed, adapters, seed=family, requests=requests, tokens=tokens, loaded=True, logprobs=0
    )
    stats = mixed.core.stats()
    mixed.close()
    # Prompts and their neighbours in recorded steps too, a few rows of logits in each.
    assert recorder.replays[40, 6]
    assert stats.num_preemptions == preemptions
    assert stats.prefix_cache_hits or family != "llama-biases"
    alone = LocalEngine(
        base, tmp_path / "alone", dtype="float32", max_model_len=100, max_num_batched_tokens=100, num_threads=1,
        kv_cache_memory=1 << 20, adapter_memory=4 << 20, adapter_cpu_memory=4 << 20, **settings,
    )  # fmt: skip
    refs = {name: alone.publish(folder, name=name) for name, folder in adapters.items()}
    for number, (name, prompt, answer) in enumerate(answered):
        one = str(number)
        steps = alone.core.stats().num_steps
        alone.add(one, prompt + answer, refs[name] if name else None, max_tokens=0, prompt_logprobs=0)
        alone.run()
        assert alone.core.stats().num_steps == steps + 1
        assert log_probabilities(alone, one, "prompt")[-len(answer) :] == log_probabilities(
            mixed, one, "output"
        )
    alone.close()


def log_probabilities(engine: LocalEngine, request_id: str, of: str) -> list[float]:
    """Of the request's tokens."""
    parts = [getattr(event.scores, of) for event in engine.events[request_id] if event.scores is not None]
    return [float(value) for part in parts if part is not None for value in np.frombuffer(part.values, "<f4")]
