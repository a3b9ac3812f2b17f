"""The causal convolution by channel in Triton: `convolve` of `loraplex.kernels.recurrent.torch_recurrent`."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from loraplex.kernels.recurrent import HEADER_BYTES, UNIT_BYTES, WINDOW
from loraplex.kernels.recurrent.types import RecurrentMemory, RecurrentRows

_BLOCK = 256
_TAPS = 4
"""The widest convolution."""
_WINDOW = tl.constexpr(WINDOW)
_HEADER = tl.constexpr(HEADER_BYTES // 8)
_UNIT = tl.constexpr(UNIT_BYTES // 8)


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    rows: RecurrentRows,
    memory: RecurrentMemory,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows of no unit hold anything. Raises ValueError where x, the weight or the memory do not fit, and for more than
    4 weights of a channel."""
    width, channels = weight.shape
    if (
        not 2 <= width <= _TAPS
        or x.shape[1] != channels
        or x.stride(1) != 1
        or not weight.is_contiguous()
        or memory.tails.shape[1:] != (width - 1, channels)
        or memory.tails.dtype is not x.dtype
    ):
        raise ValueError(
            f"x {list(x.shape)} {x.dtype}, a weight {list(weight.shape)} and tails of "
            f"{list(memory.tails.shape)} {memory.tails.dtype} do not fit"
        )
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows.most.units:
        convolve_program[(rows.most.chunks, triton.cdiv(channels, _BLOCK))](
            rows.table,
            x,
            weight,
            weight if bias is None else bias,
            memory.tails,
            memory.inputs,
            out,
            x.stride(0),
            memory.tails.stride(0),
            memory.inputs.stride(0),
            CHANNELS=channels,
            WIDTH=width,
            BLOCK=_BLOCK,
            HAS_BIAS=bias is not None,
            num_warps=2,
        )
    return out


@triton.jit
def convolve_program(
    table_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    tails_ptr,
    inputs_ptr,
    out_ptr,
    x_row,
    state_row,
    window_row,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """BLOCK channels of a chunk of a sequence: 16 of its rows, or what is left. The first chunk alone reads what was
    kept, so it is the one that writes what is to be kept, afterwards. Grid: chunks, channels ÷ BLOCK."""
    dtype = x_ptr.dtype.element_ty
    chunk = tl.program_id(0)
    if chunk >= tl.load(table_ptr + 1):
        return
    unit_ptr = table_ptr + _HEADER + tl.load(table_ptr + tl.load(table_ptr + 2) + chunk) * _UNIT
    rows_ptr = table_ptr + tl.load(unit_ptr)
    count = tl.load(unit_ptr + 1)
    start = tl.load(unit_ptr + 2)
    inputs_ptr += tl.load(unit_ptr + 3) * window_row
    tail_ptr = tails_ptr + tl.load(unit_ptr + 4) * state_row
    number = (chunk - tl.load(unit_ptr + 6)) * _WINDOW
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = c < CHANNELS
    x0 = tl.zeros([BLOCK], dtype)
    x1 = x0
    w0 = tl.zeros([BLOCK], tl.float32)
    w1 = w0
    if WIDTH > 3:
        x0 = _input(
            number - 3, rows_ptr, start, x_ptr, x_row, inputs_ptr, tail_ptr, c, there, CHANNELS, WIDTH
        )
        w0 = tl.load(weight_ptr + (WIDTH - 4) * CHANNELS + c, mask=there, other=0.0)
    if WIDTH > 2:
        x1 = _input(
            number - 2, rows_ptr, start, x_ptr, x_row, inputs_ptr, tail_ptr, c, there, CHANNELS, WIDTH
        )
        w1 = tl.load(weight_ptr + (WIDTH - 3) * CHANNELS + c, mask=there, other=0.0)
    x2 = _input(number - 1, rows_ptr, start, x_ptr, x_row, inputs_ptr, tail_ptr, c, there, CHANNELS, WIDTH)
    w2 = tl.load(weight_ptr + (WIDTH - 2) * CHANNELS + c, mask=there, other=0.0)
    w3 = tl.load(weight_ptr + (WIDTH - 1) * CHANNELS + c, mask=there, other=0.0)
    bias = tl.zeros([BLOCK], tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + c, mask=there, other=0.0)
    for own in range(number, tl.minimum(number + _WINDOW, count)):
        row = tl.load(rows_ptr + own)
        x3 = tl.load(x_ptr + row * x_row + c, mask=there, other=0.0)
        total = bias + x0.to(tl.float32) * w0 + x1.to(tl.float32) * w1 + x2.to(tl.float32) * w2
        total = (total + x3.to(tl.float32) * w3).to(dtype).to(tl.float32)
        tl.store(out_ptr + row * CHANNELS + c, (total / (1 + tl.exp(-total))).to(dtype), mask=there)
        # Of a narrower convolution the inputs before have no weight.
        if WIDTH > 3:
            x0 = x1
        if WIDTH > 2:
            x1 = x2
        x2 = x3
    if number == 0:
        tl.debug_barrier()
        targets_ptr = table_ptr + tl.load(unit_ptr + 5)
        for end in range((start // _WINDOW + 1) * _WINDOW - start, count + 1, _WINDOW):
            target = tl.load(targets_ptr)
            targets_ptr += 1
            # Of ends that write the same state the last one counts.
            if target != tl.load(targets_ptr, mask=end + _WINDOW <= count, other=-1):
                to = tails_ptr + target * state_row + c
                for step in tl.static_range(1, WIDTH):
                    x = _input(
                        end - step,
                        rows_ptr,
                        start,
                        x_ptr,
                        x_row,
                        inputs_ptr,
                        tail_ptr,
                        c,
                        there,
                        CHANNELS,
                        WIDTH,
                    )
                    tl.store(to + (WIDTH - 1 - step) * CHANNELS, x, mask=there)
        tl.debug_barrier()
        opened = tl.maximum((start + count) // _WINDOW * _WINDOW - start, 0)
        for own in range(opened, count):
            x = tl.load(x_ptr + tl.load(rows_ptr + own) * x_row + c, mask=there, other=0.0)
            tl.store(inputs_ptr + (start + own) % _WINDOW * CHANNELS + c, x, mask=there)


@triton.jit
def _input(
    number,
    rows_ptr,
    start,
    x_ptr,
    x_row,
    inputs_ptr,
    tail_ptr,
    c,
    there,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The input of a sequence's row `number` of this step, or before it: of the window, of the state, or 0."""
    behind = number + start % _WINDOW
    is_own = number >= 0
    is_kept = (number < 0) & (behind >= 0)
    row = tl.load(rows_ptr + number, mask=is_own, other=0)
    x = tl.load(x_ptr + row * x_row + c, mask=there & is_own, other=0.0)
    kept = tl.load(inputs_ptr + behind * CHANNELS + c, mask=there & is_kept, other=0.0)
    is_before = (behind < 0) & (start >= _WINDOW)
    tail = tl.load(tail_ptr + (WIDTH - 1 + behind) * CHANNELS + c, mask=there & is_before, other=0.0)
    return tl.where(is_own, x, tl.where(is_kept, kept, tail))
