"""Adapters in host memory, laid out as they will lie on the device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from loraplex.adapters.errors import ArtifactCorrupt
from loraplex.adapters.layout import ArenaLayout, place_tiles
from loraplex.adapters.spec import AdapterSpec, SiteWeights
from loraplex.adapters.tensors import NUMPY_DTYPES, read_tensor
from loraplex.kernels.lora import CHUNK, GRANULE_BYTES

_NUMPY_DTYPES = {
    torch.float32: NUMPY_DTYPES["F32"],
    torch.float16: NUMPY_DTYPES["F16"],
    torch.bfloat16: NUMPY_DTYPES["BF16"],
}


@dataclass(frozen=True, slots=True, eq=False)
class HostImage:
    """One adapter, ready to be copied page by page.

    `pages` is uint8 [num_pages, page_bytes], pinned where the device is a GPU. `sites` int32 [n, 5] has a row for
    each chunk of each site that the adapter has: layer, number of the site, chunk, and where its A and its B tile
    begin, in granules from the start of the image.
    """

    digest: str
    rank: int
    pages: torch.Tensor
    sites: NDArray[np.int32]

    @property
    def num_pages(self) -> int:
        return self.pages.shape[0]

    @property
    def num_bytes(self) -> int:
        return self.pages.numel()


def build_image(
    spec: AdapterSpec, tensors_path: Path, layout: ArenaLayout, *, pin: bool = False
) -> HostImage:
    """Read an adapter's tensors and lay them out.

    The scaling is folded into B in float32; A and B are rounded once, to the layout's dtype. Ranks are filled up
    to whole chunks with zeros. Holds one site's tensors in float32 beside the image. Raises ArtifactCorrupt where
    the adapter does not fit the layout or a value is not finite in its dtype, OSError where it can't be read.
    """
    _check_fits(spec, layout)
    tiles = layout.tiles(spec)
    offsets, num_pages = place_tiles([size for _, size in tiles], layout.page_bytes)
    pages = torch.empty(num_pages, layout.page_bytes, dtype=torch.uint8, pin_memory=pin)
    # numpy from here on: torch would start a team of threads of its own for a loader thread, beside the step's.
    flat = pages.numpy().reshape(-1).view(_NUMPY_DTYPES[layout.dtype])
    flat[:] = 0
    rows: dict[tuple[int, int], list[int]] = {}
    current, weights = -1, (np.empty((0, 0), np.float32),) * 2
    for ((index, chunk, kind), _), offset in zip(tiles, offsets, strict=True):
        site = spec.sites[index]
        if index != current:
            current, weights = index, _read_site(site, tensors_path)
        part = weights[kind][chunk * CHUNK : (chunk + 1) * CHUNK]
        start = offset // layout.dtype.itemsize
        with np.errstate(over="ignore", invalid="ignore"):
            flat[start : start + part.size] = part.reshape(-1)
        if not np.isfinite(flat[start : start + part.size]).all():
            raise ArtifactCorrupt(
                f"{site.site} of layer {site.layer} has values that are not finite once they are scaled and in "
                f"{str(layout.dtype).removeprefix('torch.')}"
            )
        row = rows.setdefault((index, chunk), [site.layer, layout.sites[site.site], chunk, 0, 0])
        row[3 + kind] = offset // GRANULE_BYTES
    return HostImage(spec.digest, spec.rank, pages, np.array(list(rows.values()), np.int32).reshape(-1, 5))


def _read_site(site: SiteWeights, tensors_path: Path) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """A [rank, in_features] and the scaled, transposed B [rank, out_features]."""
    a = read_tensor(tensors_path, site.a)
    with np.errstate(over="ignore", invalid="ignore"):  # found and refused by the caller
        b = read_tensor(tensors_path, site.b) * np.float32(site.scaling)
    return a, np.ascontiguousarray(b.T)


def _check_fits(spec: AdapterSpec, layout: ArenaLayout) -> None:
    if not spec.sites:
        raise ArtifactCorrupt("the adapter changes nothing")
    seen = set()
    for site in spec.sites:
        where = f"{site.site} of layer {site.layer}"
        number = layout.sites.get(site.site)
        if number is None or not 0 <= site.layer < layout.num_layers or (site.layer, number) in seen:
            raise ArtifactCorrupt(f"{where} is not a place for an adapter in this model, or is there twice")
        seen.add((site.layer, number))
        if not 1 <= site.rank <= layout.max_chunks * CHUNK:
            raise ArtifactCorrupt(
                f"{where} has rank {site.rank}; this engine serves 1 … {layout.max_chunks * CHUNK}"
            )
        in_features, out_features = layout.features[number]
        if site.a.shape != (site.rank, in_features) or site.b.shape != (out_features, site.rank):
            raise ArtifactCorrupt(
                f"{where}: A {site.a.shape} and B {site.b.shape} do not fit rank {site.rank} of a linear from "
                f"{in_features} to {out_features} features"
            )
