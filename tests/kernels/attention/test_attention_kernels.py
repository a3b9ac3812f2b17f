"""Every attention kernel through its seam: laid out, written and computed, against the formula in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from loraplex.kernels.attention.choice import AttentionUnavailable
from loraplex.kernels.attention.kernel import AttentionKernel, AttentionNeeds, RecordableAttention
from loraplex.kernels.attention.triton_plan import AttentionCapacity
from loraplex.kernels.attention.triton_tiling import AttentionShape
from loraplex.kernels.backend import make_kernels
from support.kernels.kv_write import write_kv
from support.kernels.paged import PagedStep, expected_attention, paged_step
from support.kernels.poison import poison_new_memory

CPU = torch.device("cpu")
KERNELS = {
    "torch alone": ("torch", "auto"),
    "numba": ("numba", "auto"),
    "triton": ("triton", "triton"),
    "torch": ("triton", "torch"),
}
LACKS = {"torch": {"window", "softcap"}}
"""Features of a model that a kernel has not."""
STEPS = {
    "mix": ([1, 2, 1, 37, 18, 1, 5], [1, 2, 39, 37, 50, 16, 85]),
    "decode": ([1, 1, 1, 1], [1, 16, 17, 70]),
    "prompts": ([19, 33, 7], [19, 33, 7]),
    "chunks with a past": ([20, 6], [36, 70]),
    "one row": ([1], [1]),
    "one chunk": ([17], [17]),
    "empty": ([], []),
}

pytestmark = pytest.mark.usefixtures("quick_interpreter")
every_kernel = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "numba" else ()) for name in KERNELS]
)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    poison_new_memory(monkeypatch)
    torch.set_num_threads(1)


def needs_of(step: PagedStep, *, window=None, softcap=None) -> AttentionNeeds:
    _, block_size, _, kv_heads, head_dim = step.cache.shape
    shape = AttentionShape(step.q.shape[1], kv_heads, head_dim, block_size)
    return AttentionNeeds(shape, tuple(dict.fromkeys((None, window))), softcap is not None)


def choose(name: str, needs: AttentionNeeds, dtype=torch.float32, **options) -> AttentionKernel:
    backend, choice = KERNELS[name]
    return make_kernels(backend, CPU, **options).choose_attention(choice, needs, dtype).kernel


def fill(kernel: AttentionKernel, step: PagedStep, *, gap: int = 0) -> tuple[torch.Tensor, object]:
    """A cache with the past and the step's own K and V, in the kernel's order; and the step's batch. Blocks have `gap`
    elements before them."""
    empty = 0.0 if kernel.reads_unwritten else float("nan")
    size = step.cache[0].numel()
    memory = torch.full((len(step.cache), gap + size), empty, dtype=step.cache.dtype)
    cache = memory[:, gap:].view(step.cache.shape)
    past = [length - count for count, length in zip(step.num_rows, step.seq_lens, strict=True)]
    new = [
        (
            past,
            past,
            [torch.stack((k[:p], v[:p]), 1) for k, v, p in zip(step.keys, step.values, past, strict=True)],
        ),
        (
            step.num_rows,
            step.seq_lens,
            [torch.stack((k[p:], v[p:]), 1) for k, v, p in zip(step.keys, step.values, past, strict=True)],
        ),
    ]
    batch = None
    for counts, lens, kv in new:
        there = [i for i, count in enumerate(counts) if count or counts is step.num_rows]
        batch = kernel.lay_out(
            [counts[i] for i in there], [lens[i] for i in there], [step.tables[i] for i in there]
        )
        if there:
            write_kv(kernel, torch.cat([kv[i] for i in there]), cache, batch)
    return cache, batch


def close(got, step, **options):
    tolerance = {torch.float32: 1e-5, torch.float16: 3e-3}[step.q.dtype]
    assert got.dtype is step.q.dtype
    assert got.is_contiguous()
    want = expected_attention(step, scale=0.3, **options)
    torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)


@every_kernel
@pytest.mark.parametrize("kind", STEPS)
def test_steps_equal_the_formula(name, kind):
    num_rows, seq_lens = STEPS[kind]
    step = paged_step(num_rows, seq_lens, heads=6, kv_heads=2, head_dim=16, block_size=16)
    kernel = choose(name, needs_of(step))
    cache, batch = fill(kernel, step)
    assert batch.slots.shape == (sum(num_rows),)
    close(kernel.run(step.q, cache, batch, scale=0.3, window=None, softcap=None), step)


@every_kernel
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window", "softcap"),
    [
        (2, 2, 8, None, None),
        (7, 1, 64, None, None),
        (14, 2, 96, None, None),
        (4, 2, 16, 1, None),
        (4, 2, 16, 33, None),
        (4, 1, 16, None, 1.5),
        (4, 2, 16, 9, 2.0),
    ],
)
def test_sizes_windows_and_softcaps(name, heads, kv_heads, head_dim, window, softcap):
    """What a kernel lacks makes it unavailable, with the reason."""
    num_rows, seq_lens = STEPS["mix"]
    step = paged_step(num_rows, seq_lens, heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=16)
    needs = needs_of(step, window=window, softcap=softcap)
    wanted = {kind for kind, of in (("window", window), ("softcap", softcap)) if of is not None}
    if wanted & LACKS.get(name, set()):
        with pytest.raises(AttentionUnavailable, match="window" if window else "softcap"):
            choose(name, needs)
        return
    kernel = choose(name, needs)
    cache, batch = fill(kernel, step)
    close(
        kernel.run(step.q, cache, batch, scale=0.3, window=window, softcap=softcap),
        step,
        window=window,
        softcap=softcap,
    )


@every_kernel
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (9, None), (33, 2.0)])
def test_sinks_are_scores_of_no_value(name, window, softcap):
    """Of several parts of a long context too."""
    step = paged_step([1, 1, 20, 1], [700, 3, 90, 40], heads=6, kv_heads=2, head_dim=16, block_size=16)
    needs = replace(needs_of(step, window=window, softcap=softcap), has_sinks=True)
    if name in LACKS:
        with pytest.raises(AttentionUnavailable, match="window" if window else "sinks"):
            choose(name, needs)
        return
    kernel = choose(name, needs)
    cache, batch = fill(kernel, step)
    # One that takes nearly all, one that takes nothing.
    sinks = torch.tensor([0.3, -2.0, 40.0, 1.5, -torch.inf, 4.0])
    options = {"window": window, "softcap": softcap, "sinks": sinks}
    close(kernel.run(step.q, cache, batch, scale=0.3, **options), step, **options)


@every_kernel
def test_blocks_may_lie_apart(name):
    """As those of a layer that shares a place of a block with others of its group."""
    step = paged_step(*STEPS["mix"], heads=4, kv_heads=2, head_dim=16, block_size=16)
    kernel = choose(name, needs_of(step))
    cache, batch = fill(kernel, step, gap=96)
    close(kernel.run(step.q, cache, batch, scale=0.3, window=None, softcap=None), step)
    memory = cache.as_strided((len(cache), 96), (cache.stride(0), 1), 0)
    assert bool(((memory == 0) | memory.isnan()).all())


@every_kernel
def test_queries_are_a_view_of_wider_rows(name):
    num_rows, seq_lens = STEPS["mix"]
    step = paged_step(num_rows, seq_lens, heads=4, kv_heads=2, head_dim=16, block_size=16)
    kernel = choose(name, needs_of(step))
    cache, batch = fill(kernel, step)
    wide = torch.randn(len(step.q), 8, 16)
    wide[:, :4] = step.q
    close(kernel.run(wide[:, :4], cache, batch, scale=0.3, window=None, softcap=None), step)


@pytest.mark.parametrize("name", ["triton", "torch"])
def test_float16(name):
    num_rows, seq_lens = STEPS["mix"]
    step = paged_step(
        num_rows, seq_lens, heads=4, kv_heads=2, head_dim=64, block_size=16, dtype=torch.float16
    )
    kernel = choose(name, needs_of(step), torch.float16)
    cache, batch = fill(kernel, step)
    close(kernel.run(step.q, cache, batch, scale=0.3, window=None, softcap=None), step)


@pytest.mark.parametrize("name", ["triton", "torch"])
def test_one_array_holds_any_step_recorded_or_not(name):
    """A batch over one place in memory: the recorded one computes whatever was laid out there last, and the rows of
    padding are 0; others in turns with it."""
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 16, "block_size": 16}
    decoding = paged_step([1, 1, 1], [1, 16, 70], **sizes, seed=1)
    mix = paged_step(*STEPS["mix"], **sizes, seed=2)
    later = paged_step([1], [40], **sizes, seed=3)
    kernel = choose(name, needs_of(decoding))
    assert isinstance(kernel, RecordableAttention)
    large, small = kernel.layouts([AttentionCapacity(90, 8, 80, 64), AttentionCapacity(4, 4, 40, 1)])
    most = max(large.num_ints, small.num_ints)
    host, device = np.full(most, 1 << 30, dtype=np.int32), torch.full((most,), 1 << 30, dtype=torch.int32)
    for step, layout, capacity in (
        (decoding, small, 4),
        (mix, large, None),
        (later, small, 4),
        (mix, large, 90),
        (later, large, None),
        (decoding, large, 90),
    ):
        cache, _ = fill(kernel, step)
        batch, used = layout.lay_out(
            host[: layout.num_ints], device[: layout.num_ints], step.num_rows, step.seq_lens, step.tables,
            recorded=capacity is not None,
        )  # fmt: skip
        device[:used] = torch.from_numpy(host[:used])
        real = len(step.q)
        q = torch.full((capacity or real, 4, 16), float("nan"))
        q[:real] = step.q
        replayed = [layout.recorded_batch(device[: layout.num_ints])] if capacity else []
        for one in (batch, *replayed):
            got = kernel.run(q, cache, one, scale=0.3, window=None, softcap=None)
            close(got[:real].contiguous(), step)
            assert (got[real:] == 0).all()
            assert (one.slots[real:] == -1).all()


@pytest.mark.parametrize("recorded", [False, True])
def test_a_step_is_laid_out_for_each_group_of_layers_by_itself(recorded):
    """Of several sizes and windows: a group of layers that read one memory with two windows, and one of two sizes."""
    small, large = AttentionShape(6, 2, 16, 16), AttentionShape(4, 1, 32, 16)
    groups = (((small, 9), (small, None)), ((large, None), (small, 20)))
    needs = AttentionNeeds(small, (9, None, 20), groups=groups)
    kernel = choose("triton", needs)
    num_rows, seq_lens = STEPS["decode" if recorded else "mix"]
    rows = sum(num_rows)
    capacity = AttentionCapacity(rows, len(num_rows), 80, 1 if recorded else 64)
    for layout, kinds in zip(kernel.layouts([capacity] * 2, [0, 1]), groups, strict=True):
        host = np.full(layout.num_ints, 1 << 30, dtype=np.int32)
        device = torch.from_numpy(host)
        batch = None
        for shape, window in kinds:
            step = paged_step(
                num_rows, seq_lens, heads=shape.num_heads, kv_heads=shape.num_kv_heads, head_dim=shape.head_dim,
                block_size=16,
            )  # fmt: skip
            cache, _ = fill(kernel, step)
            batch, used = layout.lay_out(host, device, num_rows, seq_lens, step.tables, recorded=recorded)
            host[used:] = 1 << 30
            if recorded:
                batch = layout.recorded_batch(device)
            assert batch.slots.shape == (rows,)
            close(
                kernel.run(step.q, cache, batch, scale=0.3, window=window, softcap=None), step, window=window
            )


def test_only_chunks_go_to_torch(monkeypatch):
    calls = []
    true = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        "loraplex.kernels.attention.torch_prompts.scaled_dot_product_attention",
        lambda *args, **kwargs: calls.append(args[0].shape[2]) or true(*args, **kwargs),
    )
    for kind, chunks in (("decode", []), ("mix", [37, 18, 5])):
        step = paged_step(*STEPS[kind], heads=8, kv_heads=2, head_dim=16, block_size=16)
        kernel = choose("torch", needs_of(step))
        cache, batch = fill(kernel, step)
        # Triton has no work for what torch computes.
        work = batch.counts[None]
        assert work.prefill == 0
        assert work.decode
        calls.clear()
        kernel.run(step.q, cache, batch, scale=0.3, window=None, softcap=None)
        assert calls == chunks


SHAPE = AttentionShape(8, 2, 64, 16)
NEEDS = AttentionNeeds(SHAPE)


@pytest.mark.parametrize(
    ("choice", "backend", "changes", "options", "reason"),
    [
        ("torch", "triton", {"windows": (None, 512)}, {}, "sliding windows"),
        ("torch", "triton", {"has_softcap": True}, {}, "softcap"),
        ("torch", "triton", {"shape": AttentionShape(8, 2, 264, 16)}, {}, "264"),
        ("torch", "triton", {}, {"batch_invariant": True}, "--batch-invariant"),
        ("torch", "triton", {"shape": AttentionShape(8, 2, 60, 16)}, {}, "60"),
        (
            "torch",
            "triton",
            {"groups": (((SHAPE, None), (AttentionShape(8, 1, 64, 16), None)),)},
            {},
            "one size",
        ),
        ("torch", "numba", {}, {}, "numba"),
        ("triton", "numba", {}, {}, "beside Triton's kernels"),
        ("triton", "torch", {}, {}, "beside Triton's kernels"),
        ("fastest", "triton", {}, {}, "there is no 'fastest' attention"),
    ],
)
def test_an_unavailable_choice_is_refused_with_the_reason(choice, backend, changes, options, reason):
    with pytest.raises(AttentionUnavailable, match=reason):
        make_kernels(backend, CPU, **options).choose_attention(
            choice, replace(NEEDS, **changes), torch.float32
        )


def test_the_choice_tells_what_was_chosen_and_why_not_the_others():
    triton = make_kernels("triton", CPU)
    found = triton.choose_attention("auto", NEEDS, torch.float32)
    assert (found.name, found.kernel.name) == ("triton", "triton")
    assert "--attention torch would run too" in found.reason
    windows = replace(NEEDS, windows=(None, 512))
    found = triton.choose_attention("auto", windows, torch.float32)
    assert "sliding windows" in found.reason
    assert triton.choose_attention("torch", NEEDS, torch.float32).reason == "as was asked for"
    for backend in ("numba", "torch"):
        assert make_kernels(backend, CPU).choose_attention("auto", NEEDS, torch.float32).name == backend
