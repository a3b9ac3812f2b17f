"""Arenas made by hand, without files: any ranks, sites, experts and vectors, at scattered places, on any device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from loraplex.kernels.experts.lora_types import ExpertLoraWeights, ExpertSiteGroup, tile_height
from loraplex.kernels.experts.types import ExpertRows
from loraplex.kernels.lora.site_groups import HEAD, SiteGroup
from loraplex.kernels.lora.types import CHUNK, GRANULE_BYTES, LoraWeights, Segment

Rank = int | Mapping[str, int]


def everything(_slot: int, _layer: int, _site: str) -> bool:
    return True


@dataclass(frozen=True)
class ManualArena:
    """`weights`, and the formula in float64 over what lies there."""

    weights: LoraWeights

    def expected(
        self, layer: int, group: SiteGroup, segments: Sequence[Segment], x: torch.Tensor, y: torch.Tensor
    ) -> torch.Tensor:
        """What `LoraPass.apply` must make of y, in float64."""
        out = y.double()
        for slot, first, count in segments:
            if slot < 0:
                continue
            rows = slice(first, first + count)
            begin = 0
            for site, width in zip(group.sites, group.out_features, strict=True):
                columns = slice(begin, begin + width)
                begin += width
                found = self.site(slot, layer, site, group.in_features, width)
                if found is None:
                    continue
                a, b, vectors = found
                if vectors is not None:
                    out[rows, columns] += out[rows, columns] * vectors[0] + vectors[1]
                out[rows, columns] += x[rows].double() @ a.T @ b
        return out

    def site(
        self, slot: int, layer: int, site: str, in_features: int, out_features: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None:
        """A [R, K], B [R, N] and the vectors [2, N] or None, in float64; None where there are none."""
        number = [name for group in self.weights.groups for name in group.sites].index(site)
        tiles = self.weights.tables[slot, :-1, layer, number]
        tiles = tiles[tiles[:, 0] > 0]
        if not len(tiles):
            return None
        flat = self.weights.storage
        granule = GRANULE_BYTES // flat.element_size()

        def read(start: int, width: int) -> torch.Tensor:
            return flat[start * granule : start * granule + CHUNK * width].view(CHUNK, width).double()

        a = torch.cat([read(int(start), in_features) for start in tiles[:, 0]])
        b = torch.cat([read(int(start), out_features) for start in tiles[:, 1]])
        at = int(self.weights.vectors[slot, layer, number]) * GRANULE_BYTES // 4
        vectors = flat.view(torch.float32)[at : at + 2 * out_features].view(2, out_features).double()
        return a, b, vectors if at else None


def make_arena(
    groups: Sequence[SiteGroup],
    num_layers: int,
    dtype: torch.dtype,
    ranks: Sequence[Rank],
    *,
    max_rank: int | None = None,
    has: Callable[[int, int, str], bool] = everything,
    dora: Collection[int] = (),
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> ManualArena:
    """One adapter a slot, of these ranks (rounded up to whole chunks); a rank of 0 leaves the slot empty. `has`
    (slot, layer, site) says which sites each has, `dora` which slots have vectors too. Tiles lie in random order with
    gaps; all that no tile covers is NaN, except the zeros at the beginning."""
    rng = np.random.default_rng(seed)
    sites = [
        (group, site, width)
        for group in groups
        for site, width in zip(group.sites, group.out_features, strict=True)
    ]
    chunks = [
        [
            -(-(rank if isinstance(rank, int) else rank.get(site, 0)) // CHUNK) if rank else 0
            for _, site, _ in sites
        ]
        for rank in ranks
    ]
    max_chunks = max(*map(max, chunks), -(-(max_rank or 0) // CHUNK))
    size = dtype.itemsize
    granule = GRANULE_BYTES // size
    shape = (len(ranks), num_layers, len(sites))
    tables = np.zeros((shape[0], max_chunks + 1, *shape[1:], 2), np.int32)
    vectors = np.zeros(shape, np.int32)
    present = np.zeros(shape, np.bool_)
    # (index in tables or vectors, columns), in the order in which they will lie
    tiles: list[tuple[tuple[int, ...], int]] = []
    for slot, layer, number in np.ndindex(*shape):
        group, site, width = sites[number]
        if not chunks[slot][number] or not has(slot, layer, site):
            continue
        present[slot, layer, number] = True
        for chunk in range(chunks[slot][number]):
            if group.key != HEAD or number == 0:  # the head's blocks share one A
                tiles.append(((slot, chunk, layer, number, 0), group.in_features))
            tiles.append(((slot, chunk, layer, number, 1), width))
        if slot in dora:
            tiles.append(((slot, layer, number), width))
    largest = max((CHUNK * width * size for _, width in tiles), default=0)
    start = -(-largest // GRANULE_BYTES)
    places = []
    for at in rng.permutation(len(tiles)).tolist():
        index, width = tiles[at]
        into = vectors if len(index) == 3 else tables
        into[index] = start
        num_bytes = 2 * 4 * width if into is vectors else CHUNK * width * size
        places.append((start, index, width))
        start += -(-num_bytes // GRANULE_BYTES) + int(rng.integers(0, 3))
    storage = torch.full((start * granule,), float("nan"), dtype=dtype, device=device)
    storage[: -(-largest // size)] = 0
    generator = torch.Generator(device=device).manual_seed(seed)
    floats = storage.view(torch.float32)
    for first, index, width in places:
        if len(index) == 3:
            tile = floats[first * GRANULE_BYTES // 4 :][: 2 * width]
            tile.normal_(0, 0.3, generator=generator)
        else:
            tile = storage[first * granule :][: CHUNK * width]
            tile.normal_(0, width**-0.5 if index[-1] == 0 else 0.3, generator=generator)
    for number, (group, _, _) in enumerate(sites):
        if group.key == HEAD and number:
            tables[:, :, :, number, 0] = tables[:, :, :, 0, 0] * present[:, None, :, number]
    num_chunks = (tables[..., 0] > 0).sum(axis=1).max(axis=(1, 2)).astype(np.int32)
    return ManualArena(LoraWeights(storage, tuple(groups), tables, num_chunks, present, vectors))


def lengths(slots_and_rows: Sequence[tuple[int, int]]) -> list[Segment]:
    """Segments one behind the other, each of a slot and its number of rows."""
    segments, first = [], 0
    for slot, count in slots_and_rows:
        segments.append((slot, first, count))
        first += count
    return segments


def decode(slots: Sequence[int]) -> list[Segment]:
    """A row a sequence."""
    return lengths([(slot, 1) for slot in slots])


def expert_groups(
    hidden: int, width: int, experts: int, layers: Sequence[int]
) -> tuple[ExpertSiteGroup, ExpertSiteGroup]:
    """The groups of a mixture of these sizes."""
    columns = ((0, width), (width, 2 * width), (0, 2 * width))
    sites = ("gate", "up", "gate_up")
    return (
        ExpertSiteGroup("experts.gate_up", sites, hidden, columns, experts, tuple(layers)),
        ExpertSiteGroup("experts.down", ("down",), width, ((0, hidden),), experts, tuple(layers)),
    )


@dataclass(frozen=True)
class ManualExpertArena:
    """`weights`, and the formula in float64 over what lies there."""

    weights: ExpertLoraWeights

    def expected(
        self,
        layer: int,
        group: ExpertSiteGroup,
        segments: Sequence[Segment],
        x: torch.Tensor,
        y: torch.Tensor,
        rows: ExpertRows,
    ) -> torch.Tensor:
        """What `ExpertLoraPass.apply` must make of y, in float64, place by place."""
        out, starts = y.double(), rows.starts.tolist()
        slot_of = {row: slot for slot, first, count in segments for row in range(first, first + count)}
        for place, row in enumerate(rows.row_of.tolist()):
            expert = next(e for e in range(group.num_experts) if starts[e] <= place < starts[e + 1])
            slot = slot_of.get(row, -1)
            for site, (begin, end) in zip(group.sites, group.columns, strict=True):
                for a, b in self.chunks(slot, layer, site, expert) if slot >= 0 else ():
                    out[place, begin:end] += x[place].double() @ a.T @ b
        return out

    def chunks(
        self, slot: int, layer: int, site: str, expert: int
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """A [height, K] and B [height, N] of each chunk, in float64."""
        all_sites = [
            (name, each.in_features, end - begin)
            for each in self.weights.groups
            for name, (begin, end) in zip(each.sites, each.columns, strict=True)
        ]
        number = [name for name, _, _ in all_sites].index(site)
        height, flat, found = int(self.weights.heights[slot, layer, number]), self.weights.storage, []
        for tiles in self.weights.tables[slot, layer, number, expert].tolist():
            if tiles[0] == 0:
                break
            at = [offset * GRANULE_BYTES // flat.element_size() for offset in tiles]
            a, b = (
                flat[first : first + height * width].view(height, width).double()
                for first, width in zip(at, all_sites[number][1:], strict=True)
            )
            found.append((a, b))
        return found


def make_expert_arena(
    groups: Sequence[ExpertSiteGroup],
    num_layers: int,
    dtype: torch.dtype,
    ranks: Sequence[Mapping[str, int]],
    *,
    untrained: Collection[tuple[int, int]] = (),
    shared_a: Collection[int] = (),
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> ManualExpertArena:
    """One adapter a slot: the rank of each site that it has. `untrained` (slot, expert) have no tiles; in slots of
    `shared_a` all experts have one A. Tiles lie in random order with gaps; all that no tile covers is NaN."""
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    sites = [
        (group, name, end - begin)
        for group in groups
        for name, (begin, end) in zip(group.sites, group.columns, strict=True)
    ]
    most = max(-(-rank // tile_height(rank)) for own in ranks for rank in own.values())
    shape = (len(ranks), num_layers, len(sites))
    tables = np.zeros((*shape, groups[0].num_experts, most + 1, 2), np.int32)
    heights = np.zeros(shape, np.int32)
    tiles: list[tuple[list[tuple[int, ...]], torch.Tensor]] = []
    for slot, layer, number in np.ndindex(*shape):
        group, name, outputs = sites[number]
        rank = ranks[slot].get(name, 0)
        if not rank or layer not in group.layers:
            continue
        height = heights[slot, layer, number] = tile_height(rank)
        trained = [expert for expert in range(group.num_experts) if (slot, expert) not in untrained]
        owners = [trained] if slot in shared_a else [[expert] for expert in trained]
        for first in range(0, rank, height):
            for side, width, experts in (
                *((0, group.in_features, own) for own in owners),
                *((1, outputs, [expert]) for expert in trained),
            ):
                tile = torch.zeros(height, width)
                drawn = torch.randn(min(height, rank - first), width, generator=generator)
                tile[: len(drawn)] = drawn * (width**-0.5 if side == 0 else 0.3)
                places = [(slot, layer, number, expert, first // height, side) for expert in experts]
                tiles.append((places, tile.to(dtype)))
    granule, start, where = GRANULE_BYTES // dtype.itemsize, 1, []
    for at in rng.permutation(len(tiles)).tolist():
        places, tile = tiles[at]
        for place in places:
            tables[place] = start
        where.append((start * granule, tile.flatten()))
        start += -(-tile.numel() // granule) + int(rng.integers(0, 3))
    storage = torch.full((start * granule,), float("nan"), dtype=dtype)
    for begin, numbers in where:
        storage[begin : begin + len(numbers)] = numbers
    slot_of = np.where(heights.any((1, 2)), np.arange(len(ranks)), -1).astype(np.int32)
    return ManualExpertArena(ExpertLoraWeights(storage.to(device), tuple(groups), slot_of, tables, heights))
