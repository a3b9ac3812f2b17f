"""Adapters in host memory, laid out as they will lie on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from loraplex.adapters.base import BaseWeights
from loraplex.adapters.dora import dora_vectors
from loraplex.adapters.errors import AdapterRefused, ArtifactCorrupt, LoadAbandoned
from loraplex.adapters.layout import ArenaLayout, Tile, place_tiles
from loraplex.adapters.spec import AdapterSpec, SiteWeights
from loraplex.adapters.tensors import NUMPY_DTYPES, read_tensor
from loraplex.kernels.groups import HEAD
from loraplex.kernels.lora import CHUNK, GRANULE_BYTES

HEAD_LAYER = -1
"""The layer by which an image's tables name the head."""
_DTYPE_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True, slots=True, eq=False)
class HostImage:
    """One adapter, ready to be copied page by page.

    `pages` is uint8 [num_pages, page_bytes], pinned where the device is a GPU. `sites` int32 [n, 5] has a row for
    each chunk of each site that the adapter has: layer, number of the site, chunk, and where its A and its B tile
    begin, in granules from the start of the image. `vectors` int32 [m, 3] has one for each site with vectors: layer,
    number, and where they begin. The head's blocks stand in both as sites of layer HEAD_LAYER, numbered by
    themselves; their A tile is the same.

    Vectors are made from the base's weights too, so an image belongs to a digest, a layout and a base together. It
    never outlives its process, which has one of each base and layout.
    """

    digest: str
    rank: int
    pages: torch.Tensor
    sites: NDArray[np.int32]
    vectors: NDArray[np.int32] = field(default_factory=lambda: np.empty((0, 3), np.int32))

    @property
    def num_pages(self) -> int:
        return self.pages.shape[0]

    @property
    def num_bytes(self) -> int:
        return self.pages.numel()


def build_image(
    spec: AdapterSpec,
    tensors_path: Path,
    layout: ArenaLayout,
    *,
    base: BaseWeights | None = None,
    pin: bool = False,
    wanted: Callable[[], bool] = lambda: True,
) -> HostImage:
    """Read an adapter's tensors and lay them out.

    The scaling, and DoRA's gain, are folded into B in float32; A and B are rounded once, to the layout's dtype. Ranks
    are filled up to whole chunks with zeros. DoRA needs `base`, whose weights are read in slices. Holds one site's
    tensors in float32 beside the image. `wanted` is asked before each site: where it says no, LoadAbandoned.
    Raises ArtifactCorrupt where the adapter does not fit the layout, AdapterRefused("non_finite") where a value is
    not finite in its dtype, BaseModelInvalid where the base's weights can't be read as they were, OSError.
    """
    _check_fits(spec, layout)
    tiles = layout.tiles(spec)
    offsets, num_pages = place_tiles([tile.num_bytes for tile in tiles], layout.page_bytes)
    pages = torch.empty(num_pages, layout.page_bytes, dtype=torch.uint8, pin_memory=pin)
    # numpy from here on: torch would start a team of threads of its own for a loader thread, beside the step's.
    flat = pages.numpy().reshape(-1)
    flat[:] = 0
    rounded, exact = flat.view(NUMPY_DTYPES[_DTYPE_NAMES[layout.dtype]]), flat.view(np.float32)
    tables = _Tables(spec, layout)
    current, weights = -1, _SiteMatrices()
    for tile, offset in zip(tiles, offsets, strict=True):
        site = spec.sites[tile.index]
        if tile.index != current:
            if not wanted():
                raise LoadAbandoned("nobody waits for this adapter any more")
            current, weights = tile.index, _read_site(site, tensors_path, layout, base)
        values = weights.part(tile)
        into = exact if tile.kind == "vectors" else rounded
        start = offset // into.itemsize
        with np.errstate(over="ignore", invalid="ignore"):
            into[start : start + values.size] = values.reshape(-1)
        if not np.isfinite(into[start : start + values.size]).all():
            raise AdapterRefused(
                "non_finite",
                f"{site.site} of layer {site.layer} has values that are not finite once they are scaled and in "
                f"{str(layout.dtype).removeprefix('torch.')}",
            )
        tables.put(tile, offset // GRANULE_BYTES)
    return HostImage(spec.digest, spec.rank, pages, tables.sites(), tables.vectors())


@dataclass(frozen=True, slots=True)
class _SiteMatrices:
    """A [rank, in_features], the scaled, transposed B [rank, out_features], and DoRA's vectors [2, out_features],
    all float32."""

    a: NDArray[np.float32] = field(default_factory=lambda: np.empty((0, 0), np.float32))
    b: NDArray[np.float32] = field(default_factory=lambda: np.empty((0, 0), np.float32))
    vectors: NDArray[np.float32] = field(default_factory=lambda: np.empty((2, 0), np.float32))

    def part(self, tile: Tile) -> NDArray[np.float32]:
        """What belongs into a tile: of the last chunk, the rows that there are."""
        if tile.kind == "vectors":
            return self.vectors[:, tile.start : tile.end]
        matrix = self.a if tile.kind == "a" else self.b
        return matrix[tile.chunk * CHUNK : (tile.chunk + 1) * CHUNK, tile.start : tile.end]


class _Tables:
    """The rows of `HostImage.sites` and `HostImage.vectors`, tile by tile."""

    def __init__(self, spec: AdapterSpec, layout: ArenaLayout) -> None:
        self._spec = spec
        self._layout = layout
        self._sites: dict[tuple[int, int, int], list[int]] = {}
        self._vectors: list[tuple[int, int, int]] = []

    def put(self, tile: Tile, start: int) -> None:
        site = self._spec.sites[tile.index]
        columns = self._layout.columns(site.site)
        layer = HEAD_LAYER if site.site == HEAD else site.layer
        first = 0 if site.site == HEAD else self._layout.sites[site.site]
        if tile.kind == "a":
            for block in range(len(columns)):
                self._sites[layer, first + block, tile.chunk] = [start, 0]
            return
        number = first + columns.index((tile.start, tile.end))
        if tile.kind == "b":
            self._sites[layer, number, tile.chunk][1] = start
        else:
            self._vectors.append((layer, number, start))

    def sites(self) -> NDArray[np.int32]:
        rows = [(*key, *starts) for key, starts in self._sites.items()]
        return np.array(rows, np.int32).reshape(-1, 5)

    def vectors(self) -> NDArray[np.int32]:
        return np.array(self._vectors, np.int32).reshape(-1, 3)


def _read_site(
    site: SiteWeights, tensors_path: Path, layout: ArenaLayout, base: BaseWeights | None
) -> _SiteMatrices:
    a = read_tensor(tensors_path, site.a)
    with np.errstate(over="ignore", invalid="ignore"):  # found and refused by the caller
        b = read_tensor(tensors_path, site.b) * np.float32(site.scaling)
    if site.magnitude is None:
        return _SiteMatrices(a, np.ascontiguousarray(b.T))
    if base is None:
        raise ValueError("DoRA's magnitudes need the weights of the base")
    gain, offset = dora_vectors(
        read_tensor(tensors_path, site.magnitude), a, b, base, site, NUMPY_DTYPES[_DTYPE_NAMES[layout.dtype]]
    )
    with np.errstate(over="ignore", invalid="ignore"):
        return _SiteMatrices(a, np.ascontiguousarray((b * gain[:, None]).T), np.stack((gain - 1, offset)))


def _check_fits(spec: AdapterSpec, layout: ArenaLayout) -> None:
    if not spec.sites:
        raise ArtifactCorrupt("the adapter changes nothing")
    seen = set()
    for site in spec.sites:
        where = f"{site.site} of layer {site.layer}"
        shape = layout.shape(site.site)
        num_layers = 1 if site.site == HEAD else layout.num_layers
        if shape is None or not 0 <= site.layer < num_layers or (site.layer, site.site) in seen:
            raise ArtifactCorrupt(f"{where} is not a place for an adapter in this model, or is there twice")
        seen.add((site.layer, site.site))
        if not 1 <= site.rank <= layout.max_chunks * CHUNK:
            raise ArtifactCorrupt(
                f"{where} has rank {site.rank}; this engine serves 1 … {layout.max_chunks * CHUNK}"
            )
        in_features, out_features = shape
        if site.a.shape != (site.rank, in_features) or site.b.shape != (out_features, site.rank):
            raise ArtifactCorrupt(
                f"{where}: A {site.a.shape} and B {site.b.shape} do not fit rank {site.rank} of a linear from "
                f"{in_features} to {out_features} features"
            )
        if site.magnitude is not None and site.magnitude.shape != (out_features,):
            raise ArtifactCorrupt(
                f"{where}: the magnitudes {site.magnitude.shape} do not fit {out_features} features"
            )
