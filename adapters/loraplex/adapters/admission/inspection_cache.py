"""Shared inspections of adapters with the same config and header.

An engine inspects an adapter again when it loads it: `InspectionCache`. A server inspects each version of a series,
which a training pushes one after the other: `KnownStructures`.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from loraplex.adapters.admission.inspection import inspect_adapter
from loraplex.adapters.admission.peft_config import read_raw_config
from loraplex.adapters.admission.safetensors_header import HeaderLimits, adapter_limits, read_raw_header
from loraplex.adapters.admission.values import FLOAT_BITS, refuse_not_finite
from loraplex.adapters.errors import ArtifactMissing
from loraplex.adapters.spec import AdapterSpec, BaseSpec, SiteWeights, TensorSlice
from loraplex.adapters.store.files import begin_digest
from loraplex.adapters.store.tensors import scan_tensors

_MAX_REMEMBERED = 16


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

    An adapter of the same config and header passes the same checks, but those of values. Of these `inspect` makes one:
    that all are finite. It is for adapters that are plain LoRA on linears and nothing else, in dtypes of FLOAT_BITS.
    Only the last few structures are kept.
    """

    def __init__(self, base: BaseSpec) -> None:
        self._limits = adapter_limits(base)
        self._passed = _Remembered()

    def remember(self, config_path: Path, tensors_path: Path, spec: AdapterSpec) -> None:
        """Keep the structure of files that passed as they came, with nothing left out. Raises what reading raises."""
        is_plain = not (spec.tokens or spec.head or spec.experts or spec.report["modules_ignored"])
        if is_plain and all(_is_plain(site) for site in spec.sites):
            self._passed.put(_key(config_path, tensors_path, self._limits), spec)

    def inspect(self, config_path: Path, tensors_path: Path) -> AdapterSpec | None:
        """The spec of an adapter whose structure is known, after one reading of its bytes; None for any other. The
        report's `norm` is None: no products were computed, and nothing was looked for that has no effect.

        Raises AdapterRefused (non_finite, not_safetensors, too_large, config_invalid), ArtifactMissing, OSError."""
        known = self._passed.get(_key(config_path, tensors_path, self._limits))
        if known is None:
            return None
        sha = begin_digest(config_path, tensors_path)
        for tensor, values in scan_tensors(tensors_path, _tensors(known), sha.update):
            refuse_not_finite(values, tensor)
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


def _is_plain(site: SiteWeights) -> bool:
    return site.magnitude is None and site.a.dtype in FLOAT_BITS and site.b.dtype in FLOAT_BITS


def _unmeasured(check: dict[str, Any]) -> dict[str, Any]:
    return check | {"detail": "finite"} if check["name"] == "values" and check["ok"] else check


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
