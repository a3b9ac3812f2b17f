"""Paged attention in Triton against the formula in float64: interpreted, or on a GPU where there is one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from loraplex.kernels.attention.triton_attention import (
    AttentionScratch,
    build_attention_batch,
    graph_batch,
    paged_attention,
)
from loraplex.kernels.attention.triton_plan import AttentionCapacity, AttentionPlan
from loraplex.kernels.attention.triton_tiling import AttentionShape, Tiling, Tilings
from support.kernels.paged import expected_attention, paged_step
from support.kernels.poison import poison_new_memory
from support.kernels.triton_interpreter import repair_bfloat16

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TILINGS = Tilings(Tiling(16, 16, 4, 2, 32), Tiling(32, 16, 4, 2, 32))
TOLERANCE = {torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
MIX_ROWS, MIX_LENS = [1, 2, 1, 5, 18, 1], [1, 2, 7, 13, 50, 75]

needs_gpu = pytest.mark.skipif(
    DEVICE.type == "cpu", reason="the interpreter multiplies bfloat16's bits as integers"
)
pytestmark = [
    pytest.mark.usefixtures("quick_interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # what is not finite here is meant to be
]


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    poison_new_memory(monkeypatch)
    if DEVICE.type == "cpu":
        repair_bfloat16(monkeypatch)
        torch.set_num_threads(1)


def plan_for(step, *, windows=(None,), tilings=TILINGS, num_programs=4, rows=64, sequences=16, longest=64):
    _, block_size, _, kv_heads, head_dim = step.cache.shape
    shape = AttentionShape(step.q.shape[1], kv_heads, head_dim, block_size)
    capacity = AttentionCapacity(rows, sequences, 400, longest)
    return AttentionPlan(shape, capacity, tilings, num_programs=num_programs, windows=windows)


def attend(step, *, window=None, softcap=None, **of_plan):
    plan = plan_for(step, windows=(None, window) if window else (None,), **of_plan)
    scratch = AttentionScratch.allocate(plan, DEVICE)
    batch = build_attention_batch(plan, scratch, step.num_rows, step.seq_lens, step.tables)
    return batch, paged_attention(step.q, step.cache, batch, scale=0.3, window=window, softcap=softcap)


def close(got, step, *, window=None, softcap=None):
    want = expected_attention(step, scale=0.3, window=window, softcap=softcap)
    tolerance = TOLERANCE[step.q.dtype]
    torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window", "softcap", "dtype"),
    [
        (2, 2, 8, None, None, torch.float32),
        (4, 2, 64, 5, None, torch.float32),
        (8, 2, 24, None, 1.5, torch.float32),
        (7, 1, 64, 33, None, torch.float32),
        (14, 2, 96, None, None, torch.float16),
        (8, 1, 128, 20, 2.0, torch.float16),
        (4, 1, 256, 1, 2.0, torch.float32),
        (4, 2, 128, 20, 2.0, torch.bfloat16),
    ],
)
def test_mixes_of_decodes_and_chunks_equal_the_formula(heads, kv_heads, head_dim, window, softcap, dtype):
    step = paged_step(
        MIX_ROWS, MIX_LENS, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, window=window,
        device=DEVICE,
    )  # fmt: skip
    batch, got = attend(step, window=window, softcap=softcap)
    assert batch.counts[window].prefill
    assert got.dtype is dtype
    assert got.is_contiguous()
    close(got, step, window=window, softcap=softcap)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 1, 5, 33])
@pytest.mark.parametrize("group", [1, 2, 4, 7, 8])
def test_all_groups_and_windows(window, group):
    head_dim, softcap = (8, None) if group % 2 else (80, 1.5)
    step = paged_step(
        MIX_ROWS,
        MIX_LENS,
        heads=group,
        kv_heads=1,
        head_dim=head_dim,
        window=window,
        device=DEVICE,
        seed=group,
    )
    _, got = attend(step, window=window, softcap=softcap)
    close(got, step, window=window, softcap=softcap)


def test_a_row_each_for_all_lengths_of_several_blocks():
    lens = [*range(1, 12), 15, 16, 17, 31, 33]
    step = paged_step([1] * len(lens), lens, heads=2, kv_heads=1, head_dim=8, device=DEVICE)
    _, got = attend(step)
    close(got, step)


def test_one_row_of_one_position():
    step = paged_step([1], [1], heads=2, kv_heads=1, head_dim=8, device=DEVICE)
    _, got = attend(step)
    assert torch.equal(got, step.values[0].expand(1, 2, 8))


def test_no_row_at_all():
    step = paged_step([], [], heads=2, kv_heads=1, head_dim=8, device=DEVICE)
    _, got = attend(step)
    assert got.shape == (0, 2, 8)


def test_long_contexts_are_split_and_added_up():
    step = paged_step([1, 1, 7], [300, 3, 150], heads=4, kv_heads=1, head_dim=16, device=DEVICE)
    batch, got = attend(step, num_programs=4)
    counts = batch.counts[None]
    assert counts.decode > 4
    assert counts.prefill > 1
    assert counts.merge == 8
    close(got, step)
    _, again = attend(step, num_programs=4)
    assert torch.equal(got, again)
    _, whole = attend(step, tilings=Tilings(Tiling(16, 64, 4, 2, 4096), Tiling(32, 64, 4, 2, 4096)))
    torch.testing.assert_close(got, whole, atol=3e-6, rtol=3e-6)


def test_more_parts_than_are_added_at_a_time():
    step = paged_step([1], [600], heads=1, kv_heads=1, head_dim=8, device=DEVICE)
    # The last ones outweigh all that were added before.
    step.keys[0][590:] = step.q[0]
    for position in range(590, 600):
        step.cache[step.tables[0][position // 4], position % 4, 0] = step.q[0]
    batch, got = attend(step, num_programs=16)
    assert batch.counts[None].decode > 16
    close(got, step)


def test_more_heads_in_a_group_than_fit_a_tile():
    step = paged_step([1, 3, 2], [9, 40, 2], heads=40, kv_heads=1, head_dim=8, device=DEVICE)
    tilings = Tilings(Tiling(32, 16, 4, 2, 32), Tiling(64, 16, 4, 1, 32))
    _, got = attend(step, tilings=tilings)
    close(got, step)


def test_queries_may_be_a_view_of_a_wider_row():
    step = paged_step([1, 9], [5, 30], heads=4, kv_heads=2, head_dim=16, device=DEVICE)
    wide = torch.randn(10, 8, 16, device=DEVICE)
    wide[:, :4] = step.q
    plan = plan_for(step)
    batch = build_attention_batch(
        plan, AttentionScratch.allocate(plan, DEVICE), step.num_rows, step.seq_lens, step.tables
    )
    close(paged_attention(wide[:, :4], step.cache, batch, scale=0.3), step)


def test_a_recorded_launch_computes_whatever_the_array_holds():
    """What a CUDA graph replays: one array, one scratch, grids of the capacity; the rows of padding are 0."""
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 16, "device": DEVICE}
    steps = [
        paged_step([1] * 8, [3, 90, 1, 40, 16, 17, 7, 9], **sizes, seed=1),
        paged_step([1] * 3, [120, 1, 5], **sizes, seed=2),
        paged_step([], [], **sizes),
        paged_step([2, 1, 3], [2, 37, 40], **sizes, seed=3),
    ]
    plan = plan_for(steps[0], windows=(None, 6), rows=8, sequences=8, longest=4)
    host = np.full(plan.num_ints, 1 << 30, dtype=np.int32)
    array = torch.from_numpy(host).to(DEVICE)
    batch = graph_batch(plan, array, AttentionScratch.allocate(plan, DEVICE))
    for step in steps:
        written = plan.write(host, step.num_rows, step.seq_lens, step.tables, padded_rows=8)
        array[: written.num_ints] = torch.from_numpy(host[: written.num_ints]).to(DEVICE)
        real = len(step.q)
        q = torch.full((8, 4, 16), float("nan"), device=DEVICE)
        q[:real] = step.q
        for window in (None, 6):
            got = paged_attention(q, step.cache, batch, scale=0.3, window=window)
            close(got[:real], step, window=window)
            assert (got[real:] == 0).all()


def test_a_sequence_that_is_not_finite_spoils_no_other():
    step = paged_step([1, 3, 1, 6], [20, 9, 40, 6], heads=4, kv_heads=2, head_dim=8, device=DEVICE)
    for i in (0, 3):
        step.cache[step.tables[i]] = float("nan")
        step.keys[i].fill_(float("nan"))
    _, got = attend(step)
    want = expected_attention(step, scale=0.3)
    assert want[0].isnan().all()
    torch.testing.assert_close(got.double(), want, atol=3e-6, rtol=3e-6, equal_nan=True)


def test_scores_beyond_every_number_end_in_the_softcap():
    step = paged_step([1, 6], [9, 20], heads=2, kv_heads=1, head_dim=8, device=DEVICE)
    step.q.mul_(1e4)
    _, got = attend(step, softcap=30.0)
    close(got, step, softcap=30.0)


def test_inputs_that_do_not_fit_the_plan_are_refused():
    step = paged_step([1], [5], heads=4, kv_heads=2, head_dim=8, device=DEVICE)
    batch, _ = attend(step)
    with pytest.raises(ValueError, match="window 7"):
        paged_attention(step.q, step.cache, batch, scale=1.0, window=7)
    for q, cache in (
        (step.q[:, :2], step.cache),
        (step.q.half(), step.cache),
        (step.q, step.cache[..., :4]),
        (step.q.repeat(2, 1, 1), step.cache),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            paged_attention(q, cache, batch, scale=1.0)
