"""The tensors of a checkpoint, laid out as layers have them."""

from __future__ import annotations

import torch

from loraplex.engine.model.layer_kinds import NormKind
from loraplex.engine.model.layers.adapted_linears import Linear
from loraplex.engine.model.stored_linears import PackedReader
from loraplex.engine.model.weights import TensorSource
from loraplex.kernels.experts.types import PackedExperts
from loraplex.kernels.lora.site_groups import FLOAT_SITES, SiteGroup
from loraplex.kernels.ops import Ops
from loraplex.kernels.weight_form import FLOATS


class LayerTensors:
    """Reads into memory on one device. Its methods raise ModelUnsupported for a tensor that is missing or of another
    shape."""

    def __init__(
        self,
        checkpoint: TensorSource,
        norm: NormKind,
        dtype: torch.dtype,
        device: torch.device,
        ops: Ops,
        codes: PackedReader | None,
    ) -> None:
        """`codes` reads linears as codes; None: they are kept in `dtype`."""
        self._checkpoint = checkpoint
        self._norm = norm
        self._dtype = dtype
        self._device = device
        self._ops = ops
        self._codes = codes
        self._units: dict[int, torch.Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._checkpoint

    def linear(
        self, prefix: str, layer: int, group: SiteGroup, bias: bool, dtype: torch.dtype | None = None
    ) -> Linear:
        """The group's sites, one behind the other. `prefix`: of their names. `dtype`: another than the model's."""
        parts = {f"{prefix}{site}": rows for site, rows in zip(group.sites, group.out_features, strict=True)}
        packed_bias = self._stack(parts, "bias") if bias else None
        weight = None
        if self._codes is not None and FLOAT_SITES.isdisjoint(group.sites):
            weight = self._codes.read({name: (rows, group.in_features) for name, rows in parts.items()})
        if weight is None:
            rows, dtype = self._stack(parts, "weight", group.in_features), dtype or self._dtype
            weight = self._ops.pack(rows.to(dtype), FLOATS, dtype)
        return Linear(weight, packed_bias, layer, group.key)

    def experts(self, prefix: str, count: int, parts: dict[str, int], inputs: int) -> PackedExperts:
        """The linears `parts` of each expert, with their numbers of rows, one behind the other."""
        all_parts = [
            {f"{prefix}{expert}.{name}": rows for name, rows in parts.items()} for expert in range(count)
        ]
        if self._codes is not None:
            shapes = [{name: (rows, inputs) for name, rows in own.items()} for own in all_parts]
            packed = [linear for linear in map(self._codes.read, shapes) if linear is not None]
            if len(packed) == count:
                return self._ops.experts.join(packed)
        read = (self._stack(own, "weight", inputs) for own in all_parts)
        return self._ops.experts.pack(read, FLOATS, self._dtype)

    def norm(self, module: str, size: int) -> torch.Tensor:
        # 1 + w has too few digits for w in the model's own dtype.
        kept = torch.float32 if self._norm.in_float32 else self._dtype
        weight = torch.empty(size, dtype=kept, device=self._device)
        self._checkpoint.read_into(f"{module}.weight", weight)
        return weight.add_(self._norm.offset) if self._norm.offset else weight

    def unit_norm(self, size: int) -> torch.Tensor:
        """The weight of a norm that has none: one tensor for all layers."""
        if size not in self._units:
            kept = torch.float32 if self._norm.in_float32 else self._dtype
            self._units[size] = torch.ones(size, dtype=kept, device=self._device)
        return self._units[size]

    def number(self, name: str) -> float:
        """A tensor of one element; 1 where nothing is read."""
        found = self.tensor(name, 1)
        return 1.0 if found.is_meta else float(found)

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """`dtype`: another than the model's."""
        tensor = torch.empty(shape, dtype=dtype or self._dtype, device=self._device)
        self._checkpoint.read_into(name, tensor)
        return tensor

    def _stack(self, parts: dict[str, int], what: str, *inputs: int) -> torch.Tensor:
        """The named tensors, each with its number of rows, one behind the other."""
        out = torch.empty(sum(parts.values()), *inputs, dtype=self._dtype, device=self._device)
        first = 0
        for name, rows in parts.items():
            self._checkpoint.read_into(f"{name}.{what}", out[first : first + rows])
            first += rows
        return out
