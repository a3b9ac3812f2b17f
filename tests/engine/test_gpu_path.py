"""The path of GPUs through the whole engine, interpreted: lists of work, one copy a step, recorded steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch

from support.mixed_questions import ask_mixed, check_answers, cramped_engine
from support.models import FAMILIES, save_tiny
from support.tiny_adapters import save_adapters

pytestmark = pytest.mark.usefixtures("one_torch_thread")


class Repeater:
    """What a CUDA graph is to the engine: the same work over the same memory, however the step came to be. What it
    returned before is overwritten, as in a pool that graphs share."""

    def __init__(self) -> None:
        self.replays: Counter[int] = Counter()
        self.last: torch.Tensor | None = None

    def record(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        rows = work().shape[0]

        def replay() -> torch.Tensor:
            if self.last is not None:
                self.last.fill_(float("nan"))
            self.replays[rows] += 1
            self.last = work()
            return self.last

        return replay


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
