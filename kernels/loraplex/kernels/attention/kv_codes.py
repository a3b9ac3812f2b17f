"""Keys and values as codes of 8 bits: the format of a KV cache in int8.

x ≈ s·c with c in -127 … 127 and s = max |x| / 127 in float16, for each position, KV head, and K or V. A scale belongs
to one position: no other row of a step has a part in it, and a row reads what was written of it, whatever chunk wrote
it. A head that holds a number which is not finite has a scale that is NaN, so all of it is NaN when it is read.

A cache [N, P, 2, Hkv, D + 2] holds D codes and the two bytes of a scale for each. Where in a block they lie is for the
kernel that reads them. In torch's order the scale lies behind its codes.
"""

from __future__ import annotations

import torch

SCALE_BYTES = 2
LARGEST_CODE = 127
LARGEST_SCALE = 65504.0
"""The largest number in float16."""


def head_width(head_dim: int, dtype: torch.dtype) -> int:
    """Elements of one head's K or V in a cache of this dtype: its numbers, or codes and their scale."""
    return head_dim + SCALE_BYTES if dtype is torch.int8 else head_dim


def head_dim_of(cache: torch.Tensor) -> int:
    """D of a cache [N, P, 2, Hkv, `head_width`]."""
    return cache.shape[4] - SCALE_BYTES if cache.dtype is torch.int8 else cache.shape[4]


def to_codes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[…, D] of any floating dtype → codes [..., D] int8 and scales […] float16."""
    x = x.float()
    peak = x.abs().amax(-1)
    scales = (peak * (1 / LARGEST_CODE)).clamp_(max=LARGEST_SCALE)
    scales = scales.masked_fill_(~peak.isfinite(), float("nan")).half()
    own = scales.float()[..., None]
    codes = (x * torch.where(own > 0, 1 / own, 0.0)).round_()
    return codes.clamp_(-LARGEST_CODE, LARGEST_CODE).nan_to_num_(0.0).to(torch.int8), scales


def from_codes(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers of `to_codes`, each rounded once to `dtype`."""
    return (codes.float() * scales.float()[..., None]).to(dtype)


def pack_rows(x: torch.Tensor) -> torch.Tensor:
    """[…, D] → […, D + 2] int8, in torch's order."""
    codes, scales = to_codes(x)
    return torch.cat((codes, scales[..., None].view(torch.int8)), -1)


def unpack_rows(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[…, D + 2] int8, in torch's order → […, D] of `dtype`."""
    scales = rows[..., -SCALE_BYTES:].contiguous().view(torch.float16)
    return from_codes(rows[..., :-SCALE_BYTES], scales[..., 0], dtype)
