"""A step's inputs in one copy: what is read on the device is what was put in, whatever the step."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from loraplex.engine.execution.batch import StepRows
from loraplex.engine.execution.cuda_graphs import graph_sizes, recorded_sizes
from loraplex.engine.execution.inputs import PlainInputs, RecordedSize, StepLimits
from loraplex.engine.execution.packed_inputs import PackedSource, find_recorded
from loraplex.engine.kv.layers import blocks_unseen
from loraplex.engine.kv.prefix_blocks import GIVEN_BACK
from loraplex.engine.types import EngineRequest, SamplingParams, ScheduledSequence, StepPlan
from loraplex.kernels.attention.kernel import AttentionNeeds
from loraplex.kernels.attention.torch_attention import TorchAttention
from loraplex.kernels.attention.triton_kernel import TritonAttention
from loraplex.kernels.attention.triton_tiling import AttentionShape

CPU = torch.device("cpu")
VOCAB = 100
LIMITS = StepLimits(max_rows=40, max_sequences=6, max_blocks=8)


def make_source(
    sizes: tuple[RecordedSize, ...] = (),
    windows: tuple[int | None, ...] = (None,),
    limits: StepLimits = LIMITS,
) -> PackedSource:
    shape = AttentionShape(4, 2, 16, 16)
    needs = AttentionNeeds(shape, (None, 9), groups=tuple(((shape, window),) for window in windows))
    attention = TritonAttention(needs, torch.float32, CPU)
    source = PackedSource(
        attention,
        torch.float32,
        CPU,
        limits,
        lora=None,
        sizes=sizes,
        num_groups=len(windows),
        has_windows=True,
    )
    source.replays = {size: lambda _with_adapters: torch.empty(0) for size in sizes}
    return source


def make_plan(rng: random.Random, *, decoding: bool, windows: tuple[int | None, ...] = (None,)) -> StepPlan:
    """`windows`: of each group of layers. Where a group does not see a block, it was given back."""
    rows = []
    room = LIMITS.max_rows
    for number in range(rng.randint(1, LIMITS.max_sequences)):
        count = 1 if decoding else min(rng.choice([1, 1, 3, 17]), room)
        if not count:
            break
        room -= count
        start = rng.randint(0, LIMITS.max_blocks * 16 - count)
        blocks = rng.sample(range(50), -(-(start + count) // 16) * len(windows))
        for group, window in enumerate(windows):
            for index in range(0 if window is None else blocks_unseen(window, start // 16)):
                blocks[index * len(windows) + group] = GIVEN_BACK
        tokens = tuple(rng.randrange(VOCAB) for _ in range(count))
        request = EngineRequest(str(number), "t", tokens, SamplingParams(max_tokens=4))
        samples = decoding or rng.random() < 0.7
        item = ScheduledSequence(request, 0, 0, start, count, tokens, tuple(blocks), -1, samples, False, 0)
        ends = (number + 9,) * ((start + count) // 16 - start // 16)
        rows.append(replace(item, window_slot=number, state=number + 9, state_targets=ends))
    return StepPlan(1, tuple(rows))


DECODES = tuple(RecordedSize(size, size) for size in (2, 4, 6))
PROMPTS = (RecordedSize(16, 3, prompts=True), RecordedSize(36, 6, prompts=True))


@pytest.mark.parametrize("prompts", [(), PROMPTS])
@pytest.mark.parametrize("decoding", [False, True])
@pytest.mark.parametrize("windows", [(None,), (9, None, 9)])
def test_any_step_arrives_as_it_was_planned(
    windows: tuple[int | None, ...], decoding: bool, prompts: tuple[RecordedSize, ...]
) -> None:
    rng = random.Random(7)
    source = make_source((*DECODES, *prompts), windows)
    groups = len(windows)
    used = set()
    plain = PlainInputs(CPU, TorchAttention(2, 16, torch.float32, CPU))
    for _ in range(60):
        plan = make_plan(rng, decoding=decoding, windows=windows)
        inputs = source.begin_inputs(StepRows(plan, VOCAB))
        count = len(plan.scheduled)
        alone = all(item.num_tokens == 1 and item.samples for item in plan.scheduled)
        assert alone or not decoding
        total = sum(item.num_tokens for item in plan.scheduled)
        fitting = [
            size
            for size in (*DECODES, *prompts)
            if size.rows >= total and size.sequences >= count and (alone or size.prompts)
        ]
        assert inputs.size == (fitting[0] if fitting else None)
        used.add(inputs.size)
        step, want = (StepRows(plan, VOCAB, groups).send(to) for to in (inputs, plain))
        extra = [inputs.floats([0.5, -1.0]), inputs.doubles([1e-300]), inputs.ints([]), inputs.ints([2**40])]
        source.memory.fill_(0xFF)  # a step's numbers come with it, not from the one before
        inputs.send()
        rows = total if inputs.size is None else inputs.size.rows
        for name in ("token_ids", "positions"):
            got = getattr(step, name)
            assert got.shape == (rows,)
            assert got[:total].tolist() == getattr(want, name).tolist()
            assert not got[total:].any()
        for name in ("logits_rows", "fresh_blocks"):
            assert getattr(step, name).tolist() == getattr(want, name).tolist()
        assert step.tokens.sampled_rows.tolist() == want.tokens.sampled_rows.tolist()
        for found, expected in zip(step.attention, want.attention, strict=True):
            assert found.slots[:total].tolist() == expected.slots.tolist()
            assert (found.slots[total:] == -1).all()
        assert step.recurrent is not None
        assert want.recurrent is not None
        numbers = want.recurrent.table.tolist()
        assert (step.recurrent.table.tolist(), step.recurrent.units) == (numbers, want.recurrent.units)
        if inputs.size is not None:
            recorded = source.recorded_units(inputs.size)
            assert recorded is not None
            assert recorded.table[: len(numbers)].tolist() == numbers
            assert all(own <= most for own, most in zip(want.recurrent.most, recorded.most, strict=True))
        assert [values.tolist() for values in extra] == [[0.5, -1.0], [1e-300], [], [2**40]]
        if inputs.size is not None and inputs.size.prompts:
            start = source.layouts[inputs.size].rows["logits_rows"]
            read = source.view(start, 8 * inputs.size.sequences, torch.int64).tolist()
            assert read == want.logits_rows.tolist() + [0] * (inputs.size.sequences - count)
    assert used >= {*(DECODES[1:] if decoding else {None, *prompts})}


@pytest.mark.parametrize(
    ("change", "served"),
    [
        ({}, True),
        ({"targets": (5,)}, False),
        ({"pool_start": 0, "samples": False}, False),
        ({"samples": False}, True),
    ],
)
def test_recordings_serve_no_step_that_wants_more_than_a_row_of_logits(change, served) -> None:
    source = make_source(PROMPTS)
    (row, *_) = make_plan(random.Random(3), decoding=True).scheduled
    inputs = source.begin_inputs(StepRows(StepPlan(1, (replace(row, **change),)), VOCAB))
    assert (inputs.size is not None) == served


def test_recordings_for_adapters_serve_no_step_without() -> None:
    plan = make_plan(random.Random(3), decoding=True)
    sizes = [RecordedSize(40, 6, prompts=True, adapters_only=True)]
    assert find_recorded(sizes, StepRows(plan, VOCAB)) is None
    mixed = StepPlan(1, (replace(plan.scheduled[0], slot=2), *plan.scheduled[1:]))
    assert find_recorded(sizes, StepRows(mixed, VOCAB)) is sizes[0]


def test_a_step_that_is_asked_for_unrecorded_is() -> None:
    source = make_source(DECODES)
    rows = StepRows(make_plan(random.Random(1), decoding=True), VOCAB)
    with source.unrecorded():
        assert source.begin_inputs(rows).size is None
    assert source.begin_inputs(rows).size is not None


@pytest.mark.parametrize("most", [0, 1, 40, 64, 500, 513, 1024])
def test_recorded_prompts_reach_as_far_as_they_may(most: int) -> None:
    limits = StepLimits(2048, 256, 8)
    found = [size for size in recorded_sizes(limits, most) if size.prompts]
    rows = [size.rows for size in found]
    assert rows == sorted(set(rows))
    assert max(rows, default=0) == most
    # Padding: less than 64 rows, and less than 128 above 512.
    assert all(after - before <= (128 if after > 512 else 64) for before, after in pairwise([0, *rows]))
    assert all(size.sequences == min(size.rows, 256) for size in found)
    assert all(size.adapters_only == (size.rows > most / 2) for size in found)
    assert len(found) <= 12


def test_no_recorded_prompt_is_larger_than_a_step() -> None:
    sizes = recorded_sizes(StepLimits(100, 8, 8), 1024)
    assert [size.rows for size in sizes if size.prompts] == [64, 100]


def test_inputs_that_do_not_fit_are_copied_separately() -> None:
    source = make_source()
    inputs = source.begin_inputs(StepRows(make_plan(random.Random(1), decoding=False), VOCAB))
    large = np.arange(1 << 16, dtype=np.int64)
    views = [inputs.ints(large), inputs.ints([1, 2, 3])]
    inputs.send()
    assert views[0].tolist() == large.tolist()
    assert views[1].tolist() == [1, 2, 3]


def test_room_for_longer_block_tables_is_not_copied() -> None:
    """Each group of layers has room for tables of the longest sequences. A step uses a few bytes of these megabytes."""
    windows, limits = (9, None, 9), replace(LIMITS, max_blocks=20_000)
    source = make_source((), windows, limits)
    step_rows = StepRows(make_plan(random.Random(2), decoding=True, windows=windows), VOCAB, len(windows))
    inputs = source.begin_inputs(step_rows)
    step = step_rows.send(inputs)
    source.memory.fill_(0xFF)
    inputs.send()
    tables = 4 * limits.max_sequences * limits.max_blocks
    assert int((source.memory == 0xFF).sum()) > 0.95 * len(windows) * tables
    plain = PlainInputs(CPU, TorchAttention(2, 16, torch.float32, CPU))
    want = StepRows(make_plan(random.Random(2), decoding=True, windows=windows), VOCAB, len(windows)).send(
        plain
    )
    for found, expected in zip(step.attention, want.attention, strict=True):
        assert found.slots.tolist() == expected.slots.tolist()


def test_steps_in_flight_keep_their_numbers_on_the_host() -> None:
    """The device's memory is one, and filled in the order of the steps; what waits for it is not overwritten."""
    source = make_source()
    waiting = []
    for number in range(3):
        inputs = source.begin_inputs(StepRows(make_plan(random.Random(number), decoding=False), VOCAB))
        waiting.append((number, inputs, inputs.ints([number] * 5)))
    for number, inputs, view in waiting:
        inputs.send()
        assert view.tolist() == [number] * 5


def test_an_adapter_row_without_adapters_is_refused() -> None:
    inputs = make_source().begin_inputs(StepRows(make_plan(random.Random(1), decoding=False), VOCAB))
    with pytest.raises(RuntimeError, match="has no adapters"):
        inputs.adapters([(3, 0, 1)], 1)
    assert inputs.adapters([], 1) is None


@pytest.mark.parametrize("most", [1, 3, 64, 100, 256, 512, 1000])
def test_recorded_sizes_reach_as_far_as_they_may(most: int) -> None:
    sizes = graph_sizes(most)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == min(most, 512)
