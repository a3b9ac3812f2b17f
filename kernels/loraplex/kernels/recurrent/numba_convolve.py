"""The causal convolution by channel on a CPU, compiled by numba: `convolve` of
`loraplex.kernels.recurrent.torch_recurrent`."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

import numpy as np
import torch

from loraplex.kernels.numba_runtime.thread_team import SMALL, Kernel, take_unit
from loraplex.kernels.numba_runtime.vectors import (
    LIKE,
    exp,
    fma,
    jit,
    load,
    read_int64,
    rounded,
    size_of,
    splat,
    store,
)
from loraplex.kernels.recurrent import HEADER_BYTES, UNIT_BYTES, WINDOW
from loraplex.kernels.recurrent.types import RecurrentMemory, RecurrentRows

_F32, _ONE = np.float32(0), np.float32(1)
_PART = 512
"""Channels of a unit of work: their weights and the last inputs stay in the nearest cache."""
_TAPS = 4
"""The widest convolution: narrower ones begin with weights of zero."""


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    rows: RecurrentRows,
    memory: RecurrentMemory,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Raises ValueError where x, the weight or the memory do not fit, and for more than 4 weights of a channel or
    channels that are no multiple of 16."""
    width, channels = weight.shape
    if (
        width > _TAPS
        or channels % 16
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
    out = torch.empty(x.shape, dtype=x.dtype)
    size = x.element_size()
    _convolve_all.run(
        (LIKE[x.dtype],),
        rows.address,
        x.data_ptr(),
        x.stride(0) * size,
        out.data_ptr(),
        weight.data_ptr(),
        width,
        0 if bias is None else bias.data_ptr(),
        channels,
        memory.tails.data_ptr(),
        memory.tails.stride(0) * size,
        memory.inputs.data_ptr(),
        memory.inputs.stride(0) * size,
        alone=x.numel() <= SMALL // 4,
    )
    return out


@jit
def _copy(source, target, channels, like):
    for c in range(0, channels, 16):
        store(load(source + c * size_of(like), like), target + c * size_of(like), like)


@jit
def _convolve_row(x0, x1, x2, x3, w0, w1, w2, w3, bias, out, channels, like):
    size, one = size_of(like), splat(_ONE)
    for c in range(0, channels, 16):
        at, own = c * size, c * 4
        total = fma(load(x0 + at, like), load(w0 + own, _F32), load(bias + own, _F32))
        total = fma(load(x1 + at, like), load(w1 + own, _F32), total)
        total = fma(load(x2 + at, like), load(w2 + own, _F32), total)
        total = rounded(fma(load(x3 + at, like), load(w3 + own, _F32), total), like)
        store(total / (one + exp(splat(_F32) - total)), out + at, like)


@jit
def _before(step, start, width, inputs, tail, row_bytes, zeros):
    """The address of the input `step` positions before a sequence's first row of this step."""
    behind = start % WINDOW
    if step >= width or step > start:
        return zeros
    if step <= behind:
        return inputs + (behind - step) * row_bytes
    return tail + (width - 1 - step + behind) * row_bytes


def _convolve_units(team, arguments, like):
    table, x, x_row, out = (read_int64(arguments), read_int64(arguments + 8), read_int64(arguments + 16),
                            read_int64(arguments + 24))  # fmt: skip
    weight, width, bias = read_int64(arguments + 32), read_int64(arguments + 40), read_int64(arguments + 48)
    channels, tails, tail_row = (read_int64(arguments + 56), read_int64(arguments + 64),
                                 read_int64(arguments + 72))  # fmt: skip
    all_inputs, window_row = read_int64(arguments + 80), read_int64(arguments + 88)
    size, parts = size_of(like), (channels + _PART - 1) // _PART
    row_bytes = channels * size
    nothing = np.zeros(_PART, np.float32)
    units = read_int64(table) * parts
    while True:
        unit = take_unit(team, units)
        if unit >= units:
            break
        zeros = nothing.ctypes.data  # in the loop: numba frees an array behind its last use by name
        here, c = table + HEADER_BYTES + unit // parts * UNIT_BYTES, unit % parts * _PART
        num = min(_PART, channels - c)
        rows, count, start = table + read_int64(here) * 8, read_int64(here + 8), read_int64(here + 16)
        inputs = all_inputs + read_int64(here + 24) * window_row + c * size
        tail = tails + read_int64(here + 32) * tail_row + c * size
        target = table + read_int64(here + 40) * 8
        x0 = _before(3, start, width, inputs, tail, row_bytes, zeros)
        x1 = _before(2, start, width, inputs, tail, row_bytes, zeros)
        x2 = _before(1, start, width, inputs, tail, row_bytes, zeros)
        w3 = weight + ((width - 1) * channels + c) * 4
        w2 = w3 - channels * 4
        w1 = w2 - channels * 4 if width > 2 else zeros
        w0 = w1 - channels * 4 if width > 3 else zeros
        own_bias = bias + c * 4 if bias != 0 else zeros
        opened = (start + count) // WINDOW * WINDOW
        for number in range(count):
            row, position = read_int64(rows + number * 8), start + number
            x3 = x + row * x_row + c * size
            to = out + row * row_bytes + c * size
            _convolve_row(x0, x1, x2, x3, w0, w1, w2, w3, own_bias, to, num, like)
            if position >= opened:
                _copy(x3, inputs + position % WINDOW * row_bytes, num, like)
            if position % WINDOW == WINDOW - 1:
                to = tails + read_int64(target) * tail_row + c * size
                target += 8
                if width > 3:
                    _copy(x1, to, num, like)
                if width > 2:
                    _copy(x2, to + (width - 3) * row_bytes, num, like)
                _copy(x3, to + (width - 2) * row_bytes, num, like)
            # Of a narrower convolution the inputs before have no weight.
            x0 = x1 if width > 3 else zeros
            x1 = x2 if width > 2 else zeros
            x2 = x3


_convolve_all = Kernel(_convolve_units, "qqqqqqqqqqqq")
