"""Small kernels that test what the kernels' tests stand on."""
# mypy: allow-untyped-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_sums(x_ptr, y_ptr, num_columns, BLOCK: tl.constexpr):
    """y[row] = the sum of x[row, :num_columns]."""
    row = tl.program_id(0)
    total = tl.zeros((), tl.float32)
    for start in range(0, num_columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(x_ptr + row * num_columns + at, at < num_columns, 0.0).to(tl.float32))
    tl.store(y_ptr + row, total)


@triton.jit
def product(x_ptr, y_ptr, z_ptr, SIZE: tl.constexpr):
    """z = x · y, all [SIZE, SIZE]."""
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(z_ptr + at, tl.dot(tl.load(x_ptr + at), tl.load(y_ptr + at)))


@triton.jit
def centred(x_ptr, y_ptr, SIZE: tl.constexpr):
    """y = x less its sum, all of it held at once: more than a warp has registers for."""
    x = tl.load(x_ptr + tl.arange(0, SIZE))
    tl.store(y_ptr + tl.arange(0, SIZE), x - tl.sum(x))


@triton.jit
def rounded(x_ptr, y_ptr, SIZE: tl.constexpr):
    """y = x, in y's dtype."""
    at = tl.arange(0, SIZE)
    tl.store(y_ptr + at, tl.load(x_ptr + at).to(y_ptr.dtype.element_ty))
