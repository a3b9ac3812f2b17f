"""Types of mixtures of experts that all implementations share. T rows, E experts, k experts a row, P = T·k places."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from loraplex.kernels.linear.packed import PackedLinear, tensor_bytes
from loraplex.kernels.weight_form import WeightForm


@dataclass(frozen=True, slots=True)
class RouterKind:
    """How a router chooses experts by its logits [T, E]. Raises ValueError where the numbers do not fit."""

    scores: Literal["softmax", "softmax_of_top", "sigmoid"]
    """Softmax over all experts, softmax over the chosen ones alone, or the logistic function of each."""
    num_experts: int
    top_k: int
    normalise: bool = False
    """Weights are divided by their sum; those of `softmax_of_top` have a sum of 1 already."""
    scaling: float = 1.0
    """Factor of all weights."""
    groups: int = 1
    """Groups of adjacent experts. Only experts of `top_groups` of them are chosen."""
    top_groups: int = 1
    """The groups with the largest sums of their best two scores."""
    weights_in_float32: bool = True
    """False: weights are rounded to the dtype of the logits."""

    def __post_init__(self) -> None:
        if not (
            1 <= self.top_groups <= self.groups
            and self.num_experts % self.groups == 0
            and 1 <= self.top_k <= self.num_experts // self.groups * self.top_groups
        ):
            raise ValueError(
                f"a router can't choose {self.top_k} of {self.num_experts} experts, from {self.top_groups} of "
                f"{self.groups} groups"
            )


@dataclass(frozen=True, slots=True)
class ExpertActivation:
    """The step between gate and down: silu(g)·u, gelu(g)·u with the tanh approximation, or gpt-oss's
    (u + 1)·g·sigmoid(alpha·g), with g ≤ limit and -limit ≤ u ≤ limit."""

    name: Literal["silu", "gelu_tanh", "clamped"] = "silu"
    alpha: float = 1.702
    limit: float = 7.0


@dataclass(frozen=True, slots=True)
class Routes:
    """The experts of each row: `ids` [T, k] int64 and `weights` [T, k] float32, the first choice first."""

    ids: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """The places of a step's rows, by expert, and for an expert in the order of the rows: expert e has the places
    `starts[e]` … `starts[e + 1]` - 1. `starts` [E + 1], `row_of` [P] and `place_of` [T, k] are int64."""

    starts: torch.Tensor
    row_of: torch.Tensor
    place_of: torch.Tensor


@dataclass(frozen=True, slots=True)
class PackedExperts(ABC):
    """The weights `shape` [E, N, K] of one linear of all experts, as `ExpertOps.pack` made them. `dtype` is that of x
    and y."""

    shape: tuple[int, int, int]
    dtype: torch.dtype

    @abstractmethod
    def __call__(self, x: torch.Tensor, rows: ExpertRows, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[P, N]: x[p]·Wᵀ + b of the expert of each place p, for x [P, K] and bias [E, N] or None. Raises ValueError
        for others."""

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self)


class Route(Protocol):
    def __call__(
        self,
        logits: torch.Tensor,
        kind: RouterKind,
        correction: torch.Tensor | None = None,
        forced: torch.Tensor | None = None,
        scales: torch.Tensor | None = None,
    ) -> Routes:
        """`logits` [T, E] in any dtype. `correction` [E] float32 is added to the scores by which experts are chosen,
        not to their weights. `forced` [T, k] int64: the experts, chosen already. `scales` [E] float32 multiply the
        weights of their experts."""
        ...


@dataclass(frozen=True, slots=True)
class ExpertOps:
    """The kernels of mixtures of experts, as `loraplex.kernels.experts.torch_experts` has them."""

    route: Route
    group: Callable[[Routes, int], ExpertRows]
    """The places of routes to that many experts."""
    gather: Callable[[torch.Tensor, ExpertRows], torch.Tensor]
    """x [T, K] → [P, K]: the row of each place."""
    pack: Callable[[Iterable[Any], WeightForm, torch.dtype], PackedExperts]
    """Packs weights [N, K], one for each expert and each as `Ops.pack` takes them. Each is dropped before the next is
    taken, so they may be read one by one."""
    join: Callable[[Sequence[PackedLinear]], PackedExperts]
    """Makes one of linears that `Ops.pack` has packed, one for each expert."""
    act: Callable[[torch.Tensor, ExpertActivation], torch.Tensor]
    """[P, 2·I], gate before up → [P, I]"""
    combine: Callable[[torch.Tensor, Routes, ExpertRows], torch.Tensor]
    """y [P, H] → [T, H]: each row's places times their weights, summed in float32 in the order of the routes, and
    rounded once."""
    add_gated: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
    """out, y [T, H] and a gate [T, 1]: out += y·sigmoid(gate), in place. The sigmoid, the product and the sum are
    rounded."""
    keep_starts: Callable[[ExpertRows, torch.Tensor], None]
    """Copies `starts` into [E + 1] int64, which outlives the step."""
