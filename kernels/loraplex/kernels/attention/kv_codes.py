"""Keys and values as codes of 8 bits: the format of a KV cache in int8.

x ≈ s·c with c in -127 … 127 and s = max |x| / 127 in float16, for each position, KV head, and K or V. A scale belongs
to one position: no other row of a step has a part in it, and a row reads what was written of it, whatever chunk wrote
it. A head that holds a number which is not finite has a scale that is NaN, so all of it is NaN when it is read.

A few numbers of a key are much larger than its others, and would choose the scale of all. So keys become codes after
a Hadamard transform H of the head (Ashkboos et al., "QuaRot", 2024), where D is a power of two from 16 on, and queries
go through it too: H·Hᵀ = D, so (H·q)·(H·k) / D = q·k. Values stay as they are, and so do keys of other sizes. A
decoder transforms q and k itself; kernels of attention write and read what they are given.

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


def has_whole_blocks(cache: torch.Tensor) -> bool:
    """Whether each block of a cache [N, P, 2, Hkv, `head_width`] lies in one piece. Blocks may be apart."""
    return cache.is_contiguous() or cache[0].is_contiguous()


def is_transformed(head_dim: int) -> bool:
    """Whether keys of this size become codes after a transform. Compiled by numba too."""
    return head_dim >= 16 and head_dim & (head_dim - 1) == 0


def transform_factors(head_dim: int) -> tuple[float, float]:
    """Factors of queries and of keys in their transform: powers of two, which round nothing, and 1 / D together.
    Compiled by numba too."""
    stages = 0
    while 1 << stages < head_dim:
        stages += 1
    return 1.0 / (1 << stages // 2), 1.0 / (1 << stages - stages // 2)


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """[…, D] → […, D]: H·x, H[i, j] = -1 where i & j has an odd number of ones, else 1, by butterflies from the nearest
    pairs to the furthest."""
    shape, half = x.shape, 1
    while half < shape[-1]:
        a, b = x.reshape(-1, 2, half).unbind(1)
        x = torch.stack((a + b, a - b), 1)
        half *= 2
    return x.reshape(shape)


def transform_queries(q: torch.Tensor) -> torch.Tensor:
    """[…, D], as attention over codes takes it: of the same dtype, rounded once."""
    dim = q.shape[-1]
    return hadamard(q.float() * transform_factors(dim)[0]).to(q.dtype) if is_transformed(dim) else q


def transform_keys(k: torch.Tensor) -> torch.Tensor:
    """[…, D] → […, D] float32, as it becomes codes."""
    dim = k.shape[-1]
    return hadamard(k.float() * transform_factors(dim)[1]) if is_transformed(dim) else k.float()


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
