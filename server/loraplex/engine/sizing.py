"""How a start divides memory between adapters and the KV cache. `loraplex plan` calls the same functions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from loraplex.adapters.device.expert_tiles import ExpertKey
from loraplex.adapters.device.layout import ArenaLayout, SiteKey, place_tiles
from loraplex.adapters.errors import LoraplexError
from loraplex.engine.config import DEFAULT_SEQUENCES, MAX_RECORDED_ROWS
from loraplex.engine.model.base import Model
from loraplex.engine.model.outline import ModelOutline
from loraplex.kernels.lora.dispatch import CHUNK
from loraplex.kernels.lora.site_groups import EMBEDDING, HEAD, SiteGroup

MAX_SLOTS = 1024
MAX_ADAPTER_CPU_MEMORY = 4 << 30
_ADAPTER_FRACTION = 0.1
_MAX_ADAPTER_MEMORY = {"cpu": 1 << 30, "cuda": 16 << 30}
_CPU_TOKENS = 256
"""A CPU computes a prompt as fast in smaller chunks, and all other sequences' next tokens wait for a whole chunk: 0.4 s
for 512 tokens of a small model."""
_CUDA_TOKENS = (8192, 4096, 2048)
_RECORDED_ROWS = {(8, 0): 128, (9, 0): 640, (10, 0): 640}
"""Rows by compute capability: up to this number a step with adapters takes the host longer to launch than the GPU
to compute, padding included. By arithmetic (docs/performance.md), for `REFERENCE_LAYERS` layers of `REFERENCE_WEIGHTS`
weights."""
REFERENCE_LAYERS, REFERENCE_WEIGHTS = 32, 8_030_261_248
_RECORDED_UNIT = 64
_STEP_SHARE = 64
"""On a GPU the inputs and outputs of one layer's linears may take one part in 64 of its memory."""


class AdapterMemoryTooSmall(LoraplexError):
    """The memory for adapters cannot hold even a small one."""

    code = "adapter_memory_too_small"


def most_sequences(asked: int, device_type: str) -> int:
    """Sequences of a step; `asked` 0: by the device."""
    return asked or DEFAULT_SEQUENCES[device_type]


def most_tokens(asked: int, device_type: str, row_bytes: int, total: int) -> int:
    """Tokens of a step; `asked` 0: by the device, its `total` memory, and the bytes of a row (`row_bytes`)."""
    if asked or device_type != "cuda":
        return asked or _CPU_TOKENS
    fit = (tokens for tokens in _CUDA_TOKENS if tokens * row_bytes * _STEP_SHARE <= total)
    return next(fit, _CUDA_TOKENS[-1])


def most_recorded_rows(
    asked: int, capability: tuple[int, int] | None, num_layers: int, num_weights: int
) -> int:
    """Rows of the largest step with prompt chunks that is recorded. `asked` -1: by the model and the GPU's compute
    capability, None on a CPU. Launches grow with the layers, what a row takes with the weights."""
    if asked >= 0:
        return asked
    known = 0 if capability is None else _RECORDED_ROWS.get(capability, 0)
    rows = known * num_layers * REFERENCE_WEIGHTS // (REFERENCE_LAYERS * num_weights)
    return min((rows + _RECORDED_UNIT // 2) // _RECORDED_UNIT * _RECORDED_UNIT, MAX_RECORDED_ROWS)


def row_bytes(groups: Sequence[SiteGroup], itemsize: int) -> int:
    """Inputs and outputs of the linears of the widest layer, for one token."""
    everywhere = 0
    by_layer: Counter[int] = Counter({0: 0})
    for group in groups:
        size = group.in_features + sum(group.out_features)
        if group.layers is None:
            everywhere += size
        for layer in group.layers or ():
            by_layer[layer] += size
    return (everywhere + max(by_layer.values())) * itemsize


def adapter_layout(model: Model | ModelOutline, max_rank: int) -> ArenaLayout:
    """How adapters up to a rank lie in memory beside a model."""
    return ArenaLayout(
        model.site_groups,
        model.num_layers,
        model.dtype,
        max_rank=max_rank,
        head=model.head_group,
        embedding=model.embedding_shape,
        hidden_size=model.hidden_size,
        experts=model.expert_groups,
    )


def adapter_budget(free: int, device_type: str) -> int:
    """Bytes for adapters on the device where no setting says: of `free` bytes behind the weights."""
    return min(int(free * _ADAPTER_FRACTION), _MAX_ADAPTER_MEMORY[device_type])


def host_budget(free: int) -> int:
    """Bytes for adapters in host memory where no setting says."""
    return min(int(free * _ADAPTER_FRACTION), MAX_ADAPTER_CPU_MEMORY)


def arena_size(budget: int, layout: ArenaLayout) -> tuple[int, int]:
    """(pages, slots) of `budget` bytes: pages, and the tables of as many adapters on routed experts as they hold.
    Raises AdapterMemoryTooSmall."""
    num_pages = budget // page_cost(layout)
    require_room("--adapter-memory", num_pages, layout, page_cost(layout))
    return num_pages, min(num_pages, MAX_SLOTS)


def page_cost(layout: ArenaLayout) -> int:
    """Bytes of a page for adapters, with its part of the tables of adapters on routed experts."""
    return layout.page_bytes + -(-layout.expert_table_bytes // layout.expert_pages)


def arena_bytes(num_pages: int, layout: ArenaLayout) -> int:
    """Device memory of an arena: one page more than it has for adapters, of zeros, and `table_bytes`."""
    return (num_pages + 1) * layout.page_bytes + table_bytes(num_pages, layout)


def table_bytes(num_pages: int, layout: ArenaLayout) -> int:
    """The part of an arena that says where adapters on routed experts lie."""
    return min(layout.expert_slots(num_pages), MAX_SLOTS) * layout.expert_table_bytes


def adapter_pages(
    layout: ArenaLayout, rank: int, sites: tuple[str, ...], experts: Sequence[ExpertKey] = ()
) -> int:
    """Pages of an adapter of this rank on these sites of every layer that has them, without DoRA's vectors, and on
    `experts`."""
    keys = [
        SiteKey(layer, site, rank, False)
        for site in sites
        for layer in range(1 if site in (HEAD, EMBEDDING) else layout.num_layers)
        if layout.shape(layer, site) is not None
    ]
    sizes = [tile.num_bytes for tile in layout.tiles(keys)]
    if layout.experts is not None:
        sizes += [tile.num_bytes for tile in layout.experts.tiles(experts)]
    return max(place_tiles(sizes, layout.page_bytes)[1], layout.expert_pages if experts else 0)


def too_large_pools(pools: Mapping[str, int], free: int | None) -> str | None:
    """The sentence for pools (bytes by option) that together are larger than the `free` bytes behind the weights; None
    where they fit, or where that is unknown."""
    wanted = sum(pools.values())
    if free is None or wanted <= free:
        return None
    listed = ", ".join(f"{option} {num_bytes / (1 << 30):.1f} GiB" for option, num_bytes in pools.items())
    return (
        f"the pools want {wanted / (1 << 30):.1f} GiB of memory, and {free / (1 << 30):.1f} GiB are free ({listed}): "
        "lower one, or the system will end this process when they fill up"
    )


def require_room(option: str, num_pages: int, layout: ArenaLayout, cost: int) -> None:
    """Require pages, of `cost` bytes each, for the smallest adapter that changes every site. A larger one is refused
    when it is asked for."""
    needed = layout.smallest_full_bytes // layout.page_bytes
    if num_pages < needed:
        raise AdapterMemoryTooSmall(
            f"{option}: {num_pages * cost / (1 << 20):.1f} MiB, in whole pages of {layout.page_bytes >> 10} KiB, "
            f"cannot hold even an adapter of rank {CHUNK} on every site; at least "
            f"{math.ceil(needed * cost / (1 << 20))} MiB are needed"
        )
