"""Triton's interpreter (of 3.7) without most of what it repeats: a third of the time.

For every launch, and every call inside a kernel, it looks through all of `triton.language` and replaces the functions
there again, each value makes its shape and a table of dtypes again, and each sum of integers computes whether it
overflowed, which is thrown away unless `debug` is set. Here the functions are replaced once, equal shapes and dtypes
are made once, and overflows are not computed. What a kernel computes stays as it is, except for numbers that are
rounded to e4m3: the interpreter loses the carry of a mantissa that is rounded up, and GPUs do not.
"""

from __future__ import annotations

import inspect
from typing import Any

import ml_dtypes
import numpy as np

POINTERS = np.dtype(np.uint64)


def quicken_interpreter() -> None:
    """For the rest of this process."""
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    assert not interpreter.InterpreterOptions.debug, "overflows are to be found"
    TritonSemantic.binary_op_sanitize_overflow_impl = lambda *_: None
    _patch_once(interpreter)
    _make_dtypes_once(interpreter)
    _make_shapes_once()
    _round_to_8_bit_floats(interpreter)


def _patch_once(interpreter: Any) -> None:
    """Only kernels call the functions that are replaced, so they stay replaced after a launch."""
    patch = interpreter._patch_lang
    known: dict[Any, frozenset[str]] = {}
    patched: set[frozenset[str]] = set()

    def languages(fn: Any) -> frozenset[str]:
        """Which of Triton's modules a function sees, and is to see with what replaces their functions."""
        if fn not in known:
            seen = (interpreter.tl, interpreter.tl.core)
            modules = [value for value in fn.__globals__.values() if inspect.ismodule(value)]
            known[fn] = frozenset(module.__name__ for module in modules if module in seen)
        return known[fn]

    def patch_once(fn: Any) -> Any:
        if languages(fn) not in patched:
            patch(fn)
            patched.add(languages(fn))
        return interpreter._LangPatchScope()  # with nothing to restore

    interpreter._patch_lang = patch_once


def _make_dtypes_once(interpreter: Any) -> None:
    make = interpreter._get_np_dtype
    made: dict[str, Any] = {}

    def get(dtype: Any) -> Any:
        scalar = dtype.scalar
        if scalar.is_ptr():
            return POINTERS
        if scalar.name not in made:
            made[scalar.name] = make(scalar)
        return made[scalar.name]

    interpreter._get_np_dtype = get


def _round_to_8_bit_floats(interpreter: Any) -> None:
    convert = interpreter._convert_float

    def rounded(x: Any, given: Any, wanted: Any, mode: Any) -> Any:
        if (given.name, wanted.name) == ("fp32", "fp8e4nv"):
            return x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        return convert(x, given, wanted, mode)

    interpreter._convert_float = rounded


def _make_shapes_once() -> None:
    from triton.language import core

    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}
    blocks: dict[tuple[tuple[int, ...], str], dict[str, Any]] = {}
    make_block = core.block_type.__init__

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape.values) if type.is_block() else ()
        if sizes not in shapes:
            shapes[sizes] = (
                core.tuple([core.constexpr(size) for size in sizes]),
                core.constexpr(int(np.prod(sizes))),
            )
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[sizes]

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(getattr(size, "value", size) for size in getattr(shape, "value", shape))
        key = sizes, element_ty.name
        if key not in blocks:
            make_block(self, element_ty, list(sizes))
            blocks[key] = {name: vars(self)[name] for name in ("shape", "numel", "name")}
        self.element_ty = element_ty
        vars(self).update(blocks[key])

    core.tensor.__init__ = init_tensor
    core.block_type.__init__ = init_block
