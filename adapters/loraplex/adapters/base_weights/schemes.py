"""How a checkpoint's linears are quantised, by `quantization_config` of its config.json and by its tensors' names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loraplex.adapters.base_weights.bitsandbytes import read_bitsandbytes
from loraplex.adapters.base_weights.compressed_tensors import read_compressed_tensors
from loraplex.adapters.base_weights.fp8 import read_fp8
from loraplex.adapters.base_weights.gguf import read_gguf
from loraplex.adapters.base_weights.gptq import read_auto_round, read_awq, read_gptq
from loraplex.adapters.base_weights.mxfp4 import read_mxfp4
from loraplex.adapters.base_weights.scheme import Scheme
from loraplex.adapters.base_weights.tensors import QuantisationUnsupported, QuantisedTensors
from loraplex.adapters.base_weights.words import leaves_out
from loraplex.adapters.store.files import shown
from loraplex.kernels.linear.stored import FloatWeight, GroupedWeight

_READERS: dict[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "auto-round": read_auto_round,
    "awq": read_awq,
    "bitsandbytes": read_bitsandbytes,
    "compressed-tensors": read_compressed_tensors,
    "fp8": read_fp8,
    "gptq": read_gptq,
    "mxfp4": read_mxfp4,
}


def read_scheme(config: Mapping[str, Any]) -> Scheme | None:
    """None where the checkpoint is not quantised. Raises QuantisationUnsupported."""
    given = config.get("quantization_config")
    if given is None:
        return None
    if not isinstance(given, dict):
        raise QuantisationUnsupported("quantization_config of config.json is not an object")
    method = given.get("quant_method") or given.get("method")
    if method == "gguf":
        return read_gguf(given, config)
    name = method.lower().removeprefix("intel/") if isinstance(method, str) else ""
    reader = _READERS.get(name)
    if reader is None:
        raise QuantisationUnsupported(
            f"a checkpoint quantised by {shown(method, 40)} is not served: {', '.join(_READERS)} are"
        )
    return reader(given)


class StoredLinears:
    """The quantised linears of one checkpoint, `modules` by name: at least one. All methods raise
    QuantisationUnsupported."""

    def __init__(self, scheme: Scheme, tensors: QuantisedTensors) -> None:
        self.scheme = scheme
        self._tensors = tensors
        self.modules = frozenset(scheme.modules(tensors))
        if not self.modules:
            raise QuantisationUnsupported(
                f"config.json says {scheme.name}, and no linear of the checkpoint has a tensor {scheme.suffix}"
            )

    def shape(self, module: str) -> tuple[int, int]:
        """[out_features, in_features]"""
        return self.scheme.shape(module, self._tensors)

    def names(self, module: str) -> list[str]:
        """The tensors that the weight of a module is made of; none where it is not quantised."""
        if module not in self.modules:
            return []
        return [name for name in self.scheme.names(module) if name in self._tensors]

    def examine(self, module: str) -> None:
        """Checks a module by its tensors, without its codes."""
        self.scheme.examine(module, self._tensors)

    @property
    def are_codes(self) -> bool:
        """Whether they are served as codes, by all kernels."""
        return self.scheme.form.codes == "groups"

    def read(self, module: str) -> GroupedWeight | FloatWeight | None:
        """The weight of a module as it is stored; None where it can only be served as `dense_rows`."""
        return self.scheme.read(module, self._tensors)

    def dense_rows(self, module: str) -> Iterator[NDArray[np.float32]]:
        """The weight [N, K] that is meant, some rows at a time."""
        return self.scheme.dense_rows(module, self._tensors)


def read_linears(config: Mapping[str, Any], tensors: QuantisedTensors) -> StoredLinears | None:
    """The quantised linears of a checkpoint; None where it has none. Raises QuantisationUnsupported."""
    scheme = read_scheme(config)
    if scheme is not None:
        return StoredLinears(scheme, tensors)
    if packed := next((name for name in tensors if name.endswith((".qweight", ".weight_packed"))), None):
        raise QuantisationUnsupported(
            f"the checkpoint has {shown(packed)}, and config.json no quantization_config that says what its codes "
            "stand for: put the object of quantize_config.json or quant_config.json there, with its quant_method"
        )
    return None


def stores_head(config: Mapping[str, Any]) -> bool:
    """Whether a checkpoint has codes of its head, by its config alone: GPTQ's tools can make them."""
    scheme = read_scheme(config)
    if scheme is None or not scheme.has_heads:
        return False
    given = config["quantization_config"]
    rule = (given.get("extra_config") or {}).get("lm_head")
    return given.get("lm_head") is True or (rule is not None and not leaves_out(rule))
