"""How adapters lie in memory: tiles of eight ranks, in equal pages, the same in host memory and on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

import torch

from loraplex.adapters.device.expert_tiles import ExpertLayout
from loraplex.kernels.experts.lora_types import ExpertSiteGroup
from loraplex.kernels.lora.dispatch import CHUNK, GRANULE_BYTES
from loraplex.kernels.lora.site_groups import EMBEDDING, HEAD, SiteGroup

MIN_PAGE_BYTES = 256 << 10
MAX_PAGE_BYTES = 2 << 20
_TABLE_SHARE = 20
"""The tables of adapters on routed experts take one part in 20 of the pages, at most."""


REPLACED = "replaced rows"
"""The key in place of a site for an adapter that replaces rows of the embedding or the head: its rank is their
number."""

CLASSIFIER = "classifier"
"""The key in place of a site for an adapter that has a head of labels: its rank is their number."""

TileKind = Literal["a", "b", "vectors", "token_ranks", "token_rows", "head_rows"]
IN_FLOAT32: frozenset[TileKind] = frozenset({"vectors", "head_rows"})
"""Tiles that have float32, whatever the layout's dtype."""


class SiteKey(NamedTuple):
    """The properties of a site that determine its tiles."""

    layer: int
    site: str
    rank: int
    has_vectors: bool


@dataclass(frozen=True, slots=True)
class Tile:
    """One tile of an adapter: its site (index among the adapter's), its chunk of ranks (0 for vectors), and its
    columns [start, end) of the output (of the input for A). Of "token_ranks", which is A of the embedding, [start, end)
    are tokens of the vocabulary; of "token_rows", they are rows that the adapter replaces; of
    "head_rows", they are labels."""

    index: int
    kind: TileKind
    chunk: int
    start: int
    end: int
    num_bytes: int


class ArenaLayout:
    """The units of an arena for one model and one dtype.

    A chunk is CHUNK ranks of one site; its A tile is [CHUNK, in_features], its B tile [CHUNK, out_features]. A site
    with vectors (DoRA) has them in a tile [2, out_features] of float32. A tile begins at a multiple of GRANULE_BYTES
    and never crosses a page. Sites are numbered through `groups` in their order. The head (lm_head) is as wide as the
    vocabulary: its columns are cut into blocks whose B tiles take half a page at most; `head` is its group with a
    site for each block.

    The embedding is looked up by token, so its A lies transposed: the ranks of a token, in whole chunks, are adjacent,
    and a tile has the tokens that fit a page. Rows that an adapter replaces lie in the same way, each at a granule.
    `embedding` is (vocabulary, hidden size), None where adapters can't change it.

    So do the rows of a classifier's head, in float32, each with its bias behind it. `hidden_size` is that of the hidden
    states that it reads, None where the model gives none. `experts` has the sites of routed experts, None where
    adapters can't change them.

    The page size is a power of two chosen by the model, unless given: 256 KiB to 2 MiB, at least the largest tile,
    growing with the size of the model's adapters so that those have tens of pages.
    """

    def __init__(
        self,
        groups: Sequence[SiteGroup],
        num_layers: int,
        dtype: torch.dtype,
        *,
        max_rank: int,
        page_bytes: int | None = None,
        head: SiteGroup | None = None,
        embedding: tuple[int, int] | None = None,
        hidden_size: int | None = None,
        experts: Sequence[ExpertSiteGroup] = (),
    ) -> None:
        self.groups = tuple(groups)
        self.num_layers = num_layers
        self.dtype = dtype
        self.max_chunks = -(-max_rank // CHUNK)
        self.sites: dict[tuple[int, str], int] = {}
        """Numbers of the sites, by layer and name."""
        self.features: list[tuple[int, int]] = []
        """(in, out) of each site, by its number."""
        for group in self.groups:
            for site, out_features in zip(group.sites, group.out_features, strict=True):
                for layer in group.layers_of(num_layers):
                    if (layer, site) in self.sites:
                        raise ValueError(f"site {site} of layer {layer} is in two groups")
                    self.sites[layer, site] = len(self.features)
                self.features.append((group.in_features, out_features))
        self.places = sorted((layer, number) for (layer, _), number in self.sites.items())
        """Each site's layer and number."""
        self._sizes = [self.tile_bytes(size) for _, number in self.places for size in self.features[number]]
        self.experts = ExpertLayout(experts, dtype, max_rank=max_rank) if experts else None
        self.largest_tile_bytes = max(self._sizes)
        chunk_of_all_sites = sum(self._sizes)
        if self.experts is not None:
            self.largest_tile_bytes = max(self.largest_tile_bytes, self.experts.largest_tile_bytes)
            chunk_of_all_sites += self.experts.chunk_bytes
        if page_bytes is None:
            page_bytes = self._choose_page_bytes(chunk_of_all_sites)
        if page_bytes < self.largest_tile_bytes or page_bytes % GRANULE_BYTES:
            raise ValueError(
                f"a page of {page_bytes} bytes can't hold the largest tile ({self.largest_tile_bytes} bytes), "
                f"or is no multiple of {GRANULE_BYTES}"
            )
        self.page_bytes = page_bytes
        self.expert_table_bytes = 0 if self.experts is None else self.experts.table_bytes(num_layers)
        self.head = None if head is None else self._cut(head)
        fits = embedding is not None and self.tile_bytes(embedding[1]) <= page_bytes
        self.embedding = embedding if fits else None
        self.hidden_size = hidden_size

    def shape(self, layer: int, site: str) -> tuple[int, int] | None:
        """(in, out) of a site; None where adapters can't change it."""
        if site == HEAD:
            return None if self.head is None else (self.head.in_features, sum(self.head.out_features))
        if site == EMBEDDING:
            return self.embedding
        number = self.sites.get((layer, site))
        return None if number is None else self.features[number]

    @property
    def site_names(self) -> tuple[str, ...]:
        """Every site that adapters can change."""
        head = () if self.head is None else (HEAD,)
        own = dict.fromkeys(site for group in self.groups for site in group.sites)
        return (*own, *head, *(() if self.embedding is None else (EMBEDDING,)))

    @property
    def expert_site_names(self) -> tuple[str, ...]:
        """The sites of routed experts that adapters can change, as `AdapterSpec.targets` names them."""
        groups = () if self.experts is None else self.experts.groups
        return tuple(f"experts.{site}" for group in groups for site in group.sites)

    @property
    def smallest_full_bytes(self) -> int:
        """Pages of an adapter of rank up to CHUNK on every site of every layer, without the head and routed experts."""
        return place_tiles(self._sizes, self.page_bytes)[1] * self.page_bytes

    @property
    def expert_pages(self) -> int:
        """Pages that an adapter on routed experts has at least. With them, the tables for as many such adapters as an
        arena can hold take a twentieth of its pages at most."""
        return max(1, -(-_TABLE_SHARE * self.expert_table_bytes // self.page_bytes))

    def expert_slots(self, num_pages: int) -> int:
        """The most adapters on routed experts that `num_pages` hold at a time."""
        return 0 if self.experts is None else num_pages // self.expert_pages

    @property
    def granules_per_page(self) -> int:
        return self.page_bytes // GRANULE_BYTES

    def tile_bytes(self, features: int) -> int:
        """The size of a tile [CHUNK, features], rounded up to a granule."""
        return _whole_granules(CHUNK * features * self.dtype.itemsize)

    def columns(self, layer: int, site: str) -> list[tuple[int, int]]:
        """The blocks [start, end) of output columns that a site is cut into: one, except for the head."""
        shape = self.shape(layer, site)
        assert shape is not None
        widths = self.head.out_features if site == HEAD and self.head is not None else (shape[1],)
        ends = list(accumulate(widths))
        return list(zip([0, *ends], ends, strict=False))

    def tiles(self, sites: Sequence[SiteKey]) -> list[Tile]:
        """Every tile of an adapter for these sites, in the order in which they are placed."""
        listed = []
        for index, site in enumerate(sites):
            if site.site == REPLACED:
                listed += self._row_tiles(index, "token_rows", site.rank, self.replaced_row_bytes)
                continue
            if site.site == CLASSIFIER:
                listed += self._row_tiles(index, "head_rows", site.rank, self.head_row_bytes)
                continue
            shape = self.shape(site.layer, site.site)
            assert shape is not None
            if site.site == EMBEDDING:
                chunks = -(-site.rank // CHUNK)
                listed += self._row_tiles(index, "token_ranks", shape[0], self.token_rank_bytes(chunks))
                size = self.tile_bytes(shape[1])
                listed += [Tile(index, "b", chunk, 0, shape[1], size) for chunk in range(chunks)]
                continue
            columns = self.columns(site.layer, site.site)
            for chunk in range(-(-site.rank // CHUNK)):
                listed.append(Tile(index, "a", chunk, 0, shape[0], self.tile_bytes(shape[0])))
                listed += [
                    Tile(index, "b", chunk, *part, self.tile_bytes(part[1] - part[0])) for part in columns
                ]
            if site.has_vectors:
                listed += [
                    Tile(index, "vectors", 0, *part, _whole_granules(2 * 4 * (part[1] - part[0])))
                    for part in columns
                ]
        return listed

    @property
    def replaced_row_bytes(self) -> int:
        """One replaced row of the embedding or the head."""
        assert self.embedding is not None
        return _whole_granules(self.embedding[1] * self.dtype.itemsize)

    @property
    def head_row_bytes(self) -> int:
        """The weights of one label and its bias."""
        assert self.hidden_size is not None
        return _whole_granules((self.hidden_size + 1) * 4)

    def token_rank_bytes(self, chunks: int) -> int:
        """The ranks of one token in A of the embedding."""
        return chunks * CHUNK * self.dtype.itemsize

    def _row_tiles(self, index: int, kind: TileKind, count: int, row_bytes: int) -> list[Tile]:
        step = self.page_bytes // row_bytes
        return [
            Tile(index, kind, 0, first, last, _whole_granules((last - first) * row_bytes))
            for first in range(0, count, step)
            for last in (min(first + step, count),)
        ]

    def _cut(self, head: SiteGroup) -> SiteGroup:
        if head.sites != (HEAD,):
            raise ValueError(f"the head's group has the sites {head.sites}")
        width = self.page_bytes // 2 // (CHUNK * self.dtype.itemsize)
        if self.tile_bytes(head.in_features) > self.page_bytes or not width:
            raise ValueError(f"a page of {self.page_bytes} bytes can't hold the head's A tile")
        widths = [min(width, head.out_features[0] - first) for first in range(0, head.out_features[0], width)]
        names = tuple(f"{HEAD}.{block}" for block in range(len(widths)))
        return SiteGroup(HEAD, names, head.in_features, tuple(widths))

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


def _whole_granules(size: int) -> int:
    return -(-size // GRANULE_BYTES) * GRANULE_BYTES


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
