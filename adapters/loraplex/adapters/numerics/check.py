"""The verdict over a version's numbers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loraplex.adapters.admission.base_model import BaseWeights
from loraplex.adapters.errors import ArtifactUnreadable
from loraplex.adapters.numerics.outputs import SiteOutputs
from loraplex.adapters.numerics.probes import INPUT_ROWS
from loraplex.adapters.numerics.reference import (
    SERVED_DTYPES,
    ExpectedSite,
    expect_expert,
    expect_rows,
    expect_site,
)
from loraplex.adapters.numerics.upload import Upload, UploadedRows, UploadedSite
from loraplex.adapters.spec import BaseSpec

TOLERANCE = 3.0
"""The largest error of a site, in units of the rounding of its outputs. See docs/lab/notes.md for the figures."""
MAX_ERROR = 1e6
"""The value for any larger error, and for the error of a site that was not computed."""
MAX_REPORTED_MODULES = 1024


@dataclass(frozen=True, slots=True)
class NumbersVerdict:
    """`message` is for the tenant who uploaded the version: what is wrong, where, and what to do. `report` is
    JSON-safe."""

    ok: bool
    message: str
    report: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Site:
    module: str
    error: float
    relative: float
    effect: float
    norm: float
    overflow: str | None
    worst: str = ""
    """The expert that the error is of, where the module is a site of all experts of a layer."""

    @property
    def where(self) -> str:
        return self.worst or self.module

    def with_expert(self, other: _Site) -> _Site:
        """The site of one more expert of the same layer: the larger figures, and the norm of both."""
        worst = max(self, other, key=_badness)
        return _Site(
            self.module,
            worst.error,
            max(self.relative, other.relative),
            max(self.effect, other.effect),
            _number(math.hypot(self.norm, other.norm)),
            worst.overflow,
            worst.worst,
        )


class NumbersCheck:
    """Compares what the engine computed with a reference that reads the upload by itself, a part at a time: the
    reference of a large adapter takes minutes, and others wait for theirs.

    The error of a site is the root mean square of measured minus expected sums over that of what rounding to the served
    dtype moves them by; for a perfect site it is about 1 or less. One site is held at a time, in float64, and B of one
    stack of experts in float32. For one thread at a time.
    """

    def __init__(self, config_path: Path, tensors_path: Path, base: BaseSpec, outputs: SiteOutputs) -> None:
        """Raises ArtifactMissing, ArtifactCorrupt, AdapterRefused, OSError."""
        self._upload = Upload(config_path, tensors_path, base)
        self._base = base
        self._outputs = outputs
        self._measured = _by_site(outputs)
        self._weights: BaseWeights | None = None
        self._left = list(reversed(self._upload.sites))
        self._sites: list[_Site] = []
        self._measured_experts = outputs.of_experts()
        self._left_experts = list(self._upload.experts.keys())[::-1]
        self._unnamed = _nonzero_experts(self._measured_experts)
        self._experts: dict[tuple[int, str], _Site] = {}

    def run(self, seconds: float = math.inf) -> NumbersVerdict | None:
        """Check sites for so long, one at least (of one expert, where they are experts'); the verdict after the last
        one, None before.

        A version that the engine could not load may have weights that are infinite in the served dtype, which is an
        overflow. Else ArtifactUnreadable is raised with the engine's reason: nothing was compared. Raises
        BaseModelInvalid and what the constructor does as well.
        """
        until = time.monotonic() + seconds
        while self._left or self._left_experts:
            if self._left:
                self._sites.append(_check_site(self._upload, self._left.pop(), self._measured, self._expect))
            else:
                self._check_expert(*self._left_experts.pop())
            if time.monotonic() >= until:
                break
        return None if self._left or self._left_experts else self._verdict()

    def _check_expert(self, layer: int, site: str, expert: int) -> None:
        read = self._upload.read_expert(layer, site, expert)
        expected = expect_expert(read, self._outputs.dtype)
        sums: NDArray[np.float32] | None = np.zeros(expected.sums.shape, np.float32)
        if (layer, site) in self._measured_experts:
            all_sums, finite = self._measured_experts[layer, site]
            sums = all_sums[expert : expert + 1] if finite[expert : expert + 1].any() else None
            self._unnamed.discard((layer, site, expert))
        path = self._upload.experts.path(layer, site)
        found = _compare(path, expected, sums, (slice(None),), was_measured=True, worst=read.module_path)
        before = self._experts.get((layer, site))
        self._experts[layer, site] = found if before is None else before.with_expert(found)

    def _expect(self, site: UploadedSite | UploadedRows) -> ExpectedSite:
        if isinstance(site, UploadedRows):
            return expect_rows(site, self._outputs.dtype)
        if site.magnitude is not None and self._weights is None:
            self._weights = BaseWeights(self._base)
        return expect_site(site, self._outputs.dtype, self._weights)

    def _verdict(self) -> NumbersVerdict:
        sites = [*self._sites, *self._experts.values()]
        if self._outputs.failure and all(site.overflow is None for site in sites):
            raise ArtifactUnreadable(f"the engine could not load it: {self._outputs.failure}")
        # The engine changes what the upload does not name.
        modules = {key: shape.module_path for key, shape in self._base.sites.items()}
        named = self._upload.sites.keys()
        others = [
            _Site(modules.get(key, f"{key[1]} of layer {key[0]}"), MAX_ERROR, 0, 0, 0, None)
            for key in self._measured
            if key not in named
        ]
        others += [
            _Site(f"expert {expert} of layer {layer}, {site}", MAX_ERROR, 0, 0, 0, None)
            for layer, site, expert in sorted(self._unnamed)
        ]
        is_empty = not self._measured and not self._measured_experts
        return _verdict([*sites, *others], self._outputs.dtype, is_empty=is_empty)


def _by_site(outputs: SiteOutputs) -> dict[tuple[int, str], NDArray[np.float32] | None]:
    """The sketches by (layer, site), None where the outputs are not finite."""
    if outputs.dtype not in SERVED_DTYPES:
        raise ValueError(f"no check for a model served in {outputs.dtype}")
    sketches = outputs.sketches()
    return {
        site: found if finite and np.isfinite(found).all() else None
        for site, found, finite in zip(outputs.sites, sketches, outputs.finite, strict=True)
    }


def _nonzero_experts(
    measured: Mapping[tuple[int, str], tuple[NDArray[np.float32], NDArray[np.bool_]]],
) -> set[tuple[int, str, int]]:
    """The experts, by layer and site, for which the engine changes something."""
    return {
        (layer, site, expert)
        for (layer, site), (sums, finite) in measured.items()
        for expert in np.flatnonzero(sums.any(axis=1) | ~finite).tolist()
    }


def _check_site(
    upload: Upload,
    key: tuple[int, str],
    measured: Mapping[tuple[int, str], NDArray[np.float32] | None],
    expect: Callable[[UploadedSite | UploadedRows], ExpectedSite],
) -> _Site:
    site = upload.read(*key)
    parts = (slice(INPUT_ROWS), slice(INPUT_ROWS, None))
    return _compare(site.module_path, expect(site), measured.get(key), parts, was_measured=key in measured)


def _compare(
    module: str,
    expected: ExpectedSite,
    found: NDArray[np.float32] | None,
    parts: tuple[slice, ...],
    *,
    was_measured: bool,
    worst: str = "",
) -> _Site:
    """`parts` of the rows are compared each for itself; x is not 0 in the first of them. `found` None: it was not
    measured, or is not finite."""
    overflow = expected.overflow
    if overflow is None and was_measured and found is None:
        overflow = "the output"
    error = relative = MAX_ERROR
    if overflow is None and found is not None:
        differences = np.square(found.astype(np.float64) - expected.sums)
        error = max(_ratio(differences[rows].sum(), expected.variance[rows].sum()) for rows in parts)
        exact = np.square(found[parts[0]] - expected.unrounded).sum()
        relative = _ratio(exact, np.square(expected.unrounded).sum())
    return _Site(module, error, relative, _number(expected.effect), _number(expected.norm), overflow, worst)


def _badness(site: _Site) -> tuple[bool, float]:
    return site.overflow is not None, site.error


def _verdict(sites: list[_Site], dtype: str, *, is_empty: bool) -> NumbersVerdict:
    errors = [site.error for site in sites]
    worst = max(sites, key=_badness)
    overflows = worst.overflow is not None
    is_equal = not overflows and worst.error <= TOLERANCE
    known = [site for site in sites if site.error < MAX_ERROR]
    report = {
        "max": worst.error if is_equal else max(errors),
        "mean": sum(errors) / len(errors),
        "tolerance": TOLERANCE,
        "relative": _summary([site.relative for site in known]),
        "effect": _summary([site.effect for site in sites]),
        "norms": {site.module: site.norm for site in sites[:MAX_REPORTED_MODULES]},
        "errors": {site.module: site.error for site in sites[:MAX_REPORTED_MODULES]},
        "worst_module": worst.where,
        "dtype": dtype,
        "verdict": "overflow" if overflows else "equal" if is_equal else "mismatch",
    }
    if is_equal:
        message = f"equal to the reference: at most {worst.error:.2f} of a tolerance of {TOLERANCE:g}"
    elif overflows:
        message = (
            f"{worst.where}: {worst.overflow} is infinite or no number in {dtype}, in which this server computes; its "
            "weights are too large: check how they were trained and saved"
        )
    else:
        count = sum(site.error > TOLERANCE for site in sites)
        what = (
            "the engine could not lay out this adapter"
            if is_empty
            else f"{worst.where}: what the engine computes differs from the reference by {worst.error:.3g} times its "
            f"rounding in {dtype}, {TOLERANCE:g} is the tolerance; {count} of {len(sites)} modules differ"
        )
        message = f"{what}. The upload was read without fault: report this to the operator of the server"
    return NumbersVerdict(is_equal, message, report)


def _ratio(squared: float, reference: float) -> float:
    if not squared:
        return 0.0
    return min(MAX_ERROR, math.sqrt(squared / reference)) if reference else MAX_ERROR


def _number(value: float) -> float:
    """JSON has no infinity."""
    return min(value, float(np.finfo(np.float32).max)) if not math.isnan(value) else 0.0


def _summary(values: list[float]) -> dict[str, float]:
    return {"max": max(values, default=0.0), "mean": sum(values) / len(values) if values else 0.0}
