"""By-products of steps: who is asked, and what they enter into a result."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from loraplex.engine.execution.batch import StepRows
from loraplex.engine.execution.inputs import PlainInputs, RecordedSize
from loraplex.engine.execution.packed_inputs import find_recorded
from loraplex.engine.execution.riders.rider import Forward, Rider
from loraplex.engine.execution.riders.tokens import Tokens
from loraplex.engine.execution.step_results import RowResult, StepResult
from loraplex.engine.pooling import fraction_bits
from loraplex.engine.sampling.sampler import TorchSampler
from loraplex.engine.types import EngineRequest, SamplingParams, ScheduledSequence, StepPlan
from loraplex.kernels.attention.torch_attention import TorchAttention

VOCAB = 8
CPU = torch.device("cpu")
SIZES = [RecordedSize(64, 4, prompts=True)]


def item(name: str = "a", sampling: dict[str, Any] | None = None, **fields: Any) -> ScheduledSequence:
    """A row that decodes, behind a prompt of 3 tokens, with these fields changed."""
    asked = SamplingParams(9, temperature=0.0, **(sampling or {}))
    pooling = fields.pop("pooling", None)
    request = EngineRequest(name, "t", (1, 2, 3), asked, pooling=pooling)
    return replace(ScheduledSequence(request, 0, 0, 3, 1, (4,), (0,), -1, True, False, 1), **fields)


PROMPT = {"start": 0, "num_tokens": 3, "token_ids": (1, 2, 3), "samples": False, "output_index": 0}
CHUNK = {**PROMPT, "num_tokens": 2, "token_ids": (1, 2)}


def compute(
    plan: list[ScheduledSequence], logits: torch.Tensor, hidden: torch.Tensor | None = None
) -> StepResult:
    """The results of a step whose rows have these logits, in the order of the rows whose logits are wanted."""
    rows = StepRows(StepPlan(1, tuple(plan)), VOCAB)
    inputs = PlainInputs(CPU, TorchAttention(1, 16, torch.float32, CPU))
    step = rows.send(inputs)
    assert len(logits) == step.logits_rows.shape[0]
    sampler = TorchSampler(VOCAB)
    step.tokens.plan(Tokens(), sampler, None, frozenset(), inputs)
    riders = [*step.riders, *step.tokens.riders]
    forward = Forward(sampler, logits.clone(), hidden)
    for rider in riders:
        rider.compute(forward)
        rider.to_host(torch.clone)
    result = StepResult(1, rows.results)
    for rider in riders:
        rider.collect(result)
    return result


def test_a_decoding_step_makes_no_object_that_nobody_asked_for() -> None:
    rows = StepRows(StepPlan(1, (item("a"), item("b"))), VOCAB)
    assert rows.riders == ()
    assert rows.tokens.riders == [rows.tokens]
    assert rows.decodes


@pytest.mark.parametrize(
    ("row", "replayed"),
    [
        (item(), True),
        (item(sampling={"logprobs": 2}), True),
        (item(**CHUNK), True),  # checked
        (item(**PROMPT, targets=(2, 3)), False),
        (item(**PROMPT, pool_start=0, pooling="mean"), False),
        (item(num_tokens=2, token_ids=(4, 5), drafted=(5,)), False),
    ],
)
def test_each_kind_says_whether_a_recorded_pass_serves_its_step(
    row: ScheduledSequence, replayed: bool
) -> None:
    rows = StepRows(StepPlan(1, (item("b"), row)), VOCAB)
    assert (find_recorded(SIZES, rows) is not None) == replayed


def test_a_kind_of_its_own_is_asked_too() -> None:
    class Heavy(Rider):
        prevents_replay = True

    rows = StepRows(StepPlan(1, (item(),)), VOCAB)
    assert find_recorded(SIZES, rows) is SIZES[0]
    rows.riders += (Heavy(),)
    assert find_recorded(SIZES, rows) is None


def test_a_failure_stays_in_its_slice_and_the_first_one_is_told() -> None:
    good, bad = torch.arange(float(VOCAB)), torch.full((VOCAB,), float("nan"))
    logits = {
        "sampled": [good],
        "not finite": [bad],
        "scored": [good, good, good],  # the last position has no target, and is checked
        "half scored": [bad, bad],
        "wrong": [bad, bad, bad],
        "checked": [good],
        "spoilt": [bad],
    }
    plan = [
        item("sampled"),
        item("not finite", {"logprobs": 1}),
        item("scored", {"prompt_logprobs": 1}, **PROMPT, targets=(2, 3)),
        item("half scored", {"prompt_logprobs": 1}, **PROMPT, targets=(2,)),
        item("wrong", {"prompt_logprobs": 1}, **{**PROMPT, "token_ids": (1, 2, VOCAB)}, targets=(2, 3)),
        item("checked", **CHUNK),
        item("spoilt", **CHUNK),
        item("pooled", **CHUNK, pool_start=0, pooling="mean"),
        item("large", **CHUNK, pool_start=1, pooling="last"),
    ]
    hidden = torch.tensor([[0.5, -1.0], [0.25, 3.0], [1e9, 0.0]])
    result = compute(plan, torch.stack([row for rows in logits.values() for row in rows]), hidden)
    found = {part.request_id: row for part, row in zip(plan, result.rows, strict=True)}
    told = {name: row.failed and (row.failed.reason, row.failed.cause) for name, row in found.items()}
    assert told == {
        "sampled": None,
        "not finite": (
            "the logits of this row are not finite, or its options left no token to draw",
            "numbers",
        ),
        "scored": None,
        "half scored": ("the logits of the prompt are not finite", "numbers"),
        "wrong": (f"a token id is not below the model's vocabulary size {VOCAB}", "input"),
        "checked": None,
        "spoilt": ("what was computed of its prompt is not finite", "numbers"),
        "pooled": None,
        "large": ("what was computed of its prompt is not finite", "numbers"),
    }
    assert found["sampled"] == RowResult((VOCAB - 1,))
    assert [name for name, row in found.items() if row.scores is not None] == ["scored"]
    (own, _), _ = found["scored"].scores.prompt.rows()  # type: ignore[union-attr]
    assert own == pytest.approx(float(good.log_softmax(-1)[2]), abs=1e-5)
    part = found["pooled"].pooled
    assert part is not None
    assert np.frombuffer(part.values, "<i8").tolist() == [int(x * 2 ** fraction_bits(3)) for x in (0.75, 2.0)]
    assert found["large"].pooled is None


def test_scores_are_of_the_tokens_that_were_accepted() -> None:
    """Two drafts, the first one right, beside a slice whose named tokens are scored."""
    rows = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1))
    best = rows.argmax(-1).tolist()
    draft = (best[0], (best[1] + 1) % VOCAB)
    drafts = item("drafts", {"logprobs": 1}, num_tokens=3, token_ids=(4, *draft), drafted=draft)
    named = item("named", {"logprobs": 0, "logprob_token_ids": (6, 1)})
    first, second = compute([drafts, named], rows).rows
    assert (first.token_ids, first.num_accepted, second.token_ids) == (tuple(best[:2]), 1, (best[3],))
    exact = rows.log_softmax(-1)
    for row, places, ids in ((first, (0, 1), None), (second, (3,), (6, 1))):
        output = row.scores.output  # type: ignore[union-attr]
        for place, (own, told) in zip(places, output.rows(), strict=True):
            wanted = ids or (best[place],)
            assert own == pytest.approx(float(exact[place].max()), abs=1e-5)
            assert [token for token, _ in told] == list(wanted)
            assert [value for _, value in told] == pytest.approx(
                exact[place, list(wanted)].tolist(), abs=1e-5
            )
