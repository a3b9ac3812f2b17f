"""Tiles of adapters on the routed experts of a mixture: which an adapter has, and how they lie.

A tile has as many ranks as `tile_height` says, so that an expert of rank 1 takes an eighth of what a linear's chunk
takes. An expert whose B is zero has none. Where all experts of a site have the same A, or the same B, its tiles lie
once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import torch

from loraplex.kernels.experts.lora_types import TILE_HEIGHTS, ExpertSiteGroup, tile_height
from loraplex.kernels.lora.dispatch import GRANULE_BYTES

Side = Literal["a", "b"]
SIDES: tuple[Side, Side] = ("a", "b")


class ExpertKey(NamedTuple):
    """The properties of a site of the experts of a layer that determine its tiles."""

    layer: int
    site: str
    ranks: tuple[int, ...]
    """The rank of each expert; 0 for one without effect."""
    one_a: bool
    """Whether all experts have the same A."""
    one_b: bool

    @property
    def height(self) -> int:
        """Ranks in each tile; 0 where no expert has any."""
        most = max(self.ranks)
        return tile_height(most) if most else 0

    def holder(self, side: Side, expert: int) -> int:
        """The expert whose tiles of this side are those of `expert`."""
        if self.one_a if side == "a" else self.one_b:
            return next(number for number, rank in enumerate(self.ranks) if rank)
        return expert


class ExpertTile(NamedTuple):
    """One tile: the number of its key, the expert that holds it, and its chunk of ranks."""

    key: int
    side: Side
    expert: int
    chunk: int
    features: int
    num_bytes: int


class ExpertLayout:
    """The sites of a model's experts, numbered through the groups in their order. gate_up has ranks up to twice
    `max_rank`, as PEFT makes one LoRA of gate and up; `max_chunks` are its tiles of the largest height."""

    def __init__(self, groups: Sequence[ExpertSiteGroup], dtype: torch.dtype, *, max_rank: int) -> None:
        self.groups = tuple(groups)
        self.num_experts = groups[0].num_experts
        self.max_rank = max_rank
        self.max_chunks = -(-2 * max_rank // TILE_HEIGHTS[-1])
        self._itemsize = dtype.itemsize
        self._sites = {
            site: (number, group, end - start)
            for number, (group, site, (start, end)) in enumerate(
                (group, site, columns)
                for group in groups
                for site, columns in zip(group.sites, group.columns, strict=True)
            )
        }

    @property
    def num_sites(self) -> int:
        return len(self._sites)

    def number(self, site: str) -> int:
        return self._sites[site][0]

    def shape(self, layer: int, site: str) -> tuple[int, int] | None:
        """(in, out) of a site of one expert; None where the model has none."""
        _, group, columns = self._sites.get(site, (0, None, 0))
        return None if group is None or layer not in group.layers else (group.in_features, columns)

    def table_bytes(self, num_layers: int) -> int:
        """The bytes that one adapter has of `ExpertLoraWeights.tables` and `heights`."""
        return num_layers * self.num_sites * (self.num_experts * (self.max_chunks + 1) * 2 + 1) * 4

    @property
    def chunk_bytes(self) -> int:
        """Tiles of an adapter of the largest height on gate, up and down of every expert."""
        return sum(
            len(group.layers) * self.num_experts * self._tile_bytes(TILE_HEIGHTS[-1], features)
            for site, (_, group, columns) in self._sites.items()
            if site != "gate_up"
            for features in (group.in_features, columns)
        )

    @property
    def largest_tile_bytes(self) -> int:
        widest = max(max(group.in_features, columns) for _, group, columns in self._sites.values())
        return self._tile_bytes(TILE_HEIGHTS[-1], widest)

    def tiles(self, keys: Sequence[ExpertKey]) -> Iterator[ExpertTile]:
        """Every tile of an adapter for these sites, in the order in which they are placed."""
        for index, key in enumerate(keys):
            shape = self.shape(key.layer, key.site)
            assert shape is not None
            height = key.height
            sides = [(side, n, self._tile_bytes(height, n)) for side, n in zip(SIDES, shape, strict=True)]
            for expert, rank in enumerate(key.ranks):
                own = [side for side in sides if rank and key.holder(side[0], expert) == expert]
                for chunk in range(-(-rank // height) if rank else 0):
                    for side, features, size in own:
                        yield ExpertTile(index, side, expert, chunk, features, size)

    def _tile_bytes(self, height: int, features: int) -> int:
        return -(-height * features * self._itemsize // GRANULE_BYTES) * GRANULE_BYTES
