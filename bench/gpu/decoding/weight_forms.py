"""A model of random weights whose linears are kept in fewer bits, beside the same values in the model's dtype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from bench.gpu.models import LLAMA_8B, make_config, random_decoder
from bench.gpu.steps import StepBench, StepsShape
from bench.gpu.timing import Ceilings
from loraplex.kernels import triton_backend
from loraplex.kernels.linear import humming
from loraplex.kernels.linear.packed import PackedLinear
from loraplex.kernels.linear.stored import FloatWeight, GroupedWeight
from loraplex.kernels.ops import Ops
from loraplex.kernels.weight_form import FLOATS, WeightForm

_GROUP = 128
_MOST_E4M3 = 448.0


@dataclass(frozen=True)
class Codes:
    """Whole numbers of −`most` … `most` in groups of 128 inputs; of a whole row, where it is shorter. `widened`: as
    values of the model's dtype. `by_library`: for humming-kernels; else for Triton, whether or not that is there."""

    most: int
    widened: bool
    by_library: bool = False

    def __call__(self, ops: Ops, weight: torch.Tensor) -> PackedLinear:
        columns, inputs = weight.shape
        group = _GROUP if inputs % _GROUP == 0 else inputs
        groups = weight.float().view(columns, -1, group)
        # Scales of few digits: the product of code and scale is then the same in the model's dtype.
        scales = torch.exp2(torch.ceil(torch.log2(groups.abs().amax(2) / self.most)))
        codes = torch.round(groups / scales[:, :, None]).to(torch.int8)
        if self.widened:
            dense = (codes * scales[:, :, None]).to(weight.dtype).view(weight.shape)
            return ops.pack(dense, FLOATS, weight.dtype)
        grouped = GroupedWeight(codes.view(weight.shape), scales, None, group)
        if self.by_library:
            packed = humming.pack_codes(grouped, weight.dtype, device=weight.device)
            assert packed is not None
            return packed
        return triton_backend.pack_groups(grouped, weight.dtype, device=weight.device)


@dataclass(frozen=True)
class Floats:
    """8-bit floats (e4m3) with a scale for each output, for activations in them too. `widened` as in `Codes`."""

    widened: bool

    def __call__(self, ops: Ops, weight: torch.Tensor) -> PackedLinear:
        scales = torch.exp2(torch.ceil(torch.log2(weight.float().abs().amax(1, keepdim=True) / _MOST_E4M3)))
        values = (weight.float() / scales).to(torch.float8_e4m3fn)
        if self.widened:
            return ops.pack((values.float() * scales).to(weight.dtype), FLOATS, weight.dtype)
        form = WeightForm("float8", 8, activations="float8")
        return ops.pack(FloatWeight(values, scales, activations=True), form, weight.dtype)


@dataclass(frozen=True)
class StoredAs:
    """Makes a `StepBench` over a model of its own, with these weights."""

    form: Codes | Floats

    def __call__(
        self,
        shape: StepsShape,
        device: torch.device,
        ceilings: Ceilings,
        *,
        model: object = None,
        **options: Any,
    ) -> StepBench:
        """`model` is that of the other side, and not used."""
        own = random_decoder(
            make_config({**LLAMA_8B, **shape.changes}),
            shape.dtype,
            device,
            batch_invariant=shape.batch_invariant,
            pack=self.form,
        )
        return StepBench(shape, device, ceilings, model=own, **options)
