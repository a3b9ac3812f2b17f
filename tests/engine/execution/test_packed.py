"""A step's inputs in one copy: what is read on the device is what was put in, whatever the step."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from loraplex.engine.execution.batch import flatten
from loraplex.engine.execution.cuda_graphs import graph_sizes
from loraplex.engine.execution.inputs import PlainInputs, StepLimits
from loraplex.engine.execution.packed_inputs import PackedSource
from loraplex.engine.types import EngineRequest, SamplingParams, ScheduledSequence, Sequence, StepPlan
from loraplex.kernels.attention.kernel import AttentionNeeds
from loraplex.kernels.attention.torch_kernel import TorchAttention
from loraplex.kernels.attention.triton_kernel import TritonAttention
from loraplex.kernels.attention.triton_tiling import AttentionShape

CPU = torch.device("cpu")
VOCAB = 100
LIMITS = StepLimits(max_rows=40, max_sequences=6, max_blocks=8)


def make_source(sizes: tuple[int, ...] = ()) -> PackedSource:
    needs = AttentionNeeds(AttentionShape(4, 2, 16, 16), (None, 9))
    attention = TritonAttention(needs, torch.float32, CPU)
    source = PackedSource(attention, torch.float32, CPU, LIMITS, lora=None, sizes=sizes)
    source.replays = {size: lambda _with_adapters: torch.empty(0) for size in sizes}
    return source


def make_plan(rng: random.Random, *, decoding: bool) -> StepPlan:
    rows = []
    room = LIMITS.max_rows
    for number in range(rng.randint(1, LIMITS.max_sequences)):
        count = 1 if decoding else min(rng.choice([1, 1, 3, 17]), room)
        if not count:
            break
        room -= count
        start = rng.randint(0, LIMITS.max_blocks * 16 - count)
        blocks = tuple(rng.sample(range(50), -(-(start + count) // 16)))
        tokens = tuple(rng.randrange(VOCAB) for _ in range(count))
        request = EngineRequest(str(number), "t", tokens, SamplingParams(max_tokens=4))
        seq = Sequence(request, 0.0, 0, list(tokens))
        samples = decoding or rng.random() < 0.7
        rows.append(ScheduledSequence(seq, 0, start, count, tokens, blocks, -1, samples, False, 0))
    return StepPlan(1, tuple(rows))


@pytest.mark.parametrize("decoding", [False, True])
def test_any_step_arrives_as_it_was_planned(decoding: bool) -> None:
    rng = random.Random(7)
    source = make_source((2, 4, 6))
    plain = PlainInputs(CPU, TorchAttention(2, 16, torch.float32, CPU))
    for _ in range(60):
        plan = make_plan(rng, decoding=decoding)
        inputs = source.begin_inputs(plan)
        count = len(plan.scheduled)
        alone = all(item.num_tokens == 1 and item.samples for item in plan.scheduled)
        assert alone or not decoding
        assert inputs.size == (next(size for size in (2, 4, 6) if size >= count) if alone else None)
        step = flatten(plan, vocab_size=VOCAB, inputs=inputs)
        want = flatten(plan, vocab_size=VOCAB, inputs=plain)
        extra = [inputs.floats([0.5, -1.0]), inputs.doubles([1e-300]), inputs.ints([]), inputs.ints([2**40])]
        source.memory.fill_(0xFF)  # a step's numbers come with it, not from the one before
        inputs.send()
        rows = inputs.size or want.num_rows
        for name in ("token_ids", "positions"):
            got = getattr(step, name)
            assert got.shape == (rows,)
            assert got[: want.num_rows].tolist() == getattr(want, name).tolist()
            assert not got[want.num_rows :].any()
        for name in ("logits_rows", "sampled_rows", "fresh_blocks"):
            assert getattr(step, name).tolist() == getattr(want, name).tolist()
        assert step.attention.slots[: want.num_rows].tolist() == want.attention.slots.tolist()
        assert (step.attention.slots[want.num_rows :] == -1).all()
        assert [values.tolist() for values in extra] == [[0.5, -1.0], [1e-300], [], [2**40]]


def test_inputs_that_do_not_fit_are_copied_separately() -> None:
    source = make_source()
    inputs = source.begin_inputs(make_plan(random.Random(1), decoding=False))
    large = np.arange(1 << 16, dtype=np.int64)
    views = [inputs.ints(large), inputs.ints([1, 2, 3])]
    inputs.send()
    assert views[0].tolist() == large.tolist()
    assert views[1].tolist() == [1, 2, 3]


def test_steps_in_flight_keep_their_numbers_on_the_host() -> None:
    """The device's memory is one, and filled in the order of the steps; what waits for it is not overwritten."""
    source = make_source()
    waiting = []
    for number in range(3):
        inputs = source.begin_inputs(make_plan(random.Random(number), decoding=False))
        waiting.append((number, inputs, inputs.ints([number] * 5)))
    for number, inputs, view in waiting:
        inputs.send()
        assert view.tolist() == [number] * 5


def test_an_adapter_row_without_adapters_is_refused() -> None:
    inputs = make_source().begin_inputs(make_plan(random.Random(1), decoding=False))
    with pytest.raises(RuntimeError, match="has no adapters"):
        inputs.adapters([(3, 0, 1)], 1)
    assert inputs.adapters([], 1) is None


@pytest.mark.parametrize("most", [1, 3, 64, 100, 256, 512, 1000])
def test_recorded_sizes_reach_as_far_as_they_may(most: int) -> None:
    sizes = graph_sizes(most)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == min(most, 512)
