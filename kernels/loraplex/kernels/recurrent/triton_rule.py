"""The gated delta rule and Mamba-2's in Triton: `rule` of
`loraplex.kernels.recurrent.torch_recurrent`.

A program has 32 columns of a value head's state in registers and computes a sequence's rows one after the other, a
decoded row by the instructions of a prompt's: a row has the same bits in any step. Keys of the open window are common
to all programs of a head. Where a step ends a window and begins another, a second launch writes them, for programs of
the first may not have read those before them.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from loraplex.kernels.recurrent import COLUMNS, HEADER_BYTES, SMALLEST, UNIT_BYTES, WINDOW
from loraplex.kernels.recurrent.types import RecurrentHeads, RecurrentMemory, RecurrentRows, check_operands

_COLUMNS = tl.constexpr(COLUMNS)
_WINDOW = tl.constexpr(WINDOW)
_HEADER = tl.constexpr(HEADER_BYTES // 8)
_UNIT = tl.constexpr(UNIT_BYTES // 8)
_SMALLEST = tl.constexpr(SMALLEST)
_EPS = tl.constexpr(1e-6)


def rule(
    x: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    rows: RecurrentRows,
    memory: RecurrentMemory,
    heads: RecurrentHeads,
    skip: torch.Tensor | None = None,
) -> torch.Tensor:
    """See the module. Rows of no unit hold anything. Raises ValueError where the tensors do not fit."""
    check_operands(x, decay, beta, skip, heads)
    out = torch.empty(len(x), heads.value_heads * heads.value_dim, dtype=x.dtype, device=x.device)
    most = rows.most
    if not most.units:
        return out
    keys, sizes = memory.keys, {"KEY_HEADS": heads.key_heads, "VALUE_HEADS": heads.value_heads}
    block = triton.next_power_of_2(heads.key_dim)
    sizes |= {"KEY_DIM": heads.key_dim, "BLOCK_K": block}
    # Of the last, open window of sequences that ended another one.
    new_keys = keys.new_empty((len(x), heads.key_heads, heads.key_dim)) if most.begins_windows else keys
    strips = heads.value_dim // COLUMNS
    rule_program[(most.units * heads.value_heads * strips,)](
        rows.table,
        x,
        decay,
        beta,
        decay if skip is None else skip,
        memory.states,
        keys,
        memory.updates,
        memory.decays,
        new_keys,
        out,
        memory.states.stride(0),
        keys.stride(0),
        heads.key_dim**-0.5,
        *heads.first_columns(delta=skip is None),
        STRIPS=strips,
        DELTA=skip is None,
        **sizes,
        # A thread has 64 numbers of the state.
        num_warps=max(1, block // 64),
        num_stages=1,
    )
    if most.begins_windows:
        keep_program[(most.units * heads.value_heads,)](
            rows.table, decay, new_keys, keys, memory.decays, keys.stride(0), **sizes, num_warps=1
        )
    return out


@triton.jit
def rule_program(
    table_ptr,
    x_ptr,
    decay_ptr,
    beta_ptr,
    skip_ptr,
    states_ptr,
    keys_ptr,
    updates_ptr,
    decays_ptr,
    new_keys_ptr,
    out_ptr,
    state_row,
    window_row,
    query_scale,
    query_at,
    key_at,
    value_at,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STRIPS: tl.constexpr,
    DELTA: tl.constexpr,
):
    """32 columns of a value head of a sequence, by the delta rule or by Mamba-2's. Grid: units · VALUE_HEADS · STRIPS.
    Strides are in float32s."""
    strip = tl.program_id(0) % STRIPS
    head = tl.program_id(0) // STRIPS % VALUE_HEADS
    unit = tl.program_id(0) // (STRIPS * VALUE_HEADS)
    if unit >= tl.load(table_ptr):
        return
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    unit_ptr = table_ptr + _HEADER + unit * _UNIT
    rows_ptr = table_ptr + tl.load(unit_ptr)
    count = tl.load(unit_ptr + 1)
    start = tl.load(unit_ptr + 2)
    window = tl.load(unit_ptr + 3) * window_row
    targets_ptr = table_ptr + tl.load(unit_ptr + 5)
    first = (start % _WINDOW).to(tl.int32)
    k = tl.arange(0, BLOCK_K)
    c = tl.arange(0, _COLUMNS)
    places = tl.arange(0, _WINDOW)
    is_key = k < KEY_DIM
    own_strip = head * STRIPS + strip
    tile = own_strip * KEY_DIM * _COLUMNS + k[:, None] * _COLUMNS + c[None, :]
    known = is_key[:, None] & (start >= _WINDOW)
    state = tl.load(states_ptr + tl.load(unit_ptr + 4) * state_row + tile, mask=known, other=0.0)
    before = places[:, None] < first
    keys_ptr += window + key_head * _WINDOW * KEY_DIM
    keys = tl.load(
        keys_ptr + places[:, None] * KEY_DIM + k[None, :], mask=before & is_key[None, :], other=0.0
    )
    updates_ptr += window + own_strip * _WINDOW * _COLUMNS
    updates = tl.load(updates_ptr + places[:, None] * _COLUMNS + c[None, :], mask=before, other=0.0)
    decays_ptr += window + head * _WINDOW
    own = tl.full([], 1.0, tl.float32)
    behind = tl.full([_WINDOW], 1.0, tl.float32)
    for past in tl.static_range(_WINDOW - 1):
        own, behind = _decayed(own, behind, places, past, tl.load(decays_ptr + past, past < first, 1.0))
    # Whether other programs of the head may still read the window that this step's rows lie over.
    begins = first + count > _WINDOW
    is_first = (strip == 0) & (head % (VALUE_HEADS // KEY_HEADS) == 0)
    for opened in range(0, first + count, _WINDOW):
        last = tl.minimum(first + count - opened, _WINDOW)
        for place in range(tl.maximum(first - opened, 0), last):
            row = tl.load(rows_ptr + opened + place - first)
            x_row = x_ptr + row * (2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * STRIPS * _COLUMNS)
            own_key = x_row + key_head * KEY_DIM + k
            query = tl.load(own_key + query_at, mask=is_key, other=0.0).to(tl.float32)
            key = tl.load(own_key + key_at, mask=is_key, other=0.0).to(tl.float32)
            if DELTA:
                query, key = _unit_length(query) * query_scale, _unit_length(key)
            value = tl.load(x_row + value_at + own_strip * _COLUMNS + c).to(tl.float32)
            decay = tl.load(decay_ptr + row * VALUE_HEADS + head)
            own, behind = _decayed(own, behind, places, place, decay)
            is_row = places[:, None] == place
            keys = tl.where(is_row, key[None, :], keys)
            by_query = tl.where(places <= place, behind * tl.sum(keys * query[None, :], 1), 0.0)
            update = value
            if DELTA:
                by_key = tl.where(places < place, behind * tl.sum(keys * key[None, :], 1), 0.0)
                update -= own * tl.sum(state * key[:, None], 0) + tl.sum(updates * by_key[:, None], 0)
            update *= tl.load(beta_ptr + row * VALUE_HEADS + head)
            updates = tl.where(is_row, update[None, :], updates)
            answer = own * tl.sum(state * query[:, None], 0) + tl.sum(updates * by_query[:, None], 0)
            if not DELTA:
                answer += tl.load(skip_ptr + head) * value
            out_row = out_ptr + row * VALUE_HEADS * STRIPS * _COLUMNS + own_strip * _COLUMNS
            tl.store(out_row + c, answer.to(out_ptr.dtype.element_ty))
            tl.store(updates_ptr + place * _COLUMNS + c, update)
            if is_first & begins:
                tl.store(new_keys_ptr + (row * KEY_HEADS + key_head) * KEY_DIM + k, key, mask=is_key)
            if (not begins) & is_first:
                tl.store(keys_ptr + place * KEY_DIM + k, key, mask=is_key)
            if (not begins) & (strip == 0):
                tl.store(decays_ptr + place, decay)
        if last == _WINDOW:
            scaled = tl.trans(keys * behind[:, None])
            state = tl.dot(scaled, updates, state * own, input_precision="ieee")
            target = tl.load(targets_ptr + opened // _WINDOW)
            tl.store(states_ptr + target * state_row + tile, state, mask=is_key[:, None])
            own = tl.full([], 1.0, tl.float32)
            behind = tl.full([_WINDOW], 1.0, tl.float32)


@triton.jit
def keep_program(
    table_ptr,
    decay_ptr,
    new_keys_ptr,
    keys_ptr,
    decays_ptr,
    window_row,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Keys and decays of the open window of a sequence whose rows ended another one. Grid: units · VALUE_HEADS."""
    head = tl.program_id(0) % VALUE_HEADS
    unit = tl.program_id(0) // VALUE_HEADS
    if unit >= tl.load(table_ptr):
        return
    unit_ptr = table_ptr + _HEADER + unit * _UNIT
    rows_ptr = table_ptr + tl.load(unit_ptr)
    count = tl.load(unit_ptr + 1)
    first = tl.load(unit_ptr + 2) % _WINDOW
    window = tl.load(unit_ptr + 3) * window_row
    end = (first + count) % _WINDOW
    places = tl.arange(0, _WINDOW)
    is_kept = (places < end) & (first + count > _WINDOW)
    rows = tl.load(rows_ptr + count - end + places, mask=is_kept, other=0)
    decay = tl.load(decay_ptr + rows * VALUE_HEADS + head, mask=is_kept, other=0.0)
    tl.store(decays_ptr + window + head * _WINDOW + places, decay, mask=is_kept)
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    k = tl.arange(0, BLOCK_K)[None, :]
    is_key = is_kept[:, None] & (k < KEY_DIM) & (head % (VALUE_HEADS // KEY_HEADS) == 0)
    key = tl.load(new_keys_ptr + (rows[:, None] * KEY_HEADS + key_head) * KEY_DIM + k, mask=is_key, other=0.0)
    to = keys_ptr + window + (key_head * _WINDOW + places[:, None]) * KEY_DIM
    tl.store(to + k, key, mask=is_key)


@triton.jit
def _decayed(own, behind, places, place, decay):
    """The coefficients of the state, and of the updates before `place`, one position on."""
    return _kept(own * decay), tl.where(places < place, _kept(behind * decay), behind)


@triton.jit
def _kept(coefficient):
    return tl.where(coefficient < _SMALLEST, 0.0, coefficient)


@triton.jit
def _unit_length(x):
    return x * tl.rsqrt(tl.sum(x * x, 0) + _EPS)
