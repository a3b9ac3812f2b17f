"""Rows behind drafted tokens draw as they would if the tokens were known."""

from itertools import count

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.engine.execution.inputs import PlainInputs
from loraplex.engine.execution.riders.tokens import accept
from loraplex.engine.execution.step_results import RowResult, StepResult
from loraplex.engine.sampling.sampled_row import SampledRow, sampled_rows
from loraplex.engine.sampling.sampler import Sampler, TritonSampler, make_sampler
from loraplex.engine.types import EngineRequest, SamplingParams, ScheduledSequence
from loraplex.kernels.backend import make_kernels
from support.engine.sampling import EOS, row

CPU = torch.device("cpu")
SIZE = 40
EXAMPLES = count()
PENALISED = SamplingParams(
    99, seed=5, repetition_penalty=1.7, presence_penalty=0.3, frequency_penalty=0.4, min_tokens=4, logprobs=2
)


@pytest.fixture(
    scope="module",
    params=["torch", "numba", pytest.param("triton", marks=pytest.mark.filterwarnings("ignore"))],
)
def sampler(request: pytest.FixtureRequest) -> Sampler:
    return make_sampler(make_kernels(request.param, CPU), vocab_size=SIZE, max_rows=16)


def draw(sampler: Sampler, rows: list[SampledRow], logits: np.ndarray) -> list[int]:
    batch = sampler.plan(rows, eos_ids=EOS, upload=PlainInputs(CPU))
    tokens, ok = sampler.sample(
        torch.tensor(logits.astype(np.float32)), batch, torch.zeros(len(rows), dtype=torch.int64)
    )
    assert ok.all()
    return tokens.tolist()


def drafted_slice(name: str, prompt: tuple[int, ...], output: tuple[int, ...], drafted: tuple[int, ...]):
    start = len(prompt) + len(output) - 1
    request = EngineRequest(name, "t", prompt, PENALISED)
    tokens = (0, *drafted)
    return ScheduledSequence(
        request, 0, 0, start, len(tokens), tokens, (0, 1), -1, True, False, len(output),
        outputs=output, drafted=drafted,
    )  # fmt: skip


def test_a_row_behind_drafts_draws_as_if_they_were_known(sampler):
    """Fewer examples where kernels are interpreted."""
    tokens = st.lists(st.integers(0, SIZE - 1), min_size=1, max_size=6)

    @settings(max_examples=6 if isinstance(sampler, TritonSampler) else 20)
    @given(tokens, tokens, st.integers(0, 9999))
    def check(output, drafted, seed):
        draws_as_known(sampler, output, drafted, seed)

    check()


def draws_as_known(sampler, output, drafted, seed):
    logits = np.random.default_rng(seed).normal(0, 1, (1 + len(drafted), SIZE))
    example = next(
        EXAMPLES
    )  # a sequence's tokens do not change, so that each example has sequences of its own
    part = drafted_slice(f"a{example}", (1, 5), tuple(output), tuple(drafted))
    known = [
        row(f"{place} of {example}", PENALISED, prompt=(1, 5), output=(*output, *drafted[:place]))
        for place in range(1 + len(drafted))
    ]
    assert draw(sampler, sampled_rows([part]), logits) == draw(sampler, known, logits)


def test_a_draft_leaves_nothing_in_the_history_of_its_sequence(sampler):
    logits = np.random.default_rng(1).normal(0, 1, (3, SIZE))
    draw(sampler, sampled_rows([drafted_slice("b", (1,), (3,), (7, 8))]), logits)
    follows = row("b", PENALISED, prompt=(1,), output=(3, 9))
    fresh = row("c", PENALISED, prompt=(1,), output=(3, 9))
    assert draw(sampler, [follows], logits[:1]) == draw(sampler, [fresh], logits[:1])


def accepted(drafted, tokens, bad=()):
    """Two slices: one with this draft and these sampled tokens, and one without."""
    result = StepResult(1, [RowResult(), RowResult()])
    rows = [(token, place not in bad) for place, token in enumerate(tokens)] + [(42, True)]
    accept(result, (0,) * len(tokens) + (1,), {0: drafted}, rows)
    found, other = result.rows
    assert other == RowResult((42,))
    assert found.num_accepted == max(0, len(found.token_ids) - 1)
    return found.token_ids, set() if found.failed is None else {0}


def test_tokens_are_accepted_up_to_the_first_that_was_not_drafted():
    assert accepted((1, 2), [1, 2, 3]) == ((1, 2, 3), set())
    assert accepted((1, 2), [1, 9, 3]) == ((1, 9), set())
    assert accepted((1, 2), [9, 2, 3]) == ((9,), set())
    # Another's draft may fit again behind one that did not.
    assert accepted((1, 2, 2), [1, 9, 2, 5]) == ((1, 9), set())


def test_a_row_that_nobody_needs_may_fail():
    assert accepted((1, 2), [9, 0, 0], bad=(1, 2)) == ((9,), set())
    assert accepted((1, 2), [1, 0, 3], bad=(1,)) == ((), {0})
