"""The needs of a model's layers: what each keeps of a sequence. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheKind:
    """The keys and values that one layer keeps of a sequence: blocks, [16, 2, kv_heads, head_dim] each."""

    kv_heads: int
    head_dim: int
    window: int | None = None
    """The positions that a row reads, its own included; None: all."""
    shares: int | None = None
    """The index of the layer whose keys and values this layer reads; None: it has its own."""
