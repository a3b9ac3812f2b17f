"""Prompts by a library, decoding by Triton, as one `AttentionKernel`: by torch's own attention, or by FlashAttention 3
where its wheel is installed.

A step with a chunk of a prompt that is not recorded goes to the library, whole or in part (`Library.takes_decodes`).
Recorded steps, and those that decode alone, are Triton's: their lists of work are what a recording replays.

What a library cannot compute is no mistake: `obstacle_to_torch` and `obstacle_to_flash_attn_3` say which property of a
model stands in the way.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from loraplex.kernels.attention.kernel import AttentionNeeds
from loraplex.kernels.attention.triton_attention import TritonAttentionBatch, write_kv
from loraplex.kernels.attention.triton_kernel import TritonAttention, TritonLayout, lay_out_alone
from loraplex.kernels.attention.triton_plan import AttentionCapacity
from loraplex.kernels.failures import describe_failure

_FLASH_ATTN_3 = "flash_attn_interface"
"""The module that the wheel of FlashAttention 3 installs, from hopper/ of its repository."""
_HALF = (torch.bfloat16, torch.float16)
_MAX_HEAD_DIM = 256
_HOPPER = 9
"""Major number of the compute capability that FlashAttention 3 is written for."""


@dataclass(frozen=True, slots=True)
class LibraryRows:
    """The sequences of a step that a library computes. On the host: rows first_rows[i] … first_rows[i]+num_rows[i]-1 of
    the flat batch are the last positions of seq_lens[i]. On the device, int32: `tables` [n, B], the blocks of each,
    where B is what the longest needs; `row_ends` [n + 1], the sums of num_rows from 0 on, and `lens` [n], seq_lens."""

    first_rows: tuple[int, ...]
    num_rows: tuple[int, ...]
    seq_lens: tuple[int, ...]
    tables: torch.Tensor
    row_ends: torch.Tensor
    lens: torch.Tensor


class Library(Protocol):
    """A library's attention over paged K and V."""

    @property
    def name(self) -> str: ...

    @property
    def takes_decodes(self) -> bool:
        """Whether it computes all rows of a step that has a chunk. If not, Triton computes those that decode."""
        ...

    def run(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        rows: LibraryRows,
        out: torch.Tensor | None,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """See `AttentionKernel.run`. Writes its rows into `out` [T, Hq, D] and returns it; None where it has all rows
        of the step."""
        ...


@dataclass(frozen=True, slots=True)
class LibraryBatch:
    """`rows` None: all of the step is Triton's."""

    triton: TritonAttentionBatch
    rows: LibraryRows | None

    @property
    def slots(self) -> torch.Tensor:
        return self.triton.slots


@dataclass(frozen=True, slots=True)
class LibraryLayout:
    """See `AttentionLayout`."""

    lists: TritonLayout
    takes_decodes: bool

    @property
    def num_ints(self) -> int:
        return self.lists.num_ints

    def lay_out(
        self,
        host: NDArray[np.int32],
        device: torch.Tensor,
        num_rows: Sequence[int],
        seq_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        *,
        recorded: bool,
    ) -> tuple[LibraryBatch, int]:
        plan = self.lists.plan
        is_chunk = [count > plan.decode_rows for count in num_rows]
        if recorded or not any(is_chunk):
            batch, used = self.lists.lay_out(
                host, device, num_rows, seq_lens, block_tables, recorded=recorded
            )
            return LibraryBatch(batch, None), used
        apart = [chunk or self.takes_decodes for chunk in is_chunk]
        counts = plan.write(host, num_rows, seq_lens, block_tables, apart=apart)
        first_rows = list(accumulate(num_rows, initial=0))
        taken = [i for i, chosen in enumerate(apart) if chosen]
        n, ends, tables = len(taken), plan.apart_offset, plan.tables_offset
        width = max(-(-seq_lens[i] // plan.shape.block_size) for i in taken)
        rows = LibraryRows(
            tuple(first_rows[i] for i in taken),
            tuple(num_rows[i] for i in taken),
            tuple(seq_lens[i] for i in taken),
            tables=device[tables : tables + n * width].view(n, width),
            row_ends=device[ends : ends + n + 1],
            lens=device[ends + n + 1 : ends + 2 * n + 1],
        )
        batch = TritonAttentionBatch(plan, device, self.lists.scratch, counts.num_rows, counts.windows)
        return LibraryBatch(batch, rows), counts.num_ints

    def recorded_batch(self, device: torch.Tensor) -> LibraryBatch:
        return LibraryBatch(self.lists.recorded_batch(device), None)


class LibraryAttention:
    """See `RecordableAttention`."""

    reads_unwritten = False
    reads_codes = False

    def __init__(
        self, library: Library, needs: AttentionNeeds, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._library = library
        self._triton = TritonAttention(needs, dtype, device, room_apart=True)
        self._block_size = needs.shape.block_size
        self._device = device

    @property
    def name(self) -> str:
        return self._library.name

    def layouts(
        self, capacities: Sequence[AttentionCapacity], windows: Sequence[int | None] | None = None
    ) -> tuple[LibraryLayout, ...]:
        takes_decodes = self._library.takes_decodes
        return tuple(
            LibraryLayout(lists, takes_decodes) for lists in self._triton.layouts(capacities, windows)
        )

    def lay_out(
        self, num_rows: Sequence[int], seq_lens: Sequence[int], block_tables: Sequence[Sequence[int]]
    ) -> LibraryBatch:
        """In an array of its own, with scratch memory of its own."""
        batch: LibraryBatch = lay_out_alone(
            self, self._block_size, self._device, num_rows, seq_lens, block_tables
        )
        return batch

    def write_kv(self, kv: torch.Tensor, cache: torch.Tensor, batch: LibraryBatch) -> None:
        write_kv(kv, cache, batch.slots)

    def run(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        batch: LibraryBatch,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        out: torch.Tensor | None = None
        if batch.rows is None or not self._library.takes_decodes:
            out = self._triton.run(q, cache, batch.triton, scale=scale, window=window, softcap=softcap)
            if batch.rows is None:
                return out
        return self._library.run(q, cache, batch.rows, out, scale=scale, window=window, softcap=softcap)


class TorchPrompts:
    """Each chunk's K and V are gathered, then torch's scaled_dot_product_attention runs: by cuDNN where that takes the
    chunk, else by FlashAttention 2. Gathering reads and writes K and V once: at 2,048 rows of Llama-3.1-8B it moves 16
    MB for 34 GFLOP of attention, about 4 µs beside 55 µs on an H200, and less for longer chunks."""

    name = "torch"
    takes_decodes = False

    def run(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        rows: LibraryRows,
        out: torch.Tensor | None,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        if out is None or window is not None or softcap is not None:
            raise ValueError("torch's attention has neither windows nor softcaps, and computes chunks alone")
        _, block_size, _, num_kv_heads, head_dim = cache.shape
        # Never the one that keeps all scores in memory.
        fast = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
        with sdpa_kernel(fast, set_priority=True) if q.device.type == "cuda" else nullcontext():
            for i, (first, count, length) in enumerate(
                zip(rows.first_rows, rows.num_rows, rows.seq_lens, strict=True)
            ):
                blocks = rows.tables[i, : -(-length // block_size)]
                kv = cache.index_select(0, blocks).view(-1, 2, num_kv_heads, head_dim)[:length]
                k, v = (kv[:, kind].transpose(0, 1)[None] for kind in range(2))
                has_past = length > count
                answer = scaled_dot_product_attention(
                    q[first : first + count].transpose(0, 1)[None],
                    k,
                    v,
                    attn_mask=causal_lower_right(count, length) if has_past else None,
                    is_causal=not has_past,
                    scale=scale,
                    enable_gqa=True,
                )
                out[first : first + count] = answer[0].transpose(0, 1)
        return out


class FlashAttention3:
    """All rows of a step in one call, over the pages as they lie in the cache: its pages may have any size, and it
    takes their strides. What is behind a sequence's end in its last page is neither loaded (V) nor counted (K)."""

    name = "flash-attn-3"
    takes_decodes = True

    def __init__(self) -> None:
        self._attend: Any = importlib.import_module(_FLASH_ATTN_3).flash_attn_with_kvcache

    def run(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        rows: LibraryRows,
        out: torch.Tensor | None,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        answer: torch.Tensor = self._attend(
            q,
            cache[:, :, 0],
            cache[:, :, 1],
            cache_seqlens=rows.lens,
            page_table=rows.tables,
            cu_seqlens_q=rows.row_ends,
            max_seqlen_q=max(rows.num_rows),
            softmax_scale=scale,
            causal=True,
            # Positions before the query's own that are seen.
            window_size=(-1, -1) if window is None else (window - 1, 0),
            softcap=softcap or 0.0,
        )
        return answer


def obstacle_to_torch(
    needs: AttentionNeeds, dtype: torch.dtype, device: torch.device, *, batch_invariant: bool
) -> str | None:
    """Why torch's attention cannot compute a model's prompts beside Triton; None where it can."""
    if any(window is not None for window in needs.windows):
        return "torch's attention has no sliding windows, and the model has"
    if needs.has_softcap:
        return "torch's attention has no softcap, and the model has"
    return _common_obstacle("torch's attention", needs, dtype, device, batch_invariant=batch_invariant)


def obstacle_to_flash_attn_3(
    needs: AttentionNeeds, dtype: torch.dtype, device: torch.device, *, batch_invariant: bool
) -> str | None:
    """Why FlashAttention 3 cannot compute a model's attention here; None where it can."""
    if importlib.util.find_spec(_FLASH_ATTN_3) is None:
        return f"the package flash-attn-3 (module {_FLASH_ATTN_3}) is not installed"
    if not _is_interpreted():
        if device.type != "cuda":
            return f"the device is '{device.type}'"
        major, minor = torch.cuda.get_device_capability(device)
        if major != _HOPPER:
            return f"the GPU has compute capability {major}.{minor}, and 9.0 is needed"
    found = _common_obstacle("FlashAttention 3", needs, dtype, device, batch_invariant=batch_invariant)
    if found is not None:
        return found
    try:
        FlashAttention3()
    except Exception as error:  # of any kind: a wheel that was made for another torch
        return describe_failure("flash-attn-3", error)
    return None


def _common_obstacle(
    name: str, needs: AttentionNeeds, dtype: torch.dtype, device: torch.device, *, batch_invariant: bool
) -> str | None:
    if batch_invariant:
        return f"with --batch-invariant, {name} cannot promise the same bits"
    head_dim = needs.shape.head_dim
    if head_dim > _MAX_HEAD_DIM or head_dim % 8:
        return f"{name} takes heads of multiples of 8 up to {_MAX_HEAD_DIM}, not of {head_dim}"
    if dtype not in _HALF and device.type == "cuda":
        return f"{name} computes in bfloat16 and float16, not in {str(dtype).removeprefix('torch.')}"
    return None


def _is_interpreted() -> bool:
    """Triton's kernels, and so any device does."""
    return os.environ.get("TRITON_INTERPRET") == "1"
