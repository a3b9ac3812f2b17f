"""Shared inspections of adapters with the same config and header.

An engine inspects an adapter again when it loads it: `InspectionCache`. A server inspects each version of a series,
which a training pushes one after the other: `KnownStructures`.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from loraplex.adapters.admission.inspection import inspect_adapter
from loraplex.adapters.admission.peft_config import read_raw_config
from loraplex.adapters.admission.safetensors_header import HeaderLimits, adapter_limits, read_raw_header
from loraplex.adapters.admission.values import FLOAT32_MAX, LEAST_NORM, measure_site
from loraplex.adapters.errors import ArtifactMissing
from loraplex.adapters.spec import AdapterSpec, BaseSpec, TensorSlice
from loraplex.adapters.store.files import begin_digest
from loraplex.adapters.store.tensors import NUMPY_DTYPES, scan_file
from loraplex.kernels.lora.site_groups import EMBEDDING, HEAD

_MAX_REMEMBERED = 16
_BY_BITS = frozenset({"F32", "F16", "BF16"})
"""Dtypes whose values are ordered as their bits without the sign are, with infinity and NaN behind all others."""


class InspectionCache:
    """Inspects for one base and one bound of ranks, from any thread.

    This inspection reads only the config, the header and the length of the tensor file. Adapters from one training
    script have them all in common, and so has an adapter that is loaded again. Parsing them takes milliseconds of
    Python, during which no step can begin. Only the last few accepted adapters are cached.
    """

    def __init__(self, base: BaseSpec, max_rank: int) -> None:
        self._base = base
        self._limits = adapter_limits(base)
        self._max_rank = max_rank
        self._passed = _Remembered()

    def inspect(self, config_path: Path, tensors_path: Path, digest: str) -> AdapterSpec:
        """The result of `inspect_adapter` without `deep`. Raises what that raises."""
        key = _key(config_path, tensors_path, self._limits)
        known = self._passed.get(key)
        if known is not None:
            return replace(known, digest=digest)
        spec = inspect_adapter(
            config_path, tensors_path, self._base, max_rank=self._max_rank, deep=False, digest=digest
        )
        self._passed.put(key, spec)
        return spec


class KnownStructures:
    """The structures of adapters that passed `inspect_adapter` with `deep` for one base, from any thread.

    An adapter of the same config and header passes the same checks, but those of values: that all are finite, also once
    they are scaled, and that they change something. `inspect` makes these in one reading. It is for adapters that are
    plain LoRA on linears and nothing else, in one dtype of _BY_BITS. Only the last few structures are kept.
    """

    def __init__(self, base: BaseSpec) -> None:
        self._base = base
        self._limits = adapter_limits(base)
        self._passed = _Remembered()

    def remember(self, config_path: Path, tensors_path: Path, spec: AdapterSpec) -> None:
        """Keep the structure of files that passed as they came, with nothing left out. Raises what reading raises."""
        if _is_plain(spec):
            self._passed.put(_key(config_path, tensors_path, self._limits), spec)

    def inspect(self, config_path: Path, tensors_path: Path) -> AdapterSpec | None:
        """The spec of an adapter whose structure is known, after one reading of its bytes. None for any other, and
        where a value may be a reason to refuse it: `inspect_adapter` tells. The report's `norm` is None: one linear's
        change is measured, to know that there is one.

        Raises AdapterRefused (not_safetensors, too_large, config_invalid), ArtifactMissing, ArtifactCorrupt, OSError.
        """
        known = self._passed.get(_key(config_path, tensors_path, self._limits))
        if known is None:
            return None
        sha = begin_digest(config_path, tensors_path)
        scaling = max(1.0, *(abs(site.scaling) for site in known.sites))
        if not _largest(tensors_path, known, sha.update) * scaling <= FLOAT32_MAX:
            return None
        first = known.sites[0]
        path = self._base.sites[first.layer, first.site].module_path
        if measure_site(tensors_path, first, path).norm < LEAST_NORM:
            return None
        checks = [_unmeasured(check) for check in known.report["checks"]]
        return replace(known, digest=sha.hexdigest(), report=known.report | {"norm": None, "checks": checks})


class _Remembered:
    """The last few specs, by key."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._specs: OrderedDict[bytes, AdapterSpec] = OrderedDict()

    def get(self, key: bytes) -> AdapterSpec | None:
        with self._lock:
            known = self._specs.get(key)
            if known is not None:
                self._specs.move_to_end(key)
            return known

    def put(self, key: bytes, spec: AdapterSpec) -> None:
        with self._lock:
            self._specs[key] = spec
            if len(self._specs) > _MAX_REMEMBERED:
                self._specs.popitem(last=False)


def _tensors(spec: AdapterSpec) -> Iterator[TensorSlice]:
    for site in spec.sites:
        yield from (site.a, site.b)


def _is_plain(spec: AdapterSpec) -> bool:
    """Whether its tensors are a pair for each of its linears in layers and nothing else, all in one dtype."""
    if spec.tokens or spec.head or spec.experts or spec.report["modules_ignored"]:
        return False
    dtypes = {tensor.dtype for tensor in _tensors(spec)}
    in_layers = all(site.magnitude is None and site.site not in (HEAD, EMBEDDING) for site in spec.sites)
    return in_layers and len(dtypes) == 1 and dtypes <= _BY_BITS


def _largest(tensors_path: Path, spec: AdapterSpec, feed: Callable[[memoryview], object]) -> float:
    """The largest magnitude among all values of the file: infinity or NaN if there is one. `feed` gets all its bytes.
    It is found among the bits without the sign, as integers: numpy's own way takes ten times as long for bfloat16."""
    dtype = NUMPY_DTYPES[spec.sites[0].a.dtype]
    bits = np.dtype(f"u{dtype.itemsize}")
    without_sign = bits.type(np.iinfo(bits).max >> 1)
    largest = bits.type(0)
    start = min(tensor.start for tensor in _tensors(spec))
    for values in scan_file(tensors_path, start, bits, feed):
        largest = max(largest, np.bitwise_and(values, without_sign, out=values).max())
    return float(largest.view(dtype))


def _unmeasured(check: dict[str, Any]) -> dict[str, Any]:
    is_values = check["name"] == "values" and check["ok"]
    return check | {"detail": "finite, and of effect; the norms were not measured"} if is_values else check


def _key(config_path: Path, tensors_path: Path, limits: HeaderLimits) -> bytes:
    try:
        config = read_raw_config(config_path)
        header, size = read_raw_header(tensors_path, limits)
    except FileNotFoundError as error:
        raise ArtifactMissing(f"the adapter's file {Path(str(error.filename)).name} is missing") from error
    sha = hashlib.sha256(b"%d %d " % (len(config), size))
    sha.update(config)
    sha.update(header)
    return sha.digest()
