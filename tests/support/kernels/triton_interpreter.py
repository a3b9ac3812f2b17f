"""Repairs of Triton's interpreter, for kernels that use what it computes wrongly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch


def repair_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter (of 3.6 and 3.7) holds bfloat16 as uint16. Its `tl.dot` multiplies those as if they were
    numbers, and what it rounds to bfloat16 it cuts off. Until the end of the test it does neither."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    dot, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << np.uint32(16)
        return TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        before, after = source.dtype.scalar, target.scalar
        if (before, after) == (tl.bfloat16, tl.float32):
            return widened(source)
        if (before, after) == (tl.float32, tl.bfloat16):
            rounded = torch.from_numpy(np.ascontiguousarray(source.data)).to(torch.bfloat16)
            return TensorHandle(rounded.view(torch.int16).numpy().view(np.uint16), after)
        return cast(self, source, target)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(InterpreterBuilder, "cast_impl", cast_impl)
