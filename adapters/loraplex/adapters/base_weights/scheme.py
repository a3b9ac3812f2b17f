"""The seam of formats of quantised linears."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from loraplex.adapters.base_weights.tensors import QuantisedTensors
from loraplex.kernels.linear.stored import FloatWeight, GroupedWeight
from loraplex.kernels.weight_form import WeightForm


class Scheme(ABC):
    """A format of quantised linears. Its methods raise QuantisationUnsupported."""

    __slots__ = ()
    name: str
    """The format, for reports: "gptq int4" for example."""
    suffix: str
    """The name of the tensor of a module's codes, behind the module's own."""
    leaves: tuple[str, ...]
    """The names that the other tensors of a module may have."""
    has_heads: ClassVar[bool] = False
    """Whether its tools can quantise a head."""
    experts_alone: ClassVar[bool] = False
    """Whether it is of routed experts alone."""

    @property
    @abstractmethod
    def form(self) -> WeightForm:
        """The form of its linears, as they are stored."""

    def modules(self, tensors: QuantisedTensors) -> Iterable[str]:
        """The modules that are quantised, by name."""
        ending = f".{self.suffix}"
        named = (name.removesuffix(ending) for name in tensors if name.endswith(ending))
        return (module for module in named if self.is_module(module, tensors))

    def is_module(self, module: str, tensors: QuantisedTensors) -> bool:
        """Whether a module with such a tensor is quantised."""
        return True

    @abstractmethod
    def shape(self, module: str, tensors: QuantisedTensors) -> tuple[int, int]:
        """[out_features, in_features]"""

    def names(self, module: str) -> tuple[str, ...]:
        """The names that tensors of the module may have."""
        return tuple(f"{module}.{leaf}" for leaf in (self.suffix, *self.leaves))

    @abstractmethod
    def examine(self, module: str, tensors: QuantisedTensors) -> Any:
        """All checks of `read` that need no codes."""

    @abstractmethod
    def read(self, module: str, tensors: QuantisedTensors) -> GroupedWeight | FloatWeight | None:
        """The weight as it is stored; None where it can only be served as `dense_rows`."""

    def dense_rows(self, module: str, tensors: QuantisedTensors) -> Iterator[NDArray[np.float32]]:
        """The weight [N, K] that is meant, some rows at a time."""
        found = self.read(module, tensors)
        assert isinstance(found, GroupedWeight)
        return found.dense_rows()
