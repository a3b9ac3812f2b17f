"""The path of GPUs through the whole engine, interpreted: lists of work, one copy a step, recorded steps."""

from __future__ import annotations

import pytest

from support.adapters.tiny_adapters import save_adapters
from support.engine.mixed_questions import ask_mixed, check_answers, cramped_engine
from support.engine.repeater import Repeater
from support.models.checkpoints import FAMILIES, save_tiny

pytestmark = pytest.mark.usefixtures("one_torch_thread", "quick_interpreter")


@pytest.mark.parametrize(
    ("family", "lookahead", "requests", "tokens"),
    [
        pytest.param("llama-biases", 1, 5, 5, marks=pytest.mark.slow),
        pytest.param("gemma3", 0, 5, 4, marks=pytest.mark.slow),
        *(
            pytest.param(family, lookahead, 7, 9, marks=pytest.mark.soak)
            for family in ("llama-biases", "gemma3", "qwen3", "phi3", "gemma2", "mistral-window")
            for lookahead in (0, 1)
        ),
    ],
)
def test_tokens_are_those_of_transformers_and_peft(family, lookahead, requests, tokens, tmp_path):
    options = FAMILIES[family]
    base = save_tiny(tmp_path / "base", options)
    adapters = save_adapters(base, tmp_path)
    recorder = Repeater()
    engine = cramped_engine(
        base,
        tmp_path / "work",
        options,
        recorder=recorder,
        kernels="triton",
        lookahead=lookahead,
        max_num_seqs=6,
    )
    answered = ask_mixed(engine, adapters, seed=family, requests=requests, tokens=tokens)
    engine.close()
    assert len(recorder.replays) > 1
    check_answers(answered, base, adapters)
