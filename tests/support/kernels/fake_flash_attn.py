"""A module in the place of FlashAttention 3's, with its function, arguments and tensors' types, computed in float64."""

from __future__ import annotations

import importlib.machinery
import sys
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch

MODULE = "flash_attn_interface"


def install_fake(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """As if the wheel were installed. `calls` of the module counts its calls."""
    module: Any = ModuleType(MODULE)
    module.__spec__ = importlib.machinery.ModuleSpec(MODULE, None)
    module.calls = 0

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        module.calls += 1
        return flash_attn_with_kvcache(*args, **kwargs)

    module.flash_attn_with_kvcache = counted
    monkeypatch.setitem(sys.modules, MODULE, module)
    return module


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: None = None,
    v: None = None,
    qv: None = None,
    rotary_cos: None = None,
    rotary_sin: None = None,
    cache_seqlens: torch.Tensor | None = None,
    cache_batch_idx: None = None,
    cache_leftpad: None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: None = None,
    max_seqlen_q: int | None = None,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> torch.Tensor:
    """q [T, Hq, D], pages [N, P, Hkv, D], int32 tables. Masks are aligned to the last key, as FlashAttention's are; a
    key is seen from `window_size[0]` positions before the query's own on. K and V behind a sequence's end are not
    read."""
    assert cache_seqlens is not None
    assert page_table is not None
    assert cu_seqlens_q is not None
    assert causal
    assert k_cache.stride(-1) == v_cache.stride(-1) == q.stride(-1) == page_table.stride(-1) == 1
    assert {page_table.dtype, cache_seqlens.dtype, cu_seqlens_q.dtype} == {torch.int32}
    ends, lens = cu_seqlens_q.tolist(), cache_seqlens.tolist()
    counts = [b - a for a, b in pairwise(ends)]
    assert ends[0] == 0
    assert ends[-1] == q.shape[0]
    assert len(counts) == len(lens) == len(page_table)
    assert max_seqlen_q == max(counts)
    out = torch.full(q.shape, float("nan"), dtype=q.dtype)
    page = k_cache.shape[1]
    for first, count, length, table in zip(ends, counts, lens, page_table.tolist(), strict=False):
        j = torch.arange(length)
        blocks = torch.tensor(table)[j // page]
        keys, values = k_cache[blocks, j % page].double(), v_cache[blocks, j % page].double()
        group = q.shape[1] // keys.shape[1]
        i = torch.arange(length - count, length)[:, None]
        hidden = j > i
        if window_size[0] >= 0:
            hidden |= j < i - window_size[0]
        scores = torch.einsum(
            "nhd,lhd->hnl", q[first : first + count].double(), keys.repeat_interleave(group, 1)
        )
        scores = scores * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        # What no query sees may be anything.
        seen = ~hidden.all(0)
        answer = torch.einsum("hnl,lhd->nhd", weights[..., seen], values.repeat_interleave(group, 1)[seen])
        out[first : first + count] = answer.to(q.dtype)
    return out
