"""Batched LoRA in Triton: what `loraplex.kernels.lora.reference` computes, in two launches a group and layer.

    shrink    h[plane, t, i, :] = x[t, plane's part of K] · A_{a,i}ᵀ      in float32
    expand    y[t, cols_i]     += (Σ_planes h[plane, t, i, :]) · B_{a,i}     and g, c where a site has them

A fixed number of programs walks a list of work that the step brings in device memory (`lora.triton_plan`), so that a
recorded launch serves any batch. Splitting the sums of long rows into planes, and expanding them from there, takes two
launches, no atomic addition and no barrier between programs: the same batch gives the same bits.

`TritonLora` belongs to an arena. For a step:

    work = lora.plan(segments, num_rows, buffer)       on the host, into a part of what is copied for the step
    lora.launcher(device_buffer, work, slots)          a LoraPass

and for recorded launches, once, `lora.recorded(device_buffer, max_rows)`, whose lists are planned with `fixed`.
Passes that share hidden values must not run at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from loraplex.kernels.lora.dispatch import GatingPass
from loraplex.kernels.lora.triton_expand import expand
from loraplex.kernels.lora.triton_fields import RECORD_HEAD
from loraplex.kernels.lora.triton_plan import (
    EXPAND,
    LARGE,
    SHRINK,
    SMALL,
    GroupPlan,
    LoraPlanner,
    Work,
    count_programs,
    site_records,
)
from loraplex.kernels.lora.triton_rows import expand_rows
from loraplex.kernels.lora.triton_shrink import shrink
from loraplex.kernels.lora.triton_strips import expand_strips, gated_strips
from loraplex.kernels.lora.triton_tiling import STRIP_TILES, LoraTiling
from loraplex.kernels.lora.types import (
    CHUNK,
    GRANULE_BYTES,
    LoraWeights,
    Scratch,
    Segment,
    segments_by_slot,
)

_DEFAULT = LoraTiling()
_HIDDEN = "lora hidden"


class LoraLauncher(GatingPass):
    """See `loraplex.kernels.lora.dispatch.LoraPass`. Launches over buffers that stay where they are; what they hold
    may change. `programs`: the most of a launch, by (kind, stage).

    `work` int32 is the list, `records` those of the slots that it names, `units` of each group, `hidden` float32.
    Without a `step` every group's small pieces are launched, whatever the list will say: for recording, with programs
    for `most_pieces` of shrink and of expand; with `large`, large pieces too.
    """

    def __init__(
        self,
        storage: torch.Tensor,
        planner: LoraPlanner,
        *,
        programs: Mapping[tuple[int, int], int],
        records: torch.Tensor,
        units: Sequence[torch.Tensor],
        work: torch.Tensor,
        hidden: torch.Tensor,
        active: NDArray[np.bool_] | None = None,
        step: Work | None = None,
        most_pieces: tuple[int, int] = (0, 0),
        large: bool = False,
    ) -> None:
        self._storage = storage
        self._floats = storage.view(torch.float32)
        self._planner = planner
        self._programs = programs
        self._records = records
        self._units = units
        self._work = work
        self._hidden = hidden
        self._active = active
        self._step = step
        self._most_pieces = most_pieces
        self._recorded_kinds = (SMALL, LARGE) if large else (SMALL,)
        self._dependent = _launches_dependents(storage.device)
        self._numbers = {plan.group.key: g for g, plan in enumerate(planner.groups)}

    def apply(self, layer: int, group: str, x: torch.Tensor, y: torch.Tensor) -> None:
        """See `LoraPass.apply`. Raises ValueError where the shapes are not the group's, KeyError for no group."""
        self.shrink(layer, group, x)
        self.expand(layer, group, y)

    def gate(
        self, layer: int, group: str, x: torch.Tensor, y: torch.Tensor, *, gelu: bool
    ) -> torch.Tensor | None:
        """See `GatingPass.gate`: for gate and up, where there are large pieces, which go by strips."""
        g = self._numbers[group]
        plan = self._planner.groups[g]
        # Sums of float16 would spill.
        fits = self._storage.dtype is not torch.float16 or self._block_r(LARGE) <= 32
        kinds = self._kinds(layer, EXPAND, g)
        if LARGE not in kinds or not (plan.gated and self._planner.by_strips and fits):
            return None
        self.shrink(layer, group, x)
        self._check(group, "y", y, sum(plan.group.out_features))
        if SMALL in kinds:
            self._launch_expand(SMALL, layer, g, plan, y)
        out = torch.empty(y.shape[0], plan.group.out_features[0], dtype=y.dtype, device=y.device)
        self._launch_gated(layer, g, plan, y, out, gelu=gelu)
        return out

    def shrink(self, layer: int, group: str, x: torch.Tensor) -> None:
        """The first half of `apply`: reads x [T, K], writes hidden values alone."""
        g = self._numbers[group]
        plan = self._planner.groups[g]
        self._check(group, "x", x, plan.group.in_features)
        for kind in self._kinds(layer, SHRINK, g):
            self._launch_shrink(kind, layer, g, plan, x)

    def expand(self, layer: int, group: str, y: torch.Tensor) -> None:
        """The second half: adds to y [T, sum of N_i] what `shrink` of the same layer and group left."""
        g = self._numbers[group]
        plan = self._planner.groups[g]
        self._check(group, "y", y, sum(plan.group.out_features))
        for kind in self._kinds(layer, EXPAND, g):
            self._launch_expand(kind, layer, g, plan, y)

    def _check(self, group: str, name: str, tensor: torch.Tensor, columns: int) -> None:
        rows = tensor.shape[0] if self._step is None else self._step.num_rows
        if tensor.shape != (rows, columns) or tensor.stride(1) != 1:
            raise ValueError(
                f"group '{group}' of a pass over {rows} rows got {name} {tuple(tensor.shape)} with strides "
                f"{tensor.stride()}; it takes {columns} adjacent columns"
            )

    def _kinds(self, layer: int, stage: int, g: int) -> tuple[int, ...]:
        if self._step is None:
            return self._recorded_kinds
        if self._active is not None and not self._active[layer, g]:
            return ()
        pieces = self._step.pieces
        return tuple(kind for kind in (SMALL, LARGE) if pieces[kind][stage][g])

    def _grid(self, kind: int, stage: int, g: int, units: int) -> tuple[int]:
        pieces = self._most_pieces[stage] if self._step is None else self._step.pieces[kind][stage][g]
        if self._step is not None and (kind, stage) == (LARGE, EXPAND):
            pieces += self._step.others[g]
        return (max(1, min(self._programs[kind, stage], pieces * units)),)

    def _block_r(self, kind: int) -> int:
        """Ranks of a piece that are computed at a time."""
        if kind == SMALL:
            return self._planner.tiling.block_r
        return self._planner.recorded_block_r if self._step is None else self._step.block_r

    def _constants(self) -> dict[str, Any]:
        return {
            "LAYERS": self._records.shape[1],
            "SITES": self._records.shape[2],
            "MAX_CHUNKS": (self._records.shape[3] - RECORD_HEAD) // 2,
            "GRANULE": GRANULE_BYTES // self._storage.element_size(),
        }

    def _launch_shrink(self, kind: int, layer: int, g: int, plan: GroupPlan, x: torch.Tensor) -> None:
        tiling = self._planner.tiling
        small = kind == SMALL
        row_k = tiling.row_block_k if small else 0
        early = small and tiling.early and self._dependent
        options: dict[str, Any] = {"launch_pdl": True} if early else {}
        if row_k and self._storage.element_size() == 2:
            options["maxnreg"] = tiling.shrink_registers()
        splits = plan.max_splits if self._step is None else self._step.splits[kind][g]
        shrink[self._grid(kind, SHRINK, g, plan.hidden_sites * splits)](
            x,
            x.stride(0),
            self._storage,
            self._hidden,
            self._work,
            self._records,
            self._planner.list_number(kind, SHRINK, g),
            layer,
            plan.first_site,
            plan.hidden_sites,
            plan.group.in_features,
            **self._constants(),
            BLOCK_M=tiling.small_rows if small else tiling.large_rows,
            BLOCK_R=self._block_r(kind),
            BLOCK_K=tiling.block_k if small else tiling.large_block_k,
            ROW_K=row_k,
            DEPENDENT=self._dependent,
            EARLY=early,
            num_warps=tiling.small_warps if small else tiling.large_warps,
            num_stages=tiling.small_stages if small else tiling.large_stages,
            **options,
        )

    def _launch_expand(self, kind: int, layer: int, g: int, plan: GroupPlan, y: torch.Tensor) -> None:
        tiling = self._planner.tiling
        small = kind == SMALL
        by_rows = small and tiling.row_programs > 0
        by_strips = not small and self._planner.by_strips
        units = self._units[2 * g + kind]
        items = units.shape[0]
        kernel, options = expand, self._tile_options(small)
        if by_rows:
            kernel, options = expand_rows, self._row_options()
        elif by_strips:
            kernel, options = expand_strips, self._strip_options(1)
            items *= tiling.large_rows // tiling.expand_rows
        if self._dependent:
            options["launch_pdl"] = True
        # On tensor cores, sums of products of other dtypes than bfloat16 would not fit.
        bounded = self._storage.dtype is torch.bfloat16 or (by_rows and self._storage.dtype is torch.float16)
        kernel[self._grid(kind, EXPAND, g, items)](
            y,
            y.stride(0),
            self._storage,
            self._floats,
            self._hidden,
            self._work,
            units,
            self._records,
            self._planner.list_number(kind, EXPAND, g),
            layer,
            plan.first_site,
            plan.hidden_sites,
            units.shape[0],
            **self._constants(),
            ALIGNED=plan.aligned,
            DEPENDENT=self._dependent,
            num_stages=tiling.small_stages,
            maxnreg=tiling.expand_registers(small) if bounded else None,
            **options,
        )

    def _launch_gated(
        self, layer: int, g: int, plan: GroupPlan, y: torch.Tensor, out: torch.Tensor, *, gelu: bool
    ) -> None:
        tiling = self._planner.tiling
        # Half as many columns at a time: tiles are of both sites.
        options = self._strip_options(2)
        if self._dependent:
            options["launch_pdl"] = True
        strips = -(-out.shape[1] // (STRIP_TILES * tiling.large_block_n))
        gated_strips[self._grid(LARGE, EXPAND, g, strips * (tiling.large_rows // tiling.expand_rows))](
            y,
            y.stride(0),
            out,
            self._storage,
            self._floats,
            self._hidden,
            self._work,
            self._records,
            self._planner.list_number(LARGE, EXPAND, g),
            layer,
            plan.first_site,
            INNER=out.shape[1],
            GELU=gelu,
            **self._constants(),
            DEPENDENT=self._dependent,
            num_stages=tiling.small_stages,
            maxnreg=tiling.expand_registers(False) if self._storage.dtype is torch.bfloat16 else None,
            **options,
        )

    def _row_options(self) -> dict[str, Any]:
        tiling = self._planner.tiling
        return {"RANKS": tiling.block_r, "BLOCK_N": tiling.block_n, "num_warps": 1}

    def _strip_options(self, sites: int) -> dict[str, Any]:
        """`sites`: that a tile has columns of, as many in all."""
        tiling = self._planner.tiling
        ranks = self._block_r(LARGE)
        # Of many ranks, stages of whole tiles would fill an A100's shared memory, and float16 would spill.
        columns = max(tiling.large_block_n // (sites * (2 if ranks > 32 else 1)), 2 * CHUNK)
        return {
            "PLANES": max(1, tiling.planes * tiling.block_r // ranks),
            "BLOCK_M": tiling.expand_rows,
            "BLOCK_R": ranks,
            "BLOCK_N": columns,
            "PIECE_ROWS": tiling.large_rows,
            "TILES": STRIP_TILES * tiling.large_block_n // columns,
            "STAGES": tiling.strip_stages,
            "num_warps": tiling.large_warps,
        }

    def _tile_options(self, small: bool) -> dict[str, Any]:
        tiling = self._planner.tiling
        return {
            "PLANES": tiling.planes,
            "BLOCK_M": tiling.small_rows if small else tiling.expand_rows,
            "BLOCK_R": tiling.block_r,
            "BLOCK_N": tiling.block_n if small else tiling.large_block_n,
            "BY_ROWS": small and not tiling.batch_invariant,
            "num_warps": tiling.small_warps if small else tiling.large_warps,
        }


class TritonLora:
    """Batched LoRA over an arena, whose tables it keeps a copy of on the device.

    Everything that a step needs is allocated here: memory for hidden values of up to `max_rows` rows of up to
    `max_segments` runs with adapters comes from `scratch`, which the passes of the layers and of the head may share.
    `programs` is the number of programs of a launch: as many as the device runs at a time, unless given.
    """

    def __init__(
        self,
        weights: LoraWeights,
        scratch: Scratch,
        *,
        max_rows: int,
        max_segments: int,
        tiling: LoraTiling = _DEFAULT,
        programs: int | None = None,
    ) -> None:
        device = weights.storage.device
        num_slots, chunks, layers, sites, _ = weights.tables.shape
        self._weights = weights
        self._max_rows, self._max_segments = max_rows, max_segments
        multiprocessors = None
        if device.type == "cuda":
            multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        self._programs = count_programs(tiling, multiprocessors, programs)
        self._planner = LoraPlanner(weights.groups, chunks - 1, tiling, self._programs[SMALL, SHRINK])
        shape = (num_slots, layers, sites, RECORD_HEAD + 2 * (chunks - 1))
        self._host = torch.zeros(shape, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._records = torch.zeros(shape, dtype=torch.int32, device=device)
        self._widest = np.zeros((num_slots, len(weights.groups)), np.int32)
        self._present = np.zeros((num_slots, layers, len(weights.groups)), np.bool_)
        self._units = [torch.from_numpy(units).to(device) for units in self._planner.units()]
        size = self._planner.hidden_capacity(max_rows, max_segments, fixed=False)
        self._hidden = scratch.buffer(_HIDDEN, (size,), torch.float32)

    @property
    def work_size(self) -> int:
        """int32 that the list of work of any step can take."""
        return self._planner.capacity(self._max_rows, self._max_segments)

    @property
    def hidden_size(self) -> int:
        """float32 that it takes of its scratch memory."""
        return self._hidden.numel()

    def write(self, slot: int) -> None:
        """Take over what the tables say of a slot: after each write to it, before a step uses it. On a GPU the copy
        is enqueued on the calling thread's current stream, as that of the pages."""
        records = site_records(self._weights, [slot])
        self._host[slot].numpy()[:] = records[0]
        self._records[slot].copy_(self._host[slot], non_blocking=True)
        self._widest[slot] = self._planner.widest(records)[0]
        self._present[slot] = self._planner.present(records)[0]

    def plan(
        self,
        segments: Sequence[Segment],
        num_rows: int,
        into: NDArray[np.int32],
        *,
        fixed: bool = False,
        prompts: bool = False,
    ) -> Work:
        """Write a step's list of work to the beginning of `into`, `work.size` numbers that must get to the device
        before it runs. `fixed`: for the launches of `recorded`, with the same `prompts`. Raises ValueError as
        `begin_pass` does, and for more rows or runs than there is room for."""
        by_slot = segments_by_slot(segments, self._weights.num_chunks, num_rows)
        if num_rows > self._max_rows:
            raise ValueError(f"a step of {num_rows} rows, where {self._max_rows} are the most")
        chosen = [segment for of_slot in by_slot.values() for segment in of_slot]
        step = self._planner.write(chosen, self._widest, num_rows, into, fixed=fixed, prompts=prompts)
        if step.hidden > self._hidden.numel():
            raise ValueError(f"{num_rows} rows are too many for recorded launches")
        return step

    def launcher(self, work: torch.Tensor, step: Work, slots: Sequence[int]) -> LoraLauncher:
        """The pass of a step that `plan` planned, and whose list `work` holds on the device."""
        active: NDArray[np.bool_] = np.logical_or.reduce(self._present[list(slots)], axis=0)
        return self._launcher(work, step, active)

    def recorded(
        self, work: torch.Tensor, max_rows: int | None = None, *, prompts: bool = False
    ) -> LoraLauncher:
        """Launches to be recorded, as a CUDA graph, that serve every step of up to `max_rows` rows (or as many as
        there is room for) that is planned with `fixed` and whose list is in `work` when they run. `prompts`: steps with
        prompt chunks, whose large pieces have launches of their own where B sides go by strips; such a step is planned
        for as many rows as x has."""
        rows = max_rows or self._max_rows
        blocks = -(-self._planner.max_ranks // self._planner.tiling.block_r)
        large = self._planner.records_large(prompts)
        return self._launcher(work, None, None, (rows * blocks, rows), large)

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile all that a step may launch, for x and y of this dtype: seconds each, which no step should take.
        Launches everything once with empty lists."""
        planner, device = self._planner, self._weights.storage.device
        n = len(planner.groups)
        empty = torch.zeros(planner.head_size, dtype=torch.int32, device=device)
        once = ((1,) * n,) * 2
        never = ((0,) * n,) * 2
        tiling = planner.tiling
        # Blocks of ranks are large pieces' alone.
        blocks, large = (
            ((tiling.block_r,), never) if tiling.batch_invariant else (tiling.large_blocks_r, once)
        )
        for block_r in blocks:
            step = Work(1, 0, 0, (once, large), once, block_r, (0,) * n)
            launcher = self._launcher(empty, step, None)
            for plan in planner.groups:
                x = torch.empty(1, plan.group.in_features, dtype=dtype, device=device)
                y = torch.empty(1, sum(plan.group.out_features), dtype=dtype, device=device)
                launcher.apply(0, plan.group.key, x, y)
                for gelu in (False, True):
                    launcher.gate(0, plan.group.key, x, y, gelu=gelu)

    def _launcher(
        self,
        work: torch.Tensor,
        step: Work | None,
        active: NDArray[np.bool_] | None,
        most_pieces: tuple[int, int] = (0, 0),
        large: bool = False,
    ) -> LoraLauncher:
        return LoraLauncher(
            self._weights.storage,
            self._planner,
            programs=self._programs,
            records=self._records,
            units=self._units,
            work=work,
            hidden=self._hidden,
            active=active,
            step=step,
            most_pieces=most_pieces,
            large=large,
        )


def _launches_dependents(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
