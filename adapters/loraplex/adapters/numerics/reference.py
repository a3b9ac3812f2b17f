"""The sketches that a site must give, in float64, and how far rounding may move them.

What is served of a site are A [R, K] and B [N, R], rounded to the served dtype, with the scaling in B:

    out = y ⊙ g + c + (x·Aᵀ)·Bᵀ        sums in float32, `out` rounded to the served dtype

g = 1 and c = 0, except for DoRA: g = m / ‖W + scaling·B·A‖ and c = (1 - g) ⊙ bias. The served vectors are g - 1 and c.

The expected sketches are those of `out` before it is rounded. Rounding moves a value by ROUNDING units in the last
place in the root mean square; the sums in float32 move it by little more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from loraplex.adapters.admission.base_model import BaseWeights
from loraplex.adapters.numerics.probes import (
    EXPERT_SUMS,
    HEAD_ROWS,
    INPUT_ROWS,
    SKETCH_SUMS,
    column_signs,
    fold,
    probe_inputs,
    sketch,
)
from loraplex.adapters.numerics.upload import UploadedRows, UploadedSite

_Doubles = NDArray[np.float64]

SERVED_DTYPES: dict[str, tuple[np.dtype[Any], int]] = {
    "float32": (np.dtype(np.float32), 24),
    "float16": (np.dtype(np.float16), 11),
    "bfloat16": (np.dtype(ml_dtypes.bfloat16), 8),
}
"""numpy's dtype, and the bits of its significand."""
ROUNDING = 0.425
"""Rounding a value moves it by this part of 2^-bits in the root mean square, over values of all sizes; by 1 at most."""
_SINGLE = 2.0**-24
_SMALLEST = {"float32": 2.0**-126, "float16": 2.0**-25, "bfloat16": 2.0**-126}
"""The largest change that rounding makes to very small values."""
_MAX_PRODUCT = 1 << 18
"""Multiplications up to which OpenBLAS starts no threads, which would take the cores of the steps."""


@dataclass(frozen=True, slots=True)
class ExpectedSite:
    """The expected output of a site.

    `sums` and `variance` [PROBE_ROWS, SKETCH_SUMS]: the sketches, and the mean square by which rounding moves each.
    `unrounded` [INPUT_ROWS, SKETCH_SUMS]: those of A and B as uploaded. `effect`: root mean square of the change for
    inputs of ±1. `norm`: ‖scaling·B·A‖ (Frobenius), with DoRA's factors. `overflow`: what is not finite in the served
    dtype, None if nothing is.
    """

    sums: _Doubles
    variance: _Doubles
    unrounded: _Doubles
    effect: float
    norm: float
    overflow: str | None


def expect_site(site: UploadedSite, dtype: str, base: BaseWeights | None) -> ExpectedSite:
    """`base` is needed for DoRA. Raises BaseModelInvalid, OSError."""
    served, bits = SERVED_DTYPES[dtype]
    with np.errstate(all="ignore"):
        return _expect(site, dtype, served, bits, base)


def expect_expert(site: UploadedSite, dtype: str) -> ExpectedSite:
    """The same of one routed expert's site, for one row: `sums`, `variance` and `unrounded` are [1, EXPERT_SUMS]."""
    served, bits = SERVED_DTYPES[dtype]
    with np.errstate(all="ignore"):
        b = site.b * np.float32(site.scaling)
        a_served, b_served = (m.astype(served).astype(np.float64) for m in (site.a, b))
        rank, in_features = site.a.shape
        row = site.expert % INPUT_ROWS
        x = probe_inputs(site.layer, in_features)[row : row + 1].astype(np.float64)
        hidden = _product(x, a_served.T)
        out = _product(hidden, b_served.T)
        each = np.square(ROUNDING * 2.0**-bits * out) + _SMALLEST[dtype] ** 2
        each += _SINGLE**2 * rank * _product(np.square(hidden), np.square(b_served).T)
        exact = _product(_product(x, site.a.astype(np.float64).T), b.T.astype(np.float64))
        return ExpectedSite(
            sums=sketch(out, EXPERT_SUMS),
            variance=fold(each, EXPERT_SUMS) + _variance_of_hidden(a_served, b_served, EXPERT_SUMS),
            unrounded=sketch(exact, EXPERT_SUMS),
            effect=float(np.sqrt(np.mean(np.square(out)))),
            norm=_norm(a_served, b_served),
            overflow=_overflow(a_served, b_served, hidden, out, served),
        )


def expect_rows(table: UploadedRows, dtype: str) -> ExpectedSite:
    """The same of rows that replace the base's: see `probes`."""
    served, bits = SERVED_DTYPES[dtype]
    with np.errstate(all="ignore"):
        rows = table.rows.astype(served).astype(np.float64)
        if table.site == HEAD_ROWS:
            out, exact = _head_columns(table, rows), _head_columns(table, table.rows.astype(np.float64))
            spread = np.zeros_like(out)
            spread[:INPUT_ROWS, table.ids] = rows.shape[1] * np.square(rows).sum(axis=1)
        else:
            out, exact = _signed_sum(table, rows), _signed_sum(table, table.rows.astype(np.float64))
            spread = np.zeros_like(out)
            spread[:INPUT_ROWS] = len(rows) * np.square(rows).sum(axis=0)
        each = np.square(ROUNDING * 2.0**-bits * out) + _SMALLEST[dtype] ** 2 + _SINGLE**2 * spread
        largest = float(ml_dtypes.finfo(served).max)
        overflow = None if np.abs(rows).max() <= largest else "trainable_tokens_delta"
        if overflow is None and not np.abs(out).max() <= largest:
            overflow = "the output"
        return ExpectedSite(
            sums=sketch(out),
            variance=fold(each),
            unrounded=sketch(exact)[:INPUT_ROWS],
            effect=float(np.sqrt(np.mean(np.square(out[:INPUT_ROWS])))),
            norm=float(np.linalg.norm(rows)),
            overflow=overflow,
        )


def _signed_sum(table: UploadedRows, rows: _Doubles) -> _Doubles:
    x = probe_inputs(0, table.vocab_size)[:INPUT_ROWS, table.ids].astype(np.float64)
    return np.concatenate((_product(x, rows), np.ones((1, rows.shape[1]))))


def _head_columns(table: UploadedRows, rows: _Doubles) -> _Doubles:
    x = probe_inputs(0, rows.shape[1])[:INPUT_ROWS].astype(np.float64)
    out = np.zeros((INPUT_ROWS + 1, table.vocab_size))
    out[INPUT_ROWS] = 1
    out[:, table.ids] = 0
    out[:INPUT_ROWS, table.ids] = _product(x, rows.T)
    return out


def _expect(
    site: UploadedSite, dtype: str, served: np.dtype[Any], bits: int, base: BaseWeights | None
) -> ExpectedSite:
    rank, in_features = site.a.shape
    out_features = len(site.b)
    b = site.b * np.float32(site.scaling)
    gain, offset = np.ones(out_features), np.zeros(out_features)
    gain_error = 0.0
    if site.magnitude is not None:
        assert base is not None
        gain, bias = _dora(site, b, served, base)
        offset = (1 - gain) * bias
        b *= gain.astype(np.float32)[:, None]
        gain_error = 2 * _SINGLE * np.sqrt(in_features)
    a_served, b_served = (m.astype(served).astype(np.float64) for m in (site.a, b))
    x = probe_inputs(site.layer, in_features)[:INPUT_ROWS].astype(np.float64)
    hidden = _product(x, a_served.T)
    change = _product(hidden, b_served.T)
    out = np.concatenate((change + offset, (gain + offset)[None]))
    squares = np.square(hidden)
    spread = _product(squares, np.square(b_served).T)
    exact = np.zeros_like(out)
    exact[:INPUT_ROWS] = (_SINGLE**2 * rank + gain_error**2) * spread
    if site.magnitude is not None:
        # A factor near 1 leaves little of the bias, and a small one little of y, with the error of the whole.
        exact += np.square(gain_error * gain * bias) + np.square(2 * _SINGLE * offset)
        exact[INPUT_ROWS] += np.square(gain_error * gain) + np.square(2 * _SINGLE)
    each = np.square(ROUNDING * 2.0**-bits * out) + _SMALLEST[dtype] ** 2 + exact
    variance = fold(each)
    variance[:INPUT_ROWS] += _variance_of_hidden(a_served, b_served, SKETCH_SUMS)
    exact_change = _product(_product(x, site.a.astype(np.float64).T), b.T.astype(np.float64))
    return ExpectedSite(
        sums=sketch(out),
        variance=variance,
        unrounded=sketch(exact_change + offset),
        effect=float(np.sqrt(np.mean(np.square(change)))),
        norm=_norm(a_served, b_served),
        overflow=_overflow(a_served, b_served, hidden, out, served),
    )


def _dora(
    site: UploadedSite, b: NDArray[np.float32], served: np.dtype[Any], base: BaseWeights
) -> tuple[_Doubles, _Doubles]:
    """g = m / ‖W + scaling·B·A‖ and the bias, [N] each, of the base in the dtype that it is served in."""
    assert site.magnitude is not None
    a = site.a.astype(np.float64)
    norms = np.empty(len(b))
    first = 0
    for rows in base.rows(site.layer, site.site, served):
        last = first + len(rows)
        weights = rows.astype(np.float64) + _product(b[first:last].astype(np.float64), a)
        norms[first:last] = np.sqrt(np.einsum("ij,ij->i", weights, weights))
        first = last
    gain = site.magnitude.astype(np.float64) / norms
    bias = base.bias(site.layer, site.site)
    return gain, np.zeros_like(gain) if bias is None else bias.astype(served).astype(np.float64)


def _overflow(a: _Doubles, b: _Doubles, hidden: _Doubles, out: _Doubles, served: np.dtype[Any]) -> str | None:
    largest = float(ml_dtypes.finfo(served).max)
    for name, values in (
        ("lora_A", a),
        ("scaling * lora_B", b),
        ("the product of an input and lora_A", hidden),
        ("the output", out),
    ):
        if not np.abs(values).max(initial=0) <= largest:
            return name
    # A norm behind the layer sums the squares of its inputs in float32.
    if not float(np.square(out).sum(axis=1).max()) <= float(np.finfo(np.float32).max):
        return "the square of the output"
    return None


def _variance_of_hidden(a: _Doubles, b: _Doubles, count: int) -> _Doubles:
    """The mean square [count] by which sums of x·Aᵀ in float32 move the sketches.

    Rows of A that are alike are summed with the same error: the errors add up, and not their squares."""
    moved = _SINGLE * np.sqrt(a.shape[1] * np.square(a).sum(axis=1))
    columns = fold(b.T * column_signs(len(b)), count)
    variance: _Doubles = np.square(moved @ np.abs(columns))
    return variance


def _norm(a: _Doubles, b: _Doubles) -> float:
    """‖B·A‖² = tr(BᵀB·AAᵀ)."""
    return float(np.sqrt(max(0.0, float(np.sum(_product(b.T, b) * _product(a, a.T))))))


def _product(left: _Doubles, right: _Doubles) -> _Doubles:
    """left [m, k] · right [k, n], in this thread alone."""
    out = np.zeros((left.shape[0], right.shape[1]))
    for rows, columns, inner in _parts(left.shape[0], right.shape[1], left.shape[1]):
        out[rows, columns] += left[rows, inner] @ right[inner, columns]
    return out


def _parts(m: int, n: int, k: int) -> Iterator[tuple[slice, slice, slice]]:
    high, wide = min(m, 64), min(n, 64)
    deep = max(8, _MAX_PRODUCT // (high * wide))
    if deep >= k:
        deep, wide = k, max(wide, _MAX_PRODUCT // (high * k))
    for top in range(0, m, high):
        for left in range(0, n, wide):
            for front in range(0, k, deep):
                yield slice(top, top + high), slice(left, left + wide), slice(front, front + deep)
