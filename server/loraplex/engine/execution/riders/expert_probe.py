"""Outputs of an adapter's sites on routed experts, for rows that are forced to each expert once, from the pages that
serve it: see `loraplex.adapters.numerics`. A prompt would not reach every expert."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from loraplex.adapters.device.arena import AdapterArena
from loraplex.adapters.numerics import INPUT_ROWS
from loraplex.adapters.numerics.probes import EXPERT_SUMS, column_signs, probe_inputs
from loraplex.kernels.experts.types import ExpertOps, ExpertRows, Routes


@dataclass(frozen=True, slots=True)
class ExpertSums:
    """`sites`: (layer, site, how many experts). `sums` float32 [experts of all of these, EXPERT_SUMS] and `finite` bool
    [experts of all of these]."""

    sites: tuple[tuple[int, str, int], ...]
    sums: torch.Tensor
    finite: torch.Tensor

    def with_copies(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> ExpertSums:
        return ExpertSums(self.sites, copy(self.sums), copy(self.finite))


def measure_experts(
    arena: AdapterArena, slot: int, layers: range, dtype: torch.dtype, device: torch.device
) -> ExpertSums:
    """The sites of the adapter in `slot` in these layers. One site of one layer is held at a time, [experts, N]."""
    sites, sums, finite = [], [torch.empty(0, EXPERT_SUMS)], [torch.empty(0, dtype=torch.bool)]
    for layer, site, rows in _outputs(arena, slot, layers, dtype, device):
        sites.append((layer, site, len(rows)))
        signed = rows * torch.from_numpy(column_signs(rows.shape[1]).copy()).to(device)
        padded = torch.nn.functional.pad(signed, (0, -rows.shape[1] % EXPERT_SUMS))
        sums.append(padded.view(len(rows), -1, EXPERT_SUMS).sum(1))
        finite.append(rows.isfinite().all(1))
    return ExpertSums(
        tuple(sites), torch.cat([each.to(device) for each in sums]), torch.cat([f.to(device) for f in finite])
    )


def _outputs(
    arena: AdapterArena, slot: int, layers: range, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[int, str, torch.Tensor]]:
    """(layer, site, its outputs [experts, N] in float32)."""
    weights, ops = arena.experts, arena.kernels.ops.experts
    lora = arena.slot_expert_pass(slot, INPUT_ROWS)
    if weights is None or lora is None:
        return
    number = 0
    for of in weights.groups:
        rows = _rows(ops, of.num_experts, device)
        first = rows.starts[:-1]
        for layer in layers:
            heights = weights.heights[weights.slot_of[slot], layer, number : number + len(of.sites)]
            if not heights.any():
                continue
            x = torch.from_numpy(probe_inputs(layer, of.in_features)[:INPUT_ROWS].copy()).to(device, dtype)
            y = torch.zeros(len(rows.row_of), of.out_features, dtype=dtype, device=device)
            lora.apply(layer, of.key, ops.gather(x, rows), y, rows)
            out = y[first].float()
            for site, (start, end), height in zip(of.sites, of.columns, heights.tolist(), strict=True):
                if height:
                    yield layer, site, out[:, start:end]
        number += len(of.sites)


def _rows(ops: ExpertOps, num_experts: int, device: torch.device) -> ExpertRows:
    """Row e mod INPUT_ROWS goes to expert e. The last expert is chosen again where the number of experts does not
    divide; the first of its places is the row's that it has."""
    ids = torch.arange(-(-num_experts // INPUT_ROWS) * INPUT_ROWS, device=device).clamp(max=num_experts - 1)
    ids = ids.view(-1, INPUT_ROWS).T.contiguous()
    return ops.group(Routes(ids, torch.ones(ids.shape, device=device)), num_experts)
