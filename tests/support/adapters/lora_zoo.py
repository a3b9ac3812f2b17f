"""Random adapters as files, and as plain matrices for the dense formula."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from loraplex.adapters.device.arena import AdapterArena
from loraplex.adapters.device.host_image import HostImage, build_image
from loraplex.adapters.device.host_slab import HostPages
from loraplex.adapters.device.layout import ArenaLayout
from loraplex.adapters.spec import AdapterSpec, SiteWeights, TensorSlice
from loraplex.kernels.backend import resolve_kernels
from loraplex.kernels.lora.site_groups import SiteGroup

GROUPS = (
    SiteGroup("qkv", ("q_proj", "k_proj", "v_proj"), 48, (48, 16, 16)),
    SiteGroup("o", ("o_proj",), 48, (48,)),
    SiteGroup("gate_up", ("gate_proj", "up_proj"), 48, (80, 80)),
    SiteGroup("down", ("down_proj",), 80, (48,)),
)
ODD_GROUPS = (
    SiteGroup("qkv", ("q_proj", "k_proj", "v_proj"), 37, (41, 13, 7)),
    SiteGroup("down", ("down_proj",), 101, (37,)),
)

Dense = dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor, float]]
"""(layer, site) → A [R, K], B [N, R], scaling."""


@dataclass(frozen=True)
class ZooAdapter:
    spec: AdapterSpec
    path: Path
    dense: Dense

    def in_layer(self, layer: int) -> dict[str, tuple[torch.Tensor, torch.Tensor, float]]:
        return {site: weights for (at, site), weights in self.dense.items() if at == layer}


def make_adapter(
    path: Path,
    groups: Iterable[SiteGroup],
    *,
    rank: int | Mapping[str, int],
    layers: Iterable[int],
    sites: Iterable[str] | None = None,
    seed: int = 0,
    std: float = 0.1,
    scaling: float = 1.5,
) -> ZooAdapter:
    """Random float32 matrices in a raw file, for the given sites (all) of the given layers."""
    rng = np.random.default_rng(seed)
    chosen = None if sites is None else set(sites)
    raw = bytearray()
    listed: list[SiteWeights] = []
    dense: Dense = {}

    def put(array: np.ndarray) -> TensorSlice:
        start = len(raw)
        raw.extend(array.astype("<f4").tobytes())
        return TensorSlice("F32", array.shape, start, len(raw))

    for layer, group in itertools.product(layers, groups):
        if group.layers is not None and layer not in group.layers:
            continue
        for site, out_features in zip(group.sites, group.out_features, strict=True):
            if chosen is not None and site not in chosen:
                continue
            r = rank if isinstance(rank, int) else rank[site]
            a = (rng.standard_normal((r, group.in_features)) * std).astype(np.float32)
            b = (rng.standard_normal((out_features, r)) * std).astype(np.float32)
            listed.append(SiteWeights(layer, site, r, scaling, put(a), put(b)))
            dense[layer, site] = torch.from_numpy(a), torch.from_numpy(b), scaling
    path.write_bytes(raw)
    spec = AdapterSpec(
        digest=f"{seed:064x}",
        rank=max(site.rank for site in listed),
        sites=tuple(listed),
        num_bytes=len(raw),
        targets=tuple(sorted({site.site for site in listed})),
    )
    return ZooAdapter(spec, path, dense)


class Zoo:
    """An arena with adapters in its first slots, every page that none of them owns filled with NaN."""

    def __init__(
        self, layout: ArenaLayout, adapters: list[ZooAdapter], *, seed: int = 0, spare_pages: int = 7
    ) -> None:
        self.layout = layout
        self.adapters = adapters
        self.images: list[HostImage] = [build_image(a.spec, a.path, layout) for a in adapters]
        num_pages = sum(image.num_pages for image in self.images) + spare_pages
        self.arena = dirty_arena(layout, num_pages, len(adapters) + 1)
        free = np.random.default_rng(seed).permutation(num_pages).tolist()
        for slot, image in enumerate(self.images):
            pages, free = free[: image.num_pages], free[image.num_pages :]
            self.arena.write(image, slot, tuple(sorted(pages)))


class OpCounter(TorchDispatchMode):
    """Counts what torch executes."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.ops[str(func)] += 1
        return func(*args, **(kwargs or {}))


def dirty_arena(layout: ArenaLayout, num_pages: int, num_slots: int) -> AdapterArena:
    """An arena in memory that was not clean when it was allocated, and whose pages were anybody's."""
    torch.use_deterministic_algorithms(True)  # fills new memory with ones: NaN in every dtype
    try:
        arena = AdapterArena(layout, num_pages, num_slots, resolve_kernels("torch", torch.device("cpu")))
    finally:
        torch.use_deterministic_algorithms(False)
    _poison(arena)
    return arena


def _poison(arena: AdapterArena) -> None:
    """Fill every page with NaN."""
    size = arena.layout.page_bytes // arena.layout.dtype.itemsize
    page = torch.full((size,), float("nan"), dtype=arena.layout.dtype).view(torch.uint8)[None]
    image = HostImage("poison", 8, HostPages([page]), np.array([[0, 0, 0, 0, 0]], np.int32))
    for number in range(arena.num_bytes // arena.layout.page_bytes - 1):
        arena.write(image, 0, (number,))
    arena.clear_slot(0)
