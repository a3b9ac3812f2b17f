"""The Triton programs that sample a token a row; `loraplex.kernels.sampling.triton_sampling` launches them in this
order:

    peaks     of each tile of each row: the largest logit, where it first is, and what is not finite; before, what the
              row's mask bars becomes -inf
    weigh     w = exp((x - largest) / temperature), 1 at most. The tile's sum; or, where top_k or top_p must be found,
              how many weights reach each of a few fixed pivots, and their sums
    gather    the logits whose weights reach the largest pivot that the threshold can't lie below, side by side
    select    the least weight that top_k and top_p let through, by bisection
    sum_kept  the tile's sum of the weights that it lets through
    pick      the token at which the running sum, in the order of the vocabulary, exceeds uniform · the whole sum

No vocabulary is sorted, and no program waits for another: each launch reads what those before it wrote.

Weights are compared by their bits as int32, which for numbers that are not negative have their order. They are added
as int64 multiples of 2^-44, rounded down: whole numbers have one sum in whatever order they are added, so that tiles
and neighbours do not matter, and fewer than 2^19 weights fit into 63 bits. What is lost to rounding, 2^-26 of the whole
at most for 2^18 tokens, is less than a float32 weight's own error; a token whose weight is below 2^-44 of the best
one's is never drawn.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from loraplex.kernels.sampling.types import Option

PIVOTS = tl.constexpr(8)
"""Weights of 2^-1, 2^-2, 2^-4, 2^-7, 2^-11, 2^-16, 2^-22, and 0, which every weight reaches."""
_ONE = tl.constexpr(0x3F800000)
_UNIT = tl.constexpr(2.0**44)
_WRONG = tl.constexpr(1 << 20)
"""The number that a tile adds to a row's faults for NaN or +inf: more than a vocabulary has tokens to be -inf."""
# Where in a step's one copy a row's options lie is another place in every step: nothing is compiled for it.
_OPTIONS = ("options_ptr",)
NUM_OPTIONS = tl.constexpr(len(Option))
_TEMPERATURE = tl.constexpr(Option.TEMPERATURE.value)
_TOP_K = tl.constexpr(Option.TOP_K.value)
_TOP_P = tl.constexpr(Option.TOP_P.value)
_MIN_P = tl.constexpr(Option.MIN_P.value)
_UNIFORM = tl.constexpr(Option.UNIFORM.value)
_MASKS = ("places_ptr",)


@triton.jit
def option(options_ptr, row, COLUMN: tl.constexpr):
    """A row's option, float64."""
    return tl.load(options_ptr + row * NUM_OPTIONS + COLUMN)


@triton.jit
def _weights(x, best, temperature):
    w = tl.minimum(tl.exp(tl.div_rn(x - best, temperature)), 1.0)
    return tl.where(w >= 0, w, 0.0)  # NaN is what -inf at an infinite temperature gives


@triton.jit
def _key(w):
    return w.to(tl.int32, bitcast=True)


@triton.jit
def _fixed(w):
    return (w * _UNIT).to(tl.int64)


@triton.jit
def _pivot(j):
    return tl.where(j == PIVOTS - 1, 0, (126 - j * (j + 1) // 2) << 23)


@triton.jit
def _ranks(options_ptr, row):
    return option(options_ptr, row, _TOP_K).to(tl.int64), option(options_ptr, row, _TOP_P)


@triton.jit
def _is_ranked(top_k, top_p, VOCAB: tl.constexpr):
    return ((top_k > 0) & (top_k < VOCAB)) | (top_p < 1.0)


@triton.jit
def _peak(
    best_ptr,
    at_ptr,
    faults_ptr,
    removed_ptr,
    row,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    EDITED: tl.constexpr,
):
    """A row's largest logit, where it first is, and whether the row can be drawn from."""
    s = tl.arange(0, BLOCK_S)
    there = s < SPLITS
    bests = tl.load(best_ptr + row * SPLITS + s, mask=there, other=float("-inf"))
    ats = tl.load(at_ptr + row * SPLITS + s, mask=there, other=0)
    faults = tl.sum(tl.load(faults_ptr + row * SPLITS + s, mask=there, other=0), 0)
    best = tl.max(bests, 0)
    at = tl.min(tl.where(there & (bests == best), ats, 2147483647), 0)
    if EDITED:
        faults -= tl.load(removed_ptr + row)
    return best, at, (faults == 0) & (best > float("-inf"))


@triton.jit(do_not_specialize_on_alignment=_MASKS)
def peaks(
    logits_ptr,
    logits_row,
    best_ptr,
    at_ptr,
    faults_ptr,
    places_ptr,
    bits_ptr,
    VOCAB: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """best float32, at and faults int32 [S, SPLITS]. With MASKED: places int64 [S], bits int32 [C, ⌈VOCAB / 32⌉]; what
    a mask bars is no fault. Grid: SPLITS, rows."""
    split, row = tl.program_id(0), tl.program_id(1)
    c = split * TILE + tl.arange(0, TILE)
    there = c < VOCAB
    x = tl.load(logits_ptr + row.to(tl.int64) * logits_row + c, mask=there, other=float("-inf"))
    wrong = there & ~(x < float("inf"))  # NaN as well
    removed = there & (x == float("-inf"))
    x = tl.where(wrong, float("-inf"), x)
    if MASKED:
        place = tl.load(places_ptr + row)
        if place >= 0:
            words = bits_ptr + place * ((VOCAB + 31) // 32)
            word = tl.load(words + c // 32, mask=there, other=0)
            x = tl.where(((word >> (c % 32)) & 1) != 0, x, float("-inf"))
            tl.store(logits_ptr + row.to(tl.int64) * logits_row + c, x, mask=there)
    best = tl.max(x, 0)
    faults = tl.sum(removed.to(tl.int32), 0) + tl.max(wrong.to(tl.int32), 0) * _WRONG
    tl.store(best_ptr + row * SPLITS + split, best)
    tl.store(at_ptr + row * SPLITS + split, tl.min(tl.where(x == best, c, VOCAB), 0))
    tl.store(faults_ptr + row * SPLITS + split, faults)


@triton.jit(do_not_specialize_on_alignment=_OPTIONS)
def weigh(
    logits_ptr,
    logits_row,
    best_ptr,
    at_ptr,
    faults_ptr,
    removed_ptr,
    options_ptr,
    counts_ptr,
    sums_ptr,
    kept_ptr,
    VOCAB: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    TILE: tl.constexpr,
    EDITED: tl.constexpr,
):
    """counts int32 and sums int64 [S, PIVOTS, SPLITS] of ranked rows, kept int64 [S, SPLITS] of others. Grid: SPLITS,
    rows."""
    split, row = tl.program_id(0), tl.program_id(1)
    temperature = option(options_ptr, row, _TEMPERATURE).to(tl.float32)
    best, _at, ok = _peak(best_ptr, at_ptr, faults_ptr, removed_ptr, row, SPLITS, BLOCK_S, EDITED)
    if (temperature > 0) & ok:
        c = split * TILE + tl.arange(0, TILE)
        there = c < VOCAB
        x = tl.load(logits_ptr + row.to(tl.int64) * logits_row + c, mask=there, other=float("-inf"))
        w = _weights(x, best, temperature)
        q = _fixed(w)
        top_k, top_p = _ranks(options_ptr, row)
        if _is_ranked(top_k, top_p, VOCAB):
            key = tl.where(there, _key(w), -1)
            to = row * PIVOTS * SPLITS + split
            for j in tl.static_range(PIVOTS):
                over = key >= _pivot(j)
                tl.store(counts_ptr + to + j * SPLITS, tl.sum(over.to(tl.int32), 0))
                tl.store(sums_ptr + to + j * SPLITS, tl.sum(tl.where(over, q, 0), 0))
        else:
            kept = w >= option(options_ptr, row, _MIN_P).to(tl.float32)
            tl.store(kept_ptr + row * SPLITS + split, tl.sum(tl.where(kept, q, 0), 0))


@triton.jit
def _bin(
    counts_ptr, sums_ptr, top_k, top_p, row,
    VOCAB: tl.constexpr, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """The number of the largest pivot that enough of a ranked row's weights reach, how many do, their sum, and the sum
    of all. With top_k alone or with top_p that is top_k's, for what top_p asks for depends on it."""
    j = tl.arange(0, PIVOTS)
    s = tl.arange(0, BLOCK_S)
    at = (row * PIVOTS + j)[:, None] * SPLITS + s[None, :]
    there = (s < SPLITS)[None, :] & (j < PIVOTS)[:, None]
    counts = tl.sum(tl.load(counts_ptr + at, mask=there, other=0), 1)
    sums = tl.sum(tl.load(sums_ptr + at, mask=there, other=0), 1)
    whole = tl.max(sums, 0)
    need = top_p * whole.to(tl.float64)
    by_k = tl.sum((counts < top_k).to(tl.int32), 0)
    by_p = tl.sum((sums.to(tl.float64) < need).to(tl.int32), 0)
    number = tl.where((top_k > 0) & (top_k < VOCAB), by_k, by_p)
    count = tl.sum(tl.where(j == number, counts, 0), 0)
    reached = tl.sum(tl.where(j == number, sums, 0), 0)
    return number, count, reached, whole


@triton.jit(do_not_specialize_on_alignment=_OPTIONS)
def gather(
    logits_ptr,
    logits_row,
    best_ptr,
    at_ptr,
    faults_ptr,
    removed_ptr,
    options_ptr,
    counts_ptr,
    sums_ptr,
    candidates_ptr,
    VOCAB: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    TILE: tl.constexpr,
    EDITED: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """candidates [S, CANDIDATES] float32: logits of ranked rows in the order of the vocabulary, unless there are more.
    Grid: SPLITS, rows."""
    split, row = tl.program_id(0), tl.program_id(1)
    temperature = option(options_ptr, row, _TEMPERATURE).to(tl.float32)
    top_k, top_p = _ranks(options_ptr, row)
    best, _at, ok = _peak(best_ptr, at_ptr, faults_ptr, removed_ptr, row, SPLITS, BLOCK_S, EDITED)
    if (temperature > 0) & ok & _is_ranked(top_k, top_p, VOCAB):
        number, count, _reached, _whole = _bin(
            counts_ptr, sums_ptr, top_k, top_p, row, VOCAB, SPLITS, BLOCK_S
        )
        s = tl.arange(0, BLOCK_S)
        here_ptr = counts_ptr + (row * PIVOTS + number) * SPLITS
        before = tl.sum(tl.load(here_ptr + s, mask=s < split, other=0), 0)
        if (count <= CANDIDATES) & (tl.load(here_ptr + split) > 0):
            c = split * TILE + tl.arange(0, TILE)
            there = c < VOCAB
            x = tl.load(logits_ptr + row.to(tl.int64) * logits_row + c, mask=there, other=float("-inf"))
            over = there & (_key(_weights(x, best, temperature)) >= _pivot(number))
            place = before + tl.cumsum(over.to(tl.int32), 0) - 1
            tl.store(candidates_ptr + row.to(tl.int64) * CANDIDATES + place, x, mask=over)


@triton.jit
def _tally(x_ptr, size, least, best, temperature, BLOCK: tl.constexpr):
    """Tallies of the logits x [size]: how many weights have keys of `least` or more, their sum, the least of these
    keys, and the largest of the others."""
    count = tl.zeros([BLOCK], tl.int32)
    total = tl.zeros([BLOCK], tl.int64)
    above = tl.full([BLOCK], 2147483647, tl.int32)
    below = tl.full([BLOCK], -1, tl.int32)
    for first in range(0, size, BLOCK):
        at = first + tl.arange(0, BLOCK)
        there = at < size
        w = _weights(tl.load(x_ptr + at, mask=there, other=float("-inf")), best, temperature)
        key = _key(w)
        over = there & (key >= least)
        count += over.to(tl.int32)
        total += tl.where(over, _fixed(w), 0)
        above = tl.minimum(above, tl.where(over, key, 2147483647))
        below = tl.maximum(below, tl.where(there & (key < least), key, -1))
    return tl.sum(count, 0), tl.sum(total, 0), tl.min(above, 0), tl.max(below, 0)


@triton.jit(do_not_specialize_on_alignment=_OPTIONS)
def select(
    logits_ptr,
    logits_row,
    best_ptr,
    at_ptr,
    faults_ptr,
    removed_ptr,
    options_ptr,
    counts_ptr,
    sums_ptr,
    candidates_ptr,
    least_ptr,
    VOCAB: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    EDITED: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """least [S] int32: the key of the least weight that a ranked row lets through. Grid: rows.

    The bisection jumps from one key that occurs to another, so that it takes about as many turns as the candidates'
    number has bits, and 30 at most. A row whose candidates did not fit is read as a whole in each.
    """
    row = tl.program_id(0)
    temperature = option(options_ptr, row, _TEMPERATURE).to(tl.float32)
    top_k, top_p = _ranks(options_ptr, row)
    best, _at, ok = _peak(best_ptr, at_ptr, faults_ptr, removed_ptr, row, SPLITS, BLOCK_S, EDITED)
    if (temperature > 0) & ok & _is_ranked(top_k, top_p, VOCAB):
        number, size, reached, whole = _bin(counts_ptr, sums_ptr, top_k, top_p, row, VOCAB, SPLITS, BLOCK_S)
        if size <= CANDIDATES:
            x_ptr = candidates_ptr + row.to(tl.int64) * CANDIDATES
        else:
            x_ptr = logits_ptr + row.to(tl.int64) * logits_row
        size = tl.where(size <= CANDIDATES, size, VOCAB)
        # Enough weights have keys of `low` or more, too few have keys of `high` or more.
        low = _pivot(number)
        high = tl.where(number > 0, _pivot(number - 1), _ONE + 1)
        if (top_k > 0) & (top_k < VOCAB):
            while high - low > 1:
                middle = low + (high - low) // 2
                count, total, above, below = _tally(x_ptr, size, middle, best, temperature, BLOCK)
                enough = count >= top_k
                low = tl.where(enough, above, low)
                reached = tl.where(enough, total, reached)
                high = tl.where(enough, high, below + 1)
            # top_p shares out what top_k left.
            whole = reached
            high = _ONE + 1
        if top_p < 1.0:
            need = top_p * whole.to(tl.float64)
            while high - low > 1:
                middle = low + (high - low) // 2
                _count, total, above, below = _tally(x_ptr, size, middle, best, temperature, BLOCK)
                enough = total.to(tl.float64) >= need
                low = tl.where(enough, above, low)
                high = tl.where(enough, high, below + 1)
        tl.store(least_ptr + row, low)


@triton.jit(do_not_specialize_on_alignment=_OPTIONS)
def sum_kept(
    logits_ptr,
    logits_row,
    best_ptr,
    at_ptr,
    faults_ptr,
    removed_ptr,
    options_ptr,
    least_ptr,
    kept_ptr,
    VOCAB: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    TILE: tl.constexpr,
    EDITED: tl.constexpr,
):
    """kept int64 [S, SPLITS] of ranked rows. Grid: SPLITS, rows."""
    split, row = tl.program_id(0), tl.program_id(1)
    temperature = option(options_ptr, row, _TEMPERATURE).to(tl.float32)
    best, _at, ok = _peak(best_ptr, at_ptr, faults_ptr, removed_ptr, row, SPLITS, BLOCK_S, EDITED)
    top_k, top_p = _ranks(options_ptr, row)
    ranked = _is_ranked(top_k, top_p, VOCAB)
    if (temperature > 0) & ok & ranked:
        c = split * TILE + tl.arange(0, TILE)
        there = c < VOCAB
        x = tl.load(logits_ptr + row.to(tl.int64) * logits_row + c, mask=there, other=float("-inf"))
        w = _weights(x, best, temperature)
        kept = (_key(w) >= tl.load(least_ptr + row)) & (w >= option(options_ptr, row, _MIN_P).to(tl.float32))
        tl.store(kept_ptr + row * SPLITS + split, tl.sum(tl.where(kept, _fixed(w), 0), 0))


@triton.jit(do_not_specialize_on_alignment=_OPTIONS)
def pick(
    logits_ptr,
    logits_row,
    best_ptr,
    at_ptr,
    faults_ptr,
    removed_ptr,
    options_ptr,
    least_ptr,
    kept_ptr,
    tokens_ptr,
    ok_ptr,
    VOCAB: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    TILE: tl.constexpr,
    EDITED: tl.constexpr,
    DRAWN: tl.constexpr,
):
    """tokens [S] int64, ok [S] uint8. Without DRAWN all rows are greedy. Grid: rows."""
    row = tl.program_id(0)
    best, at, ok = _peak(best_ptr, at_ptr, faults_ptr, removed_ptr, row, SPLITS, BLOCK_S, EDITED)
    token = tl.where(ok, at, 0)
    if DRAWN:
        temperature = option(options_ptr, row, _TEMPERATURE).to(tl.float32)
        if (temperature > 0) & ok:
            s = tl.arange(0, BLOCK_S)
            kept = tl.load(kept_ptr + row * SPLITS + s, mask=s < SPLITS, other=0)
            whole = tl.sum(kept, 0)
            target = (option(options_ptr, row, _UNIFORM) * whole.to(tl.float64)).to(tl.int64)
            # Numbers of more than 53 bits may have been rounded up.
            target = tl.minimum(target, whole - 1)
            split = tl.sum(((tl.cumsum(kept, 0) <= target) & (s < SPLITS)).to(tl.int32), 0)
            before = tl.sum(tl.where(s < split, kept, 0), 0)
            c = split * TILE + tl.arange(0, TILE)
            there = c < VOCAB
            x = tl.load(logits_ptr + row.to(tl.int64) * logits_row + c, mask=there, other=float("-inf"))
            w = _weights(x, best, temperature)
            least = 0
            top_k, top_p = _ranks(options_ptr, row)
            if _is_ranked(top_k, top_p, VOCAB):
                least = tl.load(least_ptr + row)
            let = (_key(w) >= least) & (w >= option(options_ptr, row, _MIN_P).to(tl.float32))
            running = before + tl.cumsum(tl.where(let, _fixed(w), 0), 0)
            token = split * TILE + tl.sum((running <= target).to(tl.int32), 0)
    tl.store(tokens_ptr + row, token.to(tl.int64))
    tl.store(ok_ptr + row, ok.to(tl.uint8))
