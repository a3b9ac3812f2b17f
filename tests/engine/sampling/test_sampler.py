"""The vectorised sampler against one row at a time in numpy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from loraplex.engine.execution.inputs import PlainInputs
from loraplex.engine.sampling import sampler
from loraplex.engine.sampling.batch import RowMemory, build_sample_rows
from loraplex.engine.sampling.noise import uniform
from loraplex.engine.sampling.sampled_row import SampledRow
from loraplex.engine.sampling.sampler import NumbaSampler, make_sampler, sample
from loraplex.engine.types import SamplingParams
from loraplex.kernels.backend import make_kernels
from support.engine.sampling import EOS, cuts, reference_weights, row
from support.engine.sampling_options import sampling_params, token_lists
from support.work import lines_run

CPU = torch.device("cpu")


Draw = Callable[..., tuple[list[int], list[bool]]]


@pytest.fixture(scope="module", params=["torch", "numba"])
def draw(request: pytest.FixtureRequest) -> Draw:
    """(logits, rows, pending tokens) → tokens and whether each row is ok, by either way of drawing on a CPU."""
    numba = NumbaSampler(0) if request.param == "numba" else None

    def drawn(
        logits: Any, rows: list[SampledRow], pending: list[int] | None = None
    ) -> tuple[list[int], list[bool]]:
        x = torch.tensor(np.asarray(logits), dtype=torch.float32)
        size = x.shape[1]
        asked = build_sample_rows(
            rows, vocab_size=size, eos_ids=EOS, memory=RowMemory(size), upload=PlainInputs(CPU)
        )
        last = torch.tensor(pending if pending is not None else [0] * len(rows))
        tokens, ok = sample(x, asked, last) if numba is None else numba.sample(x, asked, last)
        return tokens.tolist(), ok.tolist()

    return drawn


@given(
    st.lists(
        st.tuples(sampling_params, token_lists, token_lists, st.none() | st.integers(0, 59)),
        min_size=1,
        max_size=5,
    ),
    st.integers(0, 10**6),
)
def test_rows_equal_the_reference(draw, drawn, seed):
    logits = np.random.default_rng(seed).normal(0, 3, (len(drawn), 60)).astype(np.float32)
    rows = [
        row(str(i), p, prompt=(1, *prompt), output=output, pending=pending)
        for i, (p, prompt, output, pending) in enumerate(drawn)
    ]
    pending = [99 if p is None else p for _, _, _, p in drawn]
    tokens, ok = draw(logits, rows, pending)
    assert all(ok)
    for i, item in enumerate(rows):
        w = reference_weights(logits[i], item, drawn[i][3])
        p = item.request.sampling
        u = uniform(p.seed, p.choice, item.output_index) if p.temperature else 0.5
        edges = cuts(w)
        if np.abs(edges - u).min() < 1e-5:
            continue  # float32 may fall on either side
        assert tokens[i] == np.searchsorted(edges, u, side="right") - 1
        assert w[tokens[i]] > 0


@pytest.mark.parametrize(
    "options", [{"top_p": 0.9}, {"top_k": 30}, {"top_k": 3000}, {"top_p": 0.3, "top_k": 2000}]
)
@pytest.mark.parametrize("spread", [0.01, 1.0, 5.0])
def test_large_vocabularies(draw, options, spread):
    """Whether the best candidates decide a row (peaked) or all must be sorted (flat), the set is the same."""
    logits = np.random.default_rng(1).normal(0, spread, (6, 5000)).astype(np.float32)
    rows = [row(str(i), SamplingParams(9, seed=i, **options)) for i in range(6)]
    tokens, _ = draw(logits, rows)
    for i, item in enumerate(rows):
        edges = cuts(reference_weights(logits[i], item, None))
        assert abs(tokens[i] - (np.searchsorted(edges, uniform(i, 0, 0), side="right") - 1)) <= 1


def test_batch_mates_do_not_change_a_draw(draw):
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (8, 3000)).astype(np.float32)
    options = [
        {}, {"temperature": 0.0}, {"top_p": 0.999}, {"top_k": 2}, {"min_p": 0.2}, {"top_k": 2500, "top_p": 0.7},
        {"repetition_penalty": 1.5}, {"logit_bias": ((9, 3.0),)},
    ]  # fmt: skip
    rows = [row(str(i), SamplingParams(9, seed=i, **o)) for i, o in enumerate(options)]
    together, _ = draw(logits, rows)
    assert together == [draw(logits[i : i + 1], [rows[i]])[0][0] for i in range(8)]
    order = rng.permutation(8)
    assert [together[i] for i in order] == draw(logits[order], [rows[i] for i in order])[0]


def test_draws_follow_the_distribution(draw):
    """Chi-square over 4,000 draws with fixed seeds: 5 degrees of freedom, 99.9% quantile 20.5."""
    logits = np.log([0.4, 0.25, 0.15, 0.1, 0.07, 0.03])
    rows = [row(str(i), SamplingParams(9, seed=i)) for i in range(4000)]
    counts = np.bincount(draw(np.tile(logits, (4000, 1)), rows)[0], minlength=6)
    expected = np.exp(logits) * 4000
    assert ((counts - expected) ** 2 / expected).sum() < 20.5


def test_noise_is_even_and_independent_of_neighbouring_counters():
    u = np.array([[[uniform(s, c, i) for i in range(20)] for c in range(3)] for s in range(60)])
    assert u.min() >= 0
    assert u.max() < 1
    counts = np.histogram(u, bins=20, range=(0, 1))[0]
    assert ((counts - 180) ** 2 / 180).sum() < 43.8  # 19 degrees of freedom, 99.9%
    flat = u.reshape(-1)
    assert abs(np.corrcoef(flat[:-1], flat[1:])[0, 1]) < 0.05
    assert len(np.unique(u)) == u.size
    assert uniform(-1, 0, 0) != uniform(2**64 - 1, 0, 0)


def test_greedy_takes_the_first_of_the_largest_and_uses_no_noise(draw, monkeypatch):
    monkeypatch.setattr(
        "loraplex.engine.sampling.batch.uniform", lambda *a: pytest.fail("noise for a greedy row")
    )
    logits = [[0.0, 5.0, 5.0, 1.0], [9.0, 5.0, 5.0, 1.0]]
    params = SamplingParams(9, temperature=0.0, top_k=1, top_p=0.1)
    assert draw(logits, [row("a", params), row("b", params)])[0] == [1, 0]


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-6, 1e30, float("inf")])
def test_extreme_temperatures(draw, temperature):
    logits = np.array([[1.0, 1.5, -3e38, 3.0], [3.4e38, -3.4e38, 0.0, 1.0]])
    rows = [row(str(i), SamplingParams(9, temperature=temperature, seed=i)) for i in range(2)]
    tokens, ok = draw(logits, rows)
    assert ok == [True, True]
    assert all(0 <= t < 4 for t in tokens)
    if temperature < 1:
        assert tokens == [3, 0]


def test_a_row_that_cannot_be_drawn_fails_alone(draw):
    logits = np.zeros((6, 4), np.float32)
    logits[:, 1] = 1
    logits[1, 2] = np.nan
    logits[2, 3] = np.inf
    logits[3, 3] = -np.inf
    stop_all = SamplingParams(9, min_tokens=1, stop_token_ids=(0, 1, 3))
    greedy = SamplingParams(9, temperature=0.0)
    rows = [row("0", greedy), row("1", SamplingParams(9, top_p=0.5)), row("2", greedy), row("3", greedy),
            row("4", stop_all), row("5", greedy)]  # fmt: skip
    tokens, ok = draw(logits, rows)
    assert ok == [True, False, False, False, False, True]
    assert tokens == [1, 0, 0, 0, 0, 1]


def test_ids_beyond_the_vocabulary_are_passed_over(draw):
    params = SamplingParams(
        9, temperature=0.0, logit_bias=((999, 50.0), (-1, 50.0)), stop_token_ids=(999, -3), min_tokens=3,
        repetition_penalty=1.2,
    )  # fmt: skip
    assert draw([[0.0, 2.0, 1.0], [0.0, 2.0, 1.0]], [row("a", params, prompt=(1, 77)), row("b", params)]) == (
        [1, 1], [True, True],
    )  # fmt: skip


def test_ends_are_barred_until_min_tokens(draw):
    logits = [[0.0, 1.0, 9.0, 5.0]] * 4
    params = SamplingParams(9, temperature=0.0, min_tokens=2, stop_token_ids=(3,))
    ignoring = SamplingParams(9, temperature=0.0, min_tokens=2, ignore_eos=True)
    rows = [
        row("a", params),
        row("b", params, output=(1,)),
        row("c", params, output=(1, 1)),
        row("d", ignoring),
    ]
    assert draw(logits, rows)[0] == [1, 1, 2, 2]


def test_presence_and_frequency_count_outputs_only_and_the_pending_token(draw):
    params = SamplingParams(9, temperature=0.0, presence_penalty=2.0)
    logits = [[0.0, 3.0, 0.0, 2.0]] * 4
    rows = [
        row("a", params, prompt=(1,)), row("b", params, prompt=(0,), output=(1,)),
        row("c", params, prompt=(0,), pending=1), row("d", params, prompt=(0,), output=(1, 3), pending=3),
    ]  # fmt: skip
    assert draw(logits, rows, [0, 1, 1, 3])[0] == [1, 3, 3, 1]


def test_all_greedy_needs_one_pass(draw, monkeypatch):
    """No option, no noise, no sort: nothing but the maximum."""
    for name in ("_draw", "_penalise", "_thresholds"):
        monkeypatch.setattr(sampler, name, lambda *a: pytest.fail("not needed"))
    assert draw([[0.0, 1.0]], [row("a", SamplingParams(9, temperature=0.0))])[0] == [1]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_all_samplers_give_a_growing_sequence_the_same_tokens():
    """Planned ahead: of each token the plan for the next knows only that there will be one."""
    rng = np.random.default_rng(4)
    options = {"repetition_penalty": 1.6, "frequency_penalty": 0.5, "presence_penalty": 0.2, "min_tokens": 3}
    tables = [SamplingParams(9, seed=3, **options), SamplingParams(9, temperature=0.0, **options)]
    logits = rng.normal(0, 1, (6, 2, 40)).astype(np.float32)
    answers = []
    for backend in ("torch", "numba", "triton"):
        chosen = make_sampler(make_kernels(backend, CPU), vocab_size=40, max_rows=4)
        outputs: list[list[int]] = [[] for _ in tables]
        last, found = torch.zeros(2, dtype=torch.int64), []
        for step, x in enumerate(logits):
            rows = [row(str(i), p, prompt=(1, 5), output=tuple(outputs[i]), pending=9 if step else None)
                    for i, p in enumerate(tables)]  # fmt: skip
            assert [item.output_index for item in rows] == [step, step]
            batch = chosen.plan(rows, eos_ids=EOS, upload=PlainInputs(CPU))
            if step:
                for own, token in zip(outputs, last.tolist(), strict=True):
                    own.append(token)
            last, ok = chosen.sample(torch.tensor(x), batch, last)
            assert ok.all()
            found.append(last.tolist())
        values = chosen.score(torch.tensor(logits[0]), last, 5)
        answers.append((found, values.ids.tolist(), values.values.numpy().round(4).tolist()))
    assert answers[0] == answers[1] == answers[2]
    assert len({tuple(tokens) for tokens in answers[0][0]}) > 3


def test_a_step_does_not_read_the_biases_of_its_rows_one_by_one() -> None:
    """60 rows with 1,024 biases each took 23 ms of the thread that plans, at each step."""
    memory = RowMemory(2000)

    def planned(count: int) -> int:
        params = SamplingParams(9, logit_bias=tuple((token, 1.0) for token in range(count)))
        rows = [row(f"{count}-{place}", params) for place in range(4)]

        def plan() -> None:
            upload = PlainInputs(torch.device("cpu"))
            build_sample_rows(rows, vocab_size=2000, eos_ids=EOS, memory=memory, upload=upload)

        plan()
        return lines_run(plan)

    assert planned(1024) <= planned(1) + 8


def test_a_sequence_that_waits_for_its_turn_is_not_counted_again() -> None:
    """Where decoding rows take turns, 16,000 tokens with a penalty took the planning thread 15 ms at each turn."""
    memory, params = RowMemory(2000), SamplingParams(9, repetition_penalty=1.1)
    one, other = (row(name, params, prompt=tuple(range(1000))) for name in "ab")

    def plan(chosen: SampledRow) -> None:
        upload = PlainInputs(torch.device("cpu"))
        build_sample_rows([chosen], vocab_size=2000, eos_ids=EOS, memory=memory, upload=upload)

    for chosen in (one, one, other):
        plan(chosen)
    assert lines_run(lambda: plan(one)) < one.num_prompt


def test_a_request_id_that_comes_again_has_counts_of_its_own() -> None:
    memory, params = RowMemory(10), SamplingParams(9, presence_penalty=1.0)
    before = row("a", params, prompt=(1, 2), output=(3, 3))
    assert memory.entries(before).tolist() == [1, 2, 3 | 2 << 20]
    after = row("a", params, prompt=(4,), output=(5,))
    after = SampledRow(replace(after.scheduled, order=1))
    assert memory.entries(after).tolist() == [4, 5 | 1 << 20]


class LargeOperations(TorchDispatchMode):
    """Names the torch operations that read or write as many numbers as torch shares out to its threads."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        touched = [value for value in (*args, result) if isinstance(value, torch.Tensor)]
        if any(value.numel() >= 32768 for value in touched):
            self.names.append(str(func))
        return result


def test_a_chunk_of_a_prompt_wakes_no_thread_of_torchs() -> None:
    """Beside others' rows its last one is checked, and theirs are taken out: of a whole vocabulary each."""
    logits = torch.randn(5, 49152)
    logits[4, 77] = torch.nan
    rows = torch.tensor([3, 0, 4])
    with LargeOperations() as large:
        taken = NumbaSampler(49152).take(logits, rows)
        ok = NumbaSampler(49152).are_finite(taken)
    views = {"aten.detach.default", "aten.alias.default", "aten.lift_fresh.default"}
    assert not set(large.names) - views
    assert torch.equal(taken.nan_to_num(), logits[rows].nan_to_num())
    assert ok.tolist() == [True, True, False]
    taken.zero_()
    assert logits[3].any()
