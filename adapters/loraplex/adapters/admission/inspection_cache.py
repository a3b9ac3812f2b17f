"""Adapters are inspected again when they are loaded: once for all whose config and header are the same bytes."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

from loraplex.adapters.admission.inspection import inspect_adapter
from loraplex.adapters.admission.peft_config import read_raw_config
from loraplex.adapters.admission.safetensors_header import HeaderLimits, adapter_limits, read_raw_header
from loraplex.adapters.errors import ArtifactMissing
from loraplex.adapters.spec import AdapterSpec, BaseSpec

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
        self._lock = threading.Lock()
        self._passed: OrderedDict[bytes, AdapterSpec] = OrderedDict()

    def inspect(self, config_path: Path, tensors_path: Path, digest: str) -> AdapterSpec:
        """The result of `inspect_adapter` without `deep`. Raises what that raises."""
        key = _key(config_path, tensors_path, self._limits)
        with self._lock:
            known = self._passed.get(key)
            if known is not None:
                self._passed.move_to_end(key)
                return replace(known, digest=digest)
        spec = inspect_adapter(
            config_path, tensors_path, self._base, max_rank=self._max_rank, deep=False, digest=digest
        )
        with self._lock:
            self._passed[key] = spec
            if len(self._passed) > _MAX_REMEMBERED:
                self._passed.popitem(last=False)
        return spec


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
