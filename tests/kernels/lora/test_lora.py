"""The batched LoRA kernel against the plain formula, over every kind of batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from loraplex.adapters.device.layout import ArenaLayout
from loraplex.kernels.backend import BackendUnavailable, resolve_kernels
from loraplex.kernels.lora.packing import pack_rows
from support.adapters.lora_zoo import GROUPS, ODD_GROUPS, OpCounter, Zoo, make_adapter
from support.kernels.lora_arena import decode, lengths
from support.kernels.lora_reference import lora_reference

LAYERS = 3
RANKS = (1, 3, 8, 9, 16, 24, 33, 64)

Segments = list[tuple[int, int, int]]


@pytest.fixture(scope="module")
def zoos(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Zoo]:
    """Sixteen adapters of ranks 1 to 64; some lack sites or layers, some have a rank for each site."""
    root: Path = tmp_path_factory.mktemp("zoo")
    made = {}
    for name, groups, dtype in (
        ("float32", GROUPS, torch.float32),
        ("bfloat16", GROUPS, torch.bfloat16),
        ("odd", ODD_GROUPS, torch.float32),
    ):
        layout = ArenaLayout(
            groups, LAYERS, dtype, max_rank=64, page_bytes=64 * 101 if name == "odd" else None
        )
        sites = [site for group in groups for site in group.sites]
        adapters = []
        for seed in range(16):
            rank = RANKS[seed % len(RANKS)]
            adapters.append(
                make_adapter(
                    root / f"{name}-{seed}",
                    groups,
                    rank={site: 1 + (seed * 7 + i * 11) % 40 for i, site in enumerate(sites)}
                    if seed == 12
                    else rank,
                    layers=[0, 2] if seed % 5 == 4 else range(LAYERS),
                    sites=sites[seed % 3 :: 3] if seed % 4 == 3 else None,
                    seed=seed,
                )
            )
        made[name] = Zoo(layout, adapters)
    return made


def zipf(rows: int) -> list[int]:
    rng = np.random.default_rng(5)
    weights = 1 / np.arange(1, 17)
    return [int(slot) for slot in rng.choice(16, size=rows, p=weights / weights.sum())]


BATCHES: dict[str, Segments] = {
    "one row": decode([5]),
    "distinct": decode(list(range(16))),
    "identical": decode([4] * 24),
    "uniform": decode([row % 8 for row in range(64)]),
    "zipf": decode(zipf(48)),
    "skewed": decode([7] * 40 + [0, 1, 2, 3]),
    "with base rows": decode([-1, 3, -1, -1, 7, 0, -1]),
    "mostly base": decode([-1] * 60 + [15] + [-1] * 3),
    "highest and lowest rank": decode([7, 0, 0, 0, 8, 7, 0]),
    "one prefill": lengths([(7, 300)]),
    "prefill and decode": lengths(
        [(6, 131), (1, 1), (-1, 1), (2, 1), (6, 1), (-1, 57), (3, 64), (12, 5), (11, 1)]
    ),
    "the same adapter in parts": lengths([(2, 9), (5, 3), (2, 1), (-1, 4), (2, 30)]),
    "adapters without some sites": decode([3, 7, 11, 15, 3]),
    "ragged": lengths([(slot, 1 + slot * 3 % 11) for slot in range(16)]),
}


def run(zoo: Zoo, segments: Segments, dtype: torch.dtype, seed: int = 0) -> tuple[list[tuple], int]:
    """[(group, layer, x, y before, y after)] of every group in every layer."""
    num_rows = sum(count for _, _, count in segments)
    generator = torch.Generator().manual_seed(seed)
    lora = zoo.arena.lora_pass(segments, num_rows)
    runs = []
    for layer in range(LAYERS):
        for group in zoo.layout.groups:
            x = torch.randn(num_rows, group.in_features, generator=generator).to(dtype)
            y = torch.randn(num_rows, sum(group.out_features), generator=generator).to(dtype)
            after = y.clone()
            if lora is not None:
                lora.apply(layer, group.key, x, after)
            runs.append((group, layer, x, y, after))
    return runs, num_rows


def rows_of(zoo: Zoo, segments: Segments, layer: int) -> list:
    rows: list = []
    for slot, _, count in sorted(segments, key=lambda segment: segment[1]):
        rows += [None if slot < 0 else zoo.adapters[slot].in_layer(layer)] * count
    return rows


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", ["float32", "odd"])
def test_equals_the_formula_in_float32(zoos: dict[str, Zoo], name: str, batch: str) -> None:
    zoo, segments = zoos[name], BATCHES[batch]
    for group, layer, x, y, after in run(zoo, segments, torch.float32)[0]:
        expected = lora_reference(x, y, group, rows_of(zoo, segments, layer))
        assert (after - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("batch", BATCHES)
def test_bfloat16_is_nearer_to_float64_than_peft_is(zoos: dict[str, Zoo], batch: str) -> None:
    """PEFT rounds A·x, B·(A·x), its product with the scaling and the sum, each to bfloat16."""
    zoo, segments = zoos["bfloat16"], BATCHES[batch]
    ours = theirs = 0.0
    for group, layer, x, y, after in run(zoo, segments, torch.bfloat16)[0]:
        rows = rows_of(zoo, segments, layer)
        expected = lora_reference(x, y, group, rows)
        peft = y.clone()
        column = 0
        for site, width in zip(group.sites, group.out_features, strict=True):
            for t, adapter in enumerate(rows):
                if adapter is not None and site in adapter:
                    a, b, scaling = adapter[site]
                    peft[t, column : column + width] += (b.bfloat16() @ (a.bfloat16() @ x[t])) * scaling
            column += width
        ours += float((after.double() - expected).square().sum())
        theirs += float((peft.double() - expected).square().sum())
    assert ours <= theirs


def test_rows_of_the_base_model_stay_as_they_are(zoos: dict[str, Zoo]) -> None:
    segments = BATCHES["prefill and decode"]
    base = [row for slot, first, count in segments if slot < 0 for row in range(first, first + count)]
    for _, _, _, y, after in run(zoos["bfloat16"], segments, torch.bfloat16)[0]:
        assert torch.equal(y[base], after[base])


def test_base_rows_only_need_no_pass(zoos: dict[str, Zoo]) -> None:
    assert zoos["float32"].arena.lora_pass([(-1, 0, 5), (-1, 5, 1)], 6) is None
    assert zoos["float32"].arena.lora_pass([], 6) is None


def test_sites_and_layers_that_an_adapter_lacks_stay_as_they_are(zoos: dict[str, Zoo]) -> None:
    # Slot 4 lacks layer 1; slot 3 has every third site only.
    for group, layer, _, y, after in run(zoos["float32"], decode([4, 4]), torch.float32)[0]:
        assert torch.equal(y, after) == (layer == 1), group.key
    has = set(zoos["float32"].adapters[3].spec.targets)
    for group, _, _, y, after in run(zoos["float32"], decode([3, 8, -1]), torch.float32)[0]:
        column = 0
        for site, width in zip(group.sites, group.out_features, strict=True):
            same = torch.equal(y[0, column : column + width], after[0, column : column + width])
            assert same == (site not in has)
            column += width


def test_the_same_batch_gives_the_same_bits(zoos: dict[str, Zoo]) -> None:
    for segments in (BATCHES["uniform"], BATCHES["prefill and decode"]):
        first = run(zoos["bfloat16"], segments, torch.bfloat16)[0]
        zoos["bfloat16"].arena.lora_pass([(0, 0, 1)], 1)  # so that the next pass is built again
        again = run(zoos["bfloat16"], segments, torch.bfloat16)[0]
        assert all(torch.equal(one[4], other[4]) for one, other in zip(first, again, strict=True))


def test_a_neighbour_of_huge_weights_does_no_harm(tmp_path: Path) -> None:
    """Rows share blocks: what one adapter makes of another's row overflows, and must be masked, not multiplied."""
    layout = ArenaLayout(GROUPS, 1, torch.float32, max_rank=64)
    calm = make_adapter(tmp_path / "calm", GROUPS, rank=8, layers=[0], seed=1)
    wild = make_adapter(tmp_path / "wild", GROUPS, rank=8, layers=[0], seed=2, std=6e37, scaling=1e-3)
    wide = make_adapter(tmp_path / "wide", GROUPS, rank=64, layers=[0], seed=3)
    zoo = Zoo(layout, [calm, wild, wide])
    segments = decode([0, 1, 0, 1, 2, 0, 1])
    lora = zoo.arena.lora_pass(segments, 7)
    assert lora is not None
    group = GROUPS[0]
    x, y = torch.randn(7, group.in_features), torch.zeros(7, sum(group.out_features))
    x[3] = float("nan")
    lora.apply(0, group.key, x, y)
    calm_rows = [0, 2, 4, 5]
    rows = [zoo.adapters[slot].in_layer(0) for slot in (0, 0, 2, 0)]
    expected = lora_reference(x[calm_rows], torch.zeros_like(y[calm_rows]), group, rows)
    assert (y[calm_rows] - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_the_number_of_operations_depends_on_neither_adapters_nor_rows(zoos: dict[str, Zoo]) -> None:
    arena = zoos["float32"].arena
    full = [slot for slot in range(16) if slot % 4 != 3 and slot % 5 != 4]
    mixes = [
        decode([full[0]] * 16),
        decode((full * 4)[:16]),
        decode((full * 2)[:8] * 2),
        decode(full[:4] + [-1] * 12),
        lengths([(full[1], 200), (full[2], 1), (-1, 10), (full[3], 30)]),
        decode([full[0]]),
    ]
    counts = []
    for segments in mixes:
        num_rows = sum(count for _, _, count in segments)
        lora = arena.lora_pass(segments, num_rows)
        assert lora is not None
        inputs = [
            (layer, g.key, torch.zeros(num_rows, g.in_features), torch.zeros(num_rows, sum(g.out_features)))
            for layer in range(LAYERS)
            for g in GROUPS
        ]
        for args in inputs[: len(GROUPS)]:
            lora.apply(*args)  # the first use makes the buffers
        with OpCounter() as counter:
            for args in inputs:
                lora.apply(*args)
        counts.append(counter.ops)
    assert all(ops == counts[0] for ops in counts)
    # Four products of A and seven of B a layer, whatever the batch is.
    assert sum(n for op, n in counts[0].items() if "bmm" in op) == 11 * LAYERS


def test_operands_above_the_bound_are_used_in_parts(
    zoos: dict[str, Zoo], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(zoos["float32"], BATCHES["ragged"], torch.float32)[0]
    monkeypatch.setattr("loraplex.kernels.lora.reference.MAX_GATHER_BYTES", 100_000)
    parts = run(zoos["float32"], BATCHES["ragged"], torch.float32)[0]
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one[4], other[4], rtol=1e-5, atol=1e-5)


def test_low_ranks_are_not_padded_to_the_highest() -> None:
    """One adapter of rank 64 among fifteen of rank 8 costs their 23 chunks and one to fill the last block."""
    num_chunks = np.array([8] + [1] * 15, np.int32)
    packing = pack_rows({slot: [(slot, slot, 1)] for slot in range(16)}, num_chunks, 16)
    assert packing.num_blocks * packing.width == 24
    assert sorted(packing.row_lane) == sorted(set(packing.row_lane))
    many = pack_rows({0: [(0, 0, 512)]}, np.array([2], np.int32), 512)
    assert many.num_blocks * many.width <= 8


def test_bad_segments_are_refused(zoos: dict[str, Zoo]) -> None:
    arena = zoos["float32"].arena
    for segments in ([(0, 0, 3), (1, 2, 2)], [(0, 3, 2)], [(0, 0, 0)], [(0, -1, 2)]):
        with pytest.raises(ValueError, match="overlap"):
            arena.lora_pass(segments, 4)
    with pytest.raises(ValueError, match="slot 16 holds no adapter"):
        arena.lora_pass([(16, 0, 1)], 1)
    with pytest.raises(ValueError, match="slot 99 holds no adapter"):
        arena.lora_pass([(99, 0, 1)], 1)


def test_bad_shapes_are_refused(zoos: dict[str, Zoo]) -> None:
    lora = zoos["float32"].arena.lora_pass([(0, 0, 2)], 2)
    assert lora is not None
    with pytest.raises(ValueError, match="rows got"):
        lora.apply(0, "qkv", torch.zeros(3, 48), torch.zeros(3, 80))
    with pytest.raises(ValueError, match="rows got"):
        lora.apply(0, "qkv", torch.zeros(2, 40), torch.zeros(2, 80))


def test_backends_are_resolved_and_never_replaced_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert resolve_kernels("auto", cpu).backend == "numba"
    assert resolve_kernels("torch", cpu).backend == "torch"
    assert resolve_kernels("numba", cpu).backend == "numba"
    with pytest.raises(BackendUnavailable, match="for CPUs"):
        resolve_kernels("numba", torch.device("cuda"))
    assert resolve_kernels("triton", cpu).backend == "triton"  # interpreted, in tests
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert resolve_kernels("auto", cpu).backend == "numba"
    with pytest.raises(BackendUnavailable, match="the device is 'cpu'"):
        resolve_kernels("triton", cpu)
    with pytest.raises(BackendUnavailable, match="no 'cuda' kernels"):
        resolve_kernels("cuda", cpu)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert resolve_kernels("auto", cpu).backend == "torch"
    with pytest.raises(BackendUnavailable, match="numba is not installed"):
        resolve_kernels("numba", cpu)
