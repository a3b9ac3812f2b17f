"""A mixture of experts with adapters on them on a GPU: a layer's kernels against torch's in float32, and how near the
floor of the experts that a step reads.

Without a GPU it runs interpreted, and gives no times.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from bench.gpu.timing import Ceilings, median_ms, relative_error
from loraplex.kernels.experts import torch_experts
from loraplex.kernels.experts.lora_types import ExpertLoraWeights, ExpertSiteGroup, slots_of_rows
from loraplex.kernels.experts.torch_expert_lora import TorchExpertLoraPass
from loraplex.kernels.experts.triton_expert_lora import TritonExpertLora
from loraplex.kernels.experts.types import ExpertActivation, RouterKind
from loraplex.kernels.lora.types import CHUNK, GRANULE_BYTES, Segment
from loraplex.kernels.triton_backend import triton_ops
from loraplex.kernels.weight_form import FLOATS
from support.kernels.lora_arena import expert_groups

_SITES = {"experts.gate_up": 2, "experts.down": 3}
"""The numbers of the sites that adapters have: gate and up as one matrix, and down."""
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.03}


@dataclass(frozen=True)
class ExpertCase:
    """`rows` dealt out evenly among `adapters`; 0: all are the base model's."""

    hidden: int
    width: int
    router: RouterKind
    rows: int
    adapters: int
    rank: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        of = f"{self.router.top_k} of {self.router.num_experts} experts"
        return f"{of}, {self.rows} rows, {self.adapters} adapters, rank {self.rank}"


def small_cases() -> list[ExpertCase]:
    """In float32, which the interpreter rounds as a GPU does."""
    few = RouterKind("softmax", 6, 2, normalise=True)
    grouped = RouterKind("sigmoid", 8, 3, normalise=True, scaling=1.7, groups=4, top_groups=2)
    return [
        ExpertCase(48, 24, few, 5, 2, 12, torch.float32),
        ExpertCase(32, 40, grouped, 7, 3, 3, torch.float32),
        ExpertCase(32, 24, few, 3, 0, 0, torch.float32),
    ]


def full_cases() -> list[ExpertCase]:
    """A layer of Qwen3-30B-A3B."""
    router = RouterKind("softmax", 128, 8, normalise=True, weights_in_float32=False)
    most = [(64, 8, 16), (64, 16, 16), (64, 8, 32), (64, 0, 0), (16, 8, 16), (1, 1, 16), (256, 16, 16)]
    return [ExpertCase(2048, 768, router, *each) for each in (*most, (2048, 1, 16), (2048, 0, 0))]


class _Layer:
    """One layer's weights and adapters, and a step of rows whose routes are drawn evenly."""

    def __init__(self, case: ExpertCase, device: torch.device) -> None:
        experts, dtype = case.router.num_experts, case.dtype
        self.case, self.ops = case, triton_ops(device=device).experts
        generator = torch.Generator(device).manual_seed(0)

        def drawn(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device).mul_(scale).to(dtype)

        self.floats = {
            "experts.gate_up": drawn(experts, 2 * case.width, case.hidden, scale=case.hidden**-0.5),
            "experts.down": drawn(experts, case.hidden, case.width, scale=case.width**-0.5),
        }
        self.packed = {key: self.ops.pack(each, FLOATS, dtype) for key, each in self.floats.items()}
        self.x, self.logits = drawn(case.rows, case.hidden), drawn(case.rows, experts)
        groups = expert_groups(case.hidden, case.width, experts, (0,))
        self.weights = self._adapters(groups, drawn)
        cuts = [case.rows * number // max(1, case.adapters) for number in range(case.adapters + 1)]
        self.by_slot: dict[int, list[Segment]] = {
            slot: [(slot, first, last - first)] for slot, (first, last) in enumerate(pairwise(cuts))
        }
        slots = torch.from_numpy(slots_of_rows(self.by_slot, case.rows)).to(device)
        self.lora = TritonExpertLora(self.weights).begin(slots)
        self.routes = self.ops.route(self.logits, case.router)
        self.rows = self.ops.group(self.routes, experts)

    def _adapters(self, groups: tuple[ExpertSiteGroup, ...], drawn: Any) -> ExpertLoraWeights:
        """Tiles one behind the other, each at a place of its own."""
        case, chunks = self.case, -(-self.case.rank // CHUNK)
        experts, slots = case.router.num_experts, max(1, case.adapters)
        tables = np.zeros((slots, 1, 4, experts, chunks + 1, 2), np.int32)
        heights = np.zeros((slots, 1, 4), np.int32)
        granule, end = GRANULE_BYTES // case.dtype.itemsize, 1
        for group in groups if chunks else ():
            site = _SITES[group.key]
            heights[:, 0, site] = CHUNK
            for side, width in enumerate((group.in_features, group.out_features)):
                size = -(-CHUNK * width // granule)
                numbers = np.arange(slots * experts * chunks).reshape(slots, experts, chunks)
                tables[:, 0, site, :, :chunks, side] = end + size * numbers
                end += size * numbers.size
        storage, slot_of = drawn(end * granule, scale=0.05), np.arange(slots, dtype=np.int32)
        return ExpertLoraWeights(storage, groups, slot_of, tables, heights)

    def run(self) -> torch.Tensor:
        each, packed = self.ops, self.packed
        routes = each.route(self.logits, self.case.router)
        rows = each.group(routes, self.case.router.num_experts)
        xs = each.gather(self.x, rows)
        y = packed["experts.gate_up"](xs, rows)
        self.lora.apply(0, "experts.gate_up", xs, y, rows)
        h = each.act(y, ExpertActivation())
        z = packed["experts.down"](h, rows)
        self.lora.apply(0, "experts.down", h, z, rows)
        return each.combine(z, routes, rows)

    def exact(self) -> torch.Tensor:
        """The same by torch's operations on the CPU, in float32, from the routes that were chosen."""
        each, case = torch_experts, self.case
        routes = replace(self.routes, ids=self.routes.ids.cpu(), weights=self.routes.weights.cpu())
        rows = each.group(routes, case.router.num_experts)
        weights = replace(self.weights, storage=self.weights.storage.cpu())
        lora = TorchExpertLoraPass(weights, self.by_slot, case.rows)
        given = each.gather(self.x.cpu().float(), rows)
        for key, stack in self.floats.items():
            y = torch.cat(
                [
                    given[first:last] @ stack[expert].cpu().float().T
                    for expert, (first, last) in enumerate(pairwise(rows.starts.tolist()))
                ]
            )
            lora.apply(0, key, given, y, rows)
            gate, up = y.chunk(2, 1)
            given = torch.nn.functional.silu(gate) * up if key == "experts.gate_up" else y
        return each.combine(given, routes, rows)

    def parts(self) -> dict[str, Any]:
        """The timed calls, by the name of their column."""
        each, rows, routes = self.ops, self.rows, self.routes
        xs = each.gather(self.x, rows)
        y = self.packed["experts.gate_up"](xs, rows)
        h = each.act(y, ExpertActivation())
        z = self.packed["experts.down"](h, rows)

        def linears() -> None:
            self.packed["experts.gate_up"](xs, rows)
            self.packed["experts.down"](h, rows)

        def routing() -> None:
            each.group(each.route(self.logits, self.case.router), self.case.router.num_experts)
            each.gather(self.x, rows)
            each.act(y, ExpertActivation())
            each.combine(z, routes, rows)

        def lora() -> None:
            self.lora.apply(0, "experts.gate_up", xs, y, rows)
            self.lora.apply(0, "experts.down", h, z, rows)

        return {"graph_ms": linears, "routing_ms": routing, "lora_ms": lora, "layer_ms": self.run}


def run_case(case: ExpertCase, device: torch.device, ceilings: Ceilings | None = None) -> dict[str, Any]:
    """`ok`: a layer is torch's up to rounding. With `ceilings` its parts are timed. `floor_ms`, of the linears: one
    read of the experts that were chosen. `lora_floor_ms`: one read of the tiles that they need."""
    layer = _Layer(case, device)
    error = relative_error(layer.run().cpu(), layer.exact())
    found: dict[str, Any] = {
        "case": case.name, "dtype": str(case.dtype).removeprefix("torch."), "error": error,
        "ok": error <= _TOLERANCE[case.dtype],
    }  # fmt: skip
    if ceilings is None:
        return found
    ids = layer.routes.ids.cpu()
    slots = torch.from_numpy(slots_of_rows(layer.by_slot, case.rows))
    pairs = {(int(slot), expert) for slot, own in zip(slots, ids.tolist(), strict=True) for expert in own}
    adapted = sum(slot >= 0 for slot, _ in pairs)
    size, ranks = case.dtype.itemsize, -(-case.rank // CHUNK) * CHUNK
    num_bytes = len({expert for own in ids.tolist() for expert in own}) * 3 * case.hidden * case.width * size
    flops = 2 * 3 * ids.numel() * case.hidden * case.width
    floor = ceilings.floor_ms(num_bytes, flops)
    tiles = adapted * ranks * (2 * case.hidden + 3 * case.width) * size
    found |= {"bytes": num_bytes, "floor_ms": floor, "lora_floor_ms": ceilings.floor_ms(tiles)}
    found |= {name: median_ms(run, device) for name, run in layer.parts().items()}
    if found["graph_ms"] is not None:
        found["times_floor"] = found["graph_ms"] / floor
    return found
