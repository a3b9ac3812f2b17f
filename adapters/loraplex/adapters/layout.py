"""How adapters lie in memory: tiles of eight ranks, in equal pages, the same in host memory and on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from loraplex.adapters.spec import AdapterSpec
from loraplex.kernels.groups import SiteGroup
from loraplex.kernels.lora import CHUNK, GRANULE_BYTES

MIN_PAGE_BYTES = 256 << 10
MAX_PAGE_BYTES = 2 << 20


class ArenaLayout:
    """The units of an arena for one model and one dtype.

    A chunk is CHUNK ranks of one site; its A tile is [CHUNK, in_features], its B tile [CHUNK, out_features]. A tile
    begins at a multiple of GRANULE_BYTES and never crosses a page. Sites are numbered through `groups` in their
    order. The page size is a power of two chosen by the model, unless given: 256 KiB to 2 MiB, at least the
    largest tile, growing with the size of the model's adapters so that those have tens of pages.
    """

    def __init__(
        self,
        groups: Sequence[SiteGroup],
        num_layers: int,
        dtype: torch.dtype,
        *,
        max_rank: int,
        page_bytes: int | None = None,
    ) -> None:
        self.groups = tuple(groups)
        self.num_layers = num_layers
        self.dtype = dtype
        self.max_chunks = -(-max_rank // CHUNK)
        self.sites: dict[str, int] = {}
        self.features: list[tuple[int, int]] = []
        """(in, out) of each site, by its number."""
        for group in self.groups:
            for site, out_features in zip(group.sites, group.out_features, strict=True):
                if site in self.sites:
                    raise ValueError(f"site {site} is in two groups")
                self.sites[site] = len(self.features)
                self.features.append((group.in_features, out_features))
        sizes = [self.tile_bytes(features) for pair in self.features for features in pair]
        self.largest_tile_bytes = max(sizes)
        if page_bytes is None:
            page_bytes = self._choose_page_bytes(num_layers * sum(sizes))
        if page_bytes < self.largest_tile_bytes or page_bytes % GRANULE_BYTES:
            raise ValueError(
                f"a page of {page_bytes} bytes can't hold the largest tile ({self.largest_tile_bytes} bytes), "
                f"or is no multiple of {GRANULE_BYTES}"
            )
        self.page_bytes = page_bytes

    @property
    def smallest_full_bytes(self) -> int:
        """What an adapter of rank up to CHUNK on every site of every layer takes, in whole pages."""
        sizes = [self.tile_bytes(features) for pair in self.features for features in pair] * self.num_layers
        return place_tiles(sizes, self.page_bytes)[1] * self.page_bytes

    @property
    def granules_per_page(self) -> int:
        return self.page_bytes // GRANULE_BYTES

    def tile_bytes(self, features: int) -> int:
        """What a tile [CHUNK, features] takes, up to the next granule."""
        size = CHUNK * features * self.dtype.itemsize
        return -(-size // GRANULE_BYTES) * GRANULE_BYTES

    def tiles(self, spec: AdapterSpec) -> list[tuple[tuple[int, int, int], int]]:
        """((index of the site in `spec.sites`, chunk, 0 for A or 1 for B), bytes) of every tile, in the order in
        which they are placed."""
        listed = []
        for index, site in enumerate(spec.sites):
            sizes = [self.tile_bytes(features) for features in self.features[self.sites[site.site]]]
            for chunk in range(-(-site.rank // CHUNK)):
                listed += [((index, chunk, kind), size) for kind, size in enumerate(sizes)]
        return listed

    def _choose_page_bytes(self, chunk_of_all_sites: int) -> int:
        page = MIN_PAGE_BYTES
        # Little of a page is lost at its end if several tiles fit; more than 64 pages for the smallest rank of an
        # adapter for everything would only make lists longer.
        while page < MAX_PAGE_BYTES and (
            page < 8 * self.largest_tile_bytes or page < chunk_of_all_sites // 64
        ):
            page *= 2
        while page < self.largest_tile_bytes:
            page *= 2
        return page


def place_tiles(sizes: Sequence[int], page_bytes: int) -> tuple[list[int], int]:
    """First-fit over the pages begun last: the byte offset of each tile, and the number of pages."""
    offsets = []
    used: list[int] = []
    for size in sizes:
        for page in range(max(0, len(used) - 4), len(used)):
            if used[page] + size <= page_bytes:
                break
        else:
            page = len(used)
            used.append(0)
        offsets.append(page * page_bytes + used[page])
        used[page] += size
    return offsets, len(used)
