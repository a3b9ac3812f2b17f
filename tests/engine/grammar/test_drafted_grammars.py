"""Drafts for answers that a grammar binds, through a real engine with a tiny random model."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from loraplex.engine.scheduling.drafting import Draft, Drafter
from loraplex.engine.scheduling.speculation import Speculation
from loraplex.engine.scheduling.timing.step_costs import StepCosts
from loraplex.engine.types import EngineRequest, SamplingParams, Sequence, TokenEvent
from support.engine.grammars import CASES, VOCAB_SIZE, regex_case, save_byte_model
from support.engine.local_engine import LocalEngine
from support.simulator.core_integrity import check_core

pytestmark = pytest.mark.usefixtures("one_torch_thread")

FREE = StepCosts((1.0,) * 64)
GRAMMARS = [
    regex_case("[ab]hello world[cd]{2}forty-two letters[ef]").grammar,
    regex_case("[a-z]{30}").grammar,
    *(case.grammar for case in CASES[:6]),
    None,
]


class Guesses(Drafter):
    """Guesses each answer's tokens as they were without drafts, some of them wrong: `share` of them are right."""

    def __init__(self, answers: dict[str, list[int]], share: float) -> None:
        super().__init__(bytes_per_tenant=1 << 20, total_bytes=1 << 20)
        self._answers = answers
        self._share = share
        self._random = random.Random(5)
        self.num_right = self.num_wrong = 0

    def propose(self, seq: Sequence, most: int) -> Draft | None:
        guessed = [
            token if self._random.random() < self._share else self._random.randrange(VOCAB_SIZE)
            for token in self._answers[seq.request_id][seq.num_outputs :][:most]
        ]
        return Draft(tuple(guessed), (0.9,) * len(guessed), "own") if guessed else None

    def verified(self, seq, source, num_drafted, num_accepted):
        self.num_right += num_accepted
        self.num_wrong += num_drafted - num_accepted


def play(
    model_dir: Path, work: Path, speculation: Speculation | None, lines: range = range(0)
) -> dict[str, list[TokenEvent]]:
    """The events of each request. Those whose numbers are in `lines` are lines of a batch."""
    engine = LocalEngine(
        model_dir, work, dtype="float32", kernels="numba", max_num_seqs=32, max_model_len=160, num_threads=1,
        kv_cache_memory=4 << 20, adapter_memory=4 << 20, adapter_cpu_memory=4 << 20,
    )  # fmt: skip
    try:
        engine.core._scheduler.speculation = speculation
        for number, grammar in enumerate(GRAMMARS * 2):
            params = SamplingParams(
                max_tokens=(40, 7)[number % 5 == 4],
                temperature=(1.0, 0.0)[number % 3 == 2],
                seed=number,
                min_tokens=(0, 12)[number % 4 == 1],
                repetition_penalty=(1.0, 1.3)[number % 4 == 3],
                logprobs=2 if number >= len(GRAMMARS) else None,
            )
            request = EngineRequest(f"r{number}", "t", (65, 66, number), params, grammar=grammar)
            is_line = number in lines
            engine.core.add_request(replace(request, background=is_line, batch=is_line))
        engine.run()
        check_core(engine.core)
        return engine.events
    finally:
        engine.close()


def outcome(events: list[TokenEvent]) -> tuple[object, ...]:
    tokens = [token for event in events for token in event.token_ids]
    scores = [event.scores.output for event in events if event.scores is not None and event.scores.output]
    end = events[-1]
    return (
        tokens, b"".join(each.values for each in scores), b"".join(each.ids for each in scores),
        end.finish_reason, end.stop_token_id, end.usage, end.error,
    )  # fmt: skip


def test_answers_are_those_without_drafts_whatever_is_guessed(tmp_path):
    model_dir = save_byte_model(tmp_path / "model")
    without = play(model_dir, tmp_path / "without", None)
    answers = {
        name: [token for event in events for token in event.token_ids] for name, events in without.items()
    }
    for share in (1.0, 0.8, 0.0):
        drafter = Guesses(answers, share)
        found = play(model_dir, tmp_path / str(share), Speculation(drafter, FREE))
        for name, events in without.items():
            assert outcome(found[name]) == outcome(events), (name, share, str(found[name][-1].error))
        assert drafter.num_right > 50 or share == 0.0
        assert drafter.num_wrong > 50 or share == 1.0
        if share == 1.0:
            assert sum(map(len, found.values())) < sum(map(len, without.values())) / 2


@pytest.mark.parametrize("lines", [range(2 * len(GRAMMARS)), range(0, 2 * len(GRAMMARS), 2)])
def test_lines_of_a_batch_have_the_bits_of_other_requests(tmp_path, lines):
    model_dir = save_byte_model(tmp_path / "model")
    without = play(model_dir, tmp_path / "without", None)
    found = play(model_dir, tmp_path / "with", None, lines)
    for name, events in without.items():
        assert outcome(found[name]) == outcome(events), (name, str(found[name][-1].error))
