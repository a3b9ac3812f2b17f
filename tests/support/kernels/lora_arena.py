"""An adapter arena made by hand, without files: any ranks, sites and vectors, at scattered places, on any device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

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
