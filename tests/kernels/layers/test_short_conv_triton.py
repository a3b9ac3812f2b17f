"""Short convolutions in Triton: torch's numbers, and the same bits in any step."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from loraplex.kernels.attention.kernel import AttentionNeeds
from loraplex.kernels.attention.previous import previous_slots
from loraplex.kernels.attention.triton_kernel import TritonAttention
from loraplex.kernels.attention.triton_plan import AttentionCapacity
from loraplex.kernels.attention.triton_tiling import AttentionShape
from loraplex.kernels.layers import short_conv, triton_short_conv
from support.kernels.poison import poison_new_memory
from support.kernels.triton_interpreter import repair_bfloat16

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CHANNELS, WIDTH, BLOCKS = 24, 4, 9
TABLES = ([7, 2, 4], [3, 8, 1])
LENGTHS = (41, 37)

pytestmark = pytest.mark.usefixtures("quick_interpreter")


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    poison_new_memory(monkeypatch)
    if DEVICE.type == "cpu":
        repair_bfloat16(monkeypatch)


def kernel() -> TritonAttention:
    """Of a model whose first group of layers has convolutions alone."""
    shape = AttentionShape(2, 1, 16, 16)
    needs = AttentionNeeds(shape, groups=((), ((shape, None),)), previous=(WIDTH - 1, 0))
    return TritonAttention(needs, torch.float32, DEVICE)


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def spoilt_cache(dtype):
    return torch.full((BLOCKS, 2, 16, 2, 1, CHANNELS // 2), float("nan"), dtype=dtype, device=DEVICE)[:, 1]


def expected(gates, dtype, bias):
    """Of a sequence alone, by torch."""
    count, table = len(gates), list(range(3))
    slots = torch.arange(count)
    previous = torch.from_numpy(previous_slots([count], [count], [0], table, WIDTH - 1))
    cache = torch.full((3, 16, CHANNELS), float("nan"), dtype=dtype)
    weight = draw(WIDTH, CHANNELS, seed=9).cpu()
    return short_conv.short_conv(
        gates.cpu(), cache, slots, previous, weight, bias if bias is None else bias.cpu()
    )


@pytest.mark.parametrize(
    ("dtype", "has_bias"), [(torch.float32, False), (torch.bfloat16, True), (torch.float16, False)], ids=str
)
def test_steps_of_any_rows_give_what_torch_gives(dtype, has_bias):
    """And have the same bits, in blocks full of NaN: two sequences, or two slices of one, in random cuts."""
    attention, weight = kernel(), draw(WIDTH, CHANNELS, seed=9)
    bias = draw(CHANNELS, seed=8) if has_bias else None
    given = [draw(length, 3 * CHANNELS, dtype=dtype, seed=n) for n, length in enumerate(LENGTHS)]
    found = []
    for seed in range(4):
        rng, cache = random.Random(seed), spoilt_cache(dtype)
        done, outs = [0, 0], [[], []]
        while any(done[n] < LENGTHS[n] for n in (0, 1)):
            slices = []
            for n in rng.sample((0, 1), 2):
                for _ in range(rng.choice((1, 2))):
                    count = min(rng.choice((1, 1, 3, 16, 20)), LENGTHS[n] - done[n])
                    if count:
                        slices.append((n, done[n], done[n] + count))
                        done[n] += count
            rng.shuffle(slices)
            batch = attention.lay_out(
                [end - start for _, start, end in slices],
                [end for *_, end in slices],
                [TABLES[n] for n, *_ in slices],
            )
            gates = torch.cat([given[n][start:end] for n, start, end in slices])
            wide = torch.cat((gates, gates), 1)[:, : 3 * CHANNELS]
            previous = attention.previous_slots(batch, WIDTH - 1)
            out = triton_short_conv.short_conv(wide, cache, batch.slots, previous, weight, bias)
            parts = out.split([end - start for _, start, end in slices])
            for (n, start, _), part in zip(slices, parts, strict=True):
                outs[n].append((start, part))
        found.append([torch.cat([part for _, part in sorted(own, key=lambda p: p[0])]) for own in outs])
    tolerance = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    for n, whole in enumerate(found[0]):
        torch.testing.assert_close(
            whole.cpu(), expected(given[n], dtype, bias), atol=tolerance, rtol=tolerance
        )
        assert all(torch.equal(other[n], whole) for other in found[1:])


def test_padding_of_a_recorded_step_is_kept_nowhere():
    attention = kernel()
    (layout,) = attention.layouts([AttentionCapacity(5, 2, 8, 5)], [0])
    host = np.full(layout.num_ints, 1 << 20, np.int32)
    device = torch.from_numpy(host).to(DEVICE)
    batch, _ = layout.lay_out(host, device, [2], [18], [TABLES[0]], recorded=True)
    device.copy_(torch.from_numpy(host))
    cache = spoilt_cache(torch.float32).fill_(0)
    gates = draw(5, 3 * CHANNELS)
    triton_short_conv.short_conv(
        gates, cache, batch.slots, batch.previous(2), draw(3, CHANNELS, seed=9), None
    )
    written = cache.flatten(2).abs().sum(2).nonzero().tolist()
    assert written == [[2, 0], [2, 1]]
    layout.lay_out(host, device, [], [], [], recorded=True)
    assert (host[layout.plan.previous_offset :][:15] == -1).all()


def test_operands_that_do_not_fit_are_refused():
    gates, cache = draw(2, 3 * CHANNELS), spoilt_cache(torch.float32)
    slots, previous = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 3, dtype=torch.int32)
    for bad in (
        {"gates": gates.half()},
        {"weight": draw(3, CHANNELS)},
        {"slots": slots[:1]},
        {"cache": cache[..., :4]},
    ):
        given = {
            "gates": gates, "cache": cache, "slots": slots, "previous": previous, "weight": draw(WIDTH, CHANNELS),
        } | bad  # fmt: skip
        with pytest.raises(ValueError, match="do not fit"):
            triton_short_conv.short_conv(**given, bias=None)
