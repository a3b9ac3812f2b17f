"""Products of Triton's interpreter whose sums have one order."""

from __future__ import annotations

from typing import Any

import numpy as np


def order_dots() -> None:
    """For the rest of this process: every element of an interpreted `tl.dot` is summed over K in one order.

    A GPU has one order for each shape of tile, wherever in the tile a row is. The interpreter calls numpy's matmul. On
    some processors its BLAS sums the last rows of a tile in another order than the first ones, so that two rows of
    equal values differ in their last bits. Tests that compare bits would find what no GPU does. The order is from the
    last column to the first: `tl.sum` of products goes the other way, since on a GPU it has other bits too. For element
    types of two and four bytes.
    """
    from triton.runtime import interpreter

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        assert a.data.itemsize > 1, "float8 would have to be converted"
        assert b.data.itemsize > 1, "float8 would have to be converted"
        # K is the outermost axis in memory: numpy adds one [M, N] after the other to the sums.
        columns = np.swapaxes(a.data, -1, -2)[..., ::-1, :, None]
        rows = b.data[..., ::-1, None, :]
        products = np.multiply(columns, rows, dtype=d.data.dtype, order="C")
        return interpreter.TensorHandle(products.sum(axis=-3, dtype=d.data.dtype) + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot
