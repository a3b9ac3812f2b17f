"""The Triton programs that change single logits before a draw: penalties, then biases and barred tokens.

Both walk one list a row, in which no token occurs twice, so that no order matters. A logit that was finite and becomes
-inf is counted in `removed`: any other -inf is an error of the model's.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from loraplex.kernels.sampling.triton_programs import option
from loraplex.kernels.sampling.types import TOKEN_BITS as _TOKEN_BITS
from loraplex.kernels.sampling.types import Option

TOKEN_BITS = tl.constexpr(_TOKEN_BITS)
TOKEN_MASK = tl.constexpr((1 << _TOKEN_BITS) - 1)
_REPETITION = tl.constexpr(Option.REPETITION_PENALTY.value)
_PRESENCE = tl.constexpr(Option.PRESENCE_PENALTY.value)
_FREQUENCY = tl.constexpr(Option.FREQUENCY_PENALTY.value)
# Where these lie in a step's one copy is another place in every step: nothing is compiled for it.
_LISTS = (
    "starts_ptr",
    "entries_ptr",
    "options_ptr",
    "pending_ptr",
    "last_ptr",
    "tokens_ptr",
    "values_ptr",
)


@triton.jit
def _penalised(x, count, repetition, presence, frequency):
    x = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    return x - count.to(tl.float32) * frequency - (count > 0).to(tl.float32) * presence


@triton.jit(do_not_specialize_on_alignment=_LISTS)
def penalise(
    logits_ptr,
    logits_row,
    starts_ptr,
    entries_ptr,
    options_ptr,
    pending_ptr,
    last_ptr,
    removed_ptr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row's penalties on logits [S, VOCAB], in place; removed [S] int32. Grid: rows."""
    row = tl.program_id(0)
    begin = tl.load(starts_ptr + row)
    end = tl.load(starts_ptr + row + 1)
    repetition = option(options_ptr, row, _REPETITION).to(tl.float32)
    presence = option(options_ptr, row, _PRESENCE).to(tl.float32)
    frequency = option(options_ptr, row, _FREQUENCY).to(tl.float32)
    # A token that is no token of the row stands for none.
    last = tl.where(tl.load(pending_ptr + row) != 0, tl.load(last_ptr + row), -1)
    last = tl.where(last < VOCAB, last, -1)
    x_ptr = logits_ptr + row.to(tl.int64) * logits_row
    removed = tl.zeros([BLOCK], tl.int32)
    seen = tl.zeros([BLOCK], tl.int32)
    for first in range(begin, end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        there = at < end
        entry = tl.load(entries_ptr + at, mask=there, other=0)
        token = entry & TOKEN_MASK
        is_last = there & (token == last)
        count = (entry >> TOKEN_BITS) + is_last.to(tl.int64)
        x = tl.load(x_ptr + token, mask=there, other=0.0)
        y = _penalised(x, count, repetition, presence, frequency)
        tl.store(x_ptr + token, y, mask=there)
        removed += (there & (x > float("-inf")) & (y == float("-inf"))).to(tl.int32)
        seen += is_last.to(tl.int32)
    total = tl.sum(removed, 0)
    if (last >= 0) & (tl.sum(seen, 0) == 0):
        x = tl.load(x_ptr + last)
        y = _penalised(x, tl.full((), 1, tl.int64), repetition, presence, frequency)
        tl.store(x_ptr + last, y)
        total += ((x > float("-inf")) & (y == float("-inf"))).to(tl.int32)
    tl.store(removed_ptr + row, total)


@triton.jit(do_not_specialize_on_alignment=_LISTS)
def add_bias(
    logits_ptr,
    logits_row,
    starts_ptr,
    tokens_ptr,
    values_ptr,
    removed_ptr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row's biases, in place. ADD: `removed` already holds the penalties' count. Grid: rows."""
    row = tl.program_id(0)
    begin = tl.load(starts_ptr + row)
    end = tl.load(starts_ptr + row + 1)
    x_ptr = logits_ptr + row.to(tl.int64) * logits_row
    removed = tl.zeros([BLOCK], tl.int32)
    for first in range(begin, end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        there = at < end
        token = tl.load(tokens_ptr + at, mask=there, other=0)
        x = tl.load(x_ptr + token, mask=there, other=0.0)
        y = x + tl.load(values_ptr + at, mask=there, other=0.0)
        tl.store(x_ptr + token, y, mask=there)
        removed += (there & (x > float("-inf")) & (y == float("-inf"))).to(tl.int32)
    total = tl.sum(removed, 0)
    if ADD:
        total += tl.load(removed_ptr + row)
    tl.store(removed_ptr + row, total)
