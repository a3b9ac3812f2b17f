"""Sampling on a GPU in a few launches, without a turn through the host: see `sampling.triton_programs`.

What comes out is the draw of `loraplex.engine.sampling.sampler`, with three differences. Weights are float32 by the
device's own exponential, so that a uniform number within their rounding of a boundary between two tokens may fall on
its other side, and so may a token within it of top_k's, top_p's or min_p's threshold. Sums are exact multiples of
2^-44 instead of float64. Of a row's logits that penalties and biases change, the product and the difference may be
rounded at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
import triton

from loraplex.kernels.sampling.triton_edits import add_bias, penalise
from loraplex.kernels.sampling.triton_programs import PIVOTS, gather, peaks, pick, select, sum_kept, weigh
from loraplex.kernels.sampling.types import (
    MAX_VOCAB,
    Biases,
    History,
    Option,
    Options,
    SampleRows,
    TokenMasks,
)

_EDIT_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class SamplingTiling:
    """Powers of two: `tile`, columns that a program reads at once; `candidates`, how many of a row's logits are put
    side by side for the bisection, which otherwise reads them all; `block`, how many it reads at once."""

    tile: int = 4096
    candidates: int = 4096
    block: int = 4096


_DEFAULT = SamplingTiling()


class TritonSampling:
    """Draws for up to `max_rows` rows of `vocab_size` logits at a time.

    All memory that a draw needs is allocated here, 4 · candidates + 116 · ⌈V / tile⌉ bytes a row, so that a draw can be
    recorded in a CUDA graph over tensors that stay where they are; draws that share it must not run at the same time.
    Raises ValueError for a vocabulary of more than MAX_VOCAB tokens.
    """

    def __init__(
        self, max_rows: int, vocab_size: int, device: torch.device, *, tiling: SamplingTiling = _DEFAULT
    ) -> None:
        if not 1 <= vocab_size <= MAX_VOCAB:
            raise ValueError(f"a vocabulary of {vocab_size} tokens; 1 to {MAX_VOCAB} can be drawn from")
        self._max_rows, self._vocab_size, self._tiling = max_rows, vocab_size, tiling
        splits = -(-vocab_size // tiling.tile)
        self._splits = splits

        def scratch(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty((max_rows, *shape), dtype=dtype, device=device)

        self._best = scratch(splits, dtype=torch.float32)
        self._at = scratch(splits, dtype=torch.int32)
        self._faults = scratch(splits, dtype=torch.int32)
        self._removed = scratch(dtype=torch.int32)
        self._counts = scratch(PIVOTS.value, splits, dtype=torch.int32)
        self._sums = scratch(PIVOTS.value, splits, dtype=torch.int64)
        self._candidates = scratch(tiling.candidates, dtype=torch.float32)
        self._least = scratch(dtype=torch.int32)
        self._kept = scratch(splits, dtype=torch.int64)

    def draw(
        self,
        logits: torch.Tensor,
        rows: SampleRows,
        last_tokens: torch.Tensor,
        masks: TokenMasks | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """logits: [S, V] float32, last axis contiguous, overwritten; last_tokens: [S] int64, the input token of each
        row, for `rows.history`. Returns tokens [S] int64, and ok [S] bool: False where the row's logits were not all
        finite, or its options left no token to draw; its token is 0. Raises ValueError for other shapes."""
        size = logits.shape[0]
        if (
            logits.dim() != 2
            or logits.shape[1] != self._vocab_size
            or size > self._max_rows
            or size != rows.num_rows
            or last_tokens.shape != (size,)
            or logits.dtype is not torch.float32
            or logits.stride(1) != 1
        ):
            raise ValueError(
                f"logits {list(logits.shape)} {logits.dtype} and {list(last_tokens.shape)} last tokens do not fit "
                f"options of {rows.num_rows} rows, at most {self._max_rows}, and a vocabulary of {self._vocab_size}"
            )
        if masks is not None and (
            masks.places.shape != (size,)
            or masks.bits.shape[1:] != (-(-self._vocab_size // 32),)
            or masks.bits.dtype is not torch.int32
            or not masks.bits.is_contiguous()
        ):
            raise ValueError(f"masks {list(masks.bits.shape)} {masks.bits.dtype} do not fit {size} rows")
        tokens = torch.empty(size, dtype=torch.int64, device=logits.device)
        ok = torch.empty(size, dtype=torch.uint8, device=logits.device)
        if not size:
            return tokens, ok.view(torch.bool)
        edited = self._edit(logits, rows, last_tokens)
        shape: dict[str, Any] = {"VOCAB": self._vocab_size, "SPLITS": self._splits}
        tile = {"TILE": self._tiling.tile, "num_warps": min(8, max(1, self._tiling.tile // 256))}
        grid = (self._splits, size)
        found = (self._best, self._at, self._faults)
        masking = (self._at, self._at) if masks is None else (masks.places, masks.bits)
        peaks[grid](logits, logits.stride(0), *found, *masking, **shape, **tile, MASKED=masks is not None)
        shape |= {"BLOCK_S": triton.next_power_of_2(self._splits), "EDITED": edited}
        start = (logits, logits.stride(0), *found, self._removed)
        options, drawn = rows.options, rows.options is not None and rows.options.drawn.size > 0
        if options is None or not drawn:
            unused = (self._best, self._least, self._kept)
            pick[(size,)](*start, *unused, tokens, ok, **shape, **tile, DRAWN=False)
            return tokens, ok.view(torch.bool)
        own = options.device
        weigh[grid](*start, own, self._counts, self._sums, self._kept, **shape, **tile)
        if options.ranked(self._vocab_size).size:
            bins = (self._counts, self._sums, self._candidates)
            room = {"CANDIDATES": self._tiling.candidates}
            gather[grid](*start, own, *bins, **shape, **tile, **room)
            block = self._tiling.block
            warps = min(16, max(1, block // 256))
            select[(size,)](*start, own, *bins, self._least, **shape, **room, BLOCK=block, num_warps=warps)
            sum_kept[grid](*start, own, self._least, self._kept, **shape, **tile)
        pick[(size,)](*start, own, self._least, self._kept, tokens, ok, **shape, **tile, DRAWN=True)
        return tokens, ok.view(torch.bool)

    def warm_up(self) -> None:
        """Launch every program in each of its forms, so that all are compiled before a step needs them. While no draw
        is in flight."""
        device = self._best.device
        logits = torch.zeros(1, self._vocab_size, device=device)
        starts, last = (torch.zeros(size, dtype=torch.int64, device=device) for size in (2, 1))
        history, biases = History(starts, last, last), Biases(starts, last, torch.ones(1, device=device))
        host = np.full((1, len(Option)), 0.5)
        drawn, greedy = (Options(each, torch.from_numpy(each).to(device)) for each in (host, 0 * host))
        for (found, added), options in product(
            ((None, None), (None, biases), (history, biases)), (greedy, drawn)
        ):
            self.draw(logits, SampleRows(1, options, found, added), last)
        bits = torch.full((1, -(-self._vocab_size // 32)), -1, dtype=torch.int32, device=device)
        self.draw(logits, SampleRows(1), last, TokenMasks(last, last, bits))

    def _edit(self, logits: torch.Tensor, rows: SampleRows, last_tokens: torch.Tensor) -> bool:
        grid = (logits.shape[0],)
        history, biases = rows.history, rows.biases
        if history is not None:
            assert rows.options is not None, "penalties without options"
            penalise[grid](
                logits,
                logits.stride(0),
                history.starts,
                history.entries,
                rows.options.device,
                history.pending,
                last_tokens,
                self._removed,
                VOCAB=self._vocab_size,
                BLOCK=_EDIT_BLOCK,
                num_warps=4,
            )
        if biases is not None:
            add_bias[grid](
                logits,
                logits.stride(0),
                biases.starts,
                biases.tokens,
                biases.values,
                self._removed,
                ADD=history is not None,
                BLOCK=_EDIT_BLOCK,
                num_warps=4,
            )
        return history is not None or biases is not None
