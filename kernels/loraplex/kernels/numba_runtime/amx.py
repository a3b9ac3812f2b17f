"""AMX: products of tiles of bfloat16, sixteen rows of 64 bytes each.

A thread has eight tiles, T0 to T7, whose shapes it loads with `configure_tiles` before it uses one. They are state of
the thread, which the kernel saves when it switches threads: `release_tiles` ends that.

The product T += A·B (Intel's manual, TDPBF16PS) takes A as [rows, 16 pairs] and B as [16 pairs, 16 outputs], each a
pair of bfloat16. Of an output it sums the even and the odd element of all pairs in a chain each, from 0 and in their
order, adds the two, and adds that to T. Subnormal numbers are zeros. So the bits of a row do not depend on the others.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

import ctypes
import platform
import sys
from functools import cache

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from loraplex.kernels.numba_runtime import ir as nir
from loraplex.kernels.numba_runtime.vectors import host_features

ROWS = 16
"""The most rows of a tile."""
PAIRS = 16
"""Pairs of inputs that one product sums."""
_ROW_BYTES = 64
_FEATURES = frozenset({"amx-tile", "amx-bf16", "avx512f", "avx512bf16"})
_SYS_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


@cache
def is_permitted() -> bool:
    """Whether compiled code may use tiles of bfloat16: the processor has them, NUMBA_CPU_FEATURES leaves them in, and
    Linux permits them to this process, which is asked here for all its threads."""
    if not host_features() >= _FEATURES or sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    # There is no function of libc's for it.
    return bool(ctypes.CDLL(None).syscall(_SYS_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)


def tile_shapes(rows: dict[int, int], narrow: frozenset[int] = frozenset()) -> NDArray[np.uint8]:
    """[64] what `configure_tiles` reads: the number of rows of each tile that is used, of 64 bytes, or 32 where it is
    `narrow`."""
    shapes = np.zeros(64, np.uint8)
    shapes[0] = 1  # the only palette there is
    for tile, count in rows.items():
        shapes[16 + 2 * tile] = _ROW_BYTES // 2 if tile in narrow else _ROW_BYTES
        shapes[48 + tile] = count
    return shapes


def has_tiles(context) -> bool:
    """Whether code for this processor may have tiles in it."""
    return nir.features(context) >= _FEATURES


def load_tile(builder, tile, address, stride):
    """Rows of 64 bytes, `stride` bytes apart."""
    arguments = [_number(tile), nir.pointer(builder, address, nir.I8), stride]
    nir.call(builder, "llvm.x86.tileloadd64", ir.VoidType(), arguments)


def store_tile(builder, tile, address, stride):
    """Rows of 64 bytes, `stride` bytes apart."""
    arguments = [_number(tile), nir.pointer(builder, address, nir.I8), stride]
    nir.call(builder, "llvm.x86.tilestored64", ir.VoidType(), arguments)


def clear_tile(builder, tile):
    nir.call(builder, "llvm.x86.tilezero", ir.VoidType(), [_number(tile)])


def multiply_tiles(builder, total, a, b):
    """total += a·b"""
    nir.call(builder, "llvm.x86.tdpbf16ps", ir.VoidType(), [_number(tile) for tile in (total, a, b)])


def _number(tile):
    return ir.Constant(nir.I8, tile)


@intrinsic
def configure_tiles(typing, shapes):
    """Take the shapes at this address, see `tile_shapes`; all tiles become zeros. Nothing without `has_tiles`."""

    def lower(context, builder, signature, values):
        if has_tiles(context):
            nir.call(builder, "llvm.x86.ldtilecfg", ir.VoidType(), [nir.pointer(builder, values[0], nir.I8)])
        return context.get_dummy_value()

    return types.void(types.int64), lower


@intrinsic
def release_tiles(typing):
    """End the use of tiles by this thread. Nothing without `has_tiles`."""

    def lower(context, builder, signature, values):
        if has_tiles(context):
            nir.call(builder, "llvm.x86.tilerelease", ir.VoidType(), [])
        return context.get_dummy_value()

    return types.void(), lower
