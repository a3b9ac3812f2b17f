"""One group's A and B sides over the same adapters and rows, by the kernels here and by those of a wheel.

Each function gives a `Contender`, whose layers have weights of their own. Those of a wheel are launched by the wheel's
own functions, which choose grid and configuration, with the settings that vLLM and SGLang have unless told otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from bench.gpu.lora import Batch, LoraCase
from bench.gpu.lora_peers.wheels import Wheel, missing
from loraplex.kernels.lora.site_groups import SiteGroup
from support.kernels.lora_arena import ManualArena

CHUNK_ROWS = 16
"""Rows of a segment of SGLang's, at most: the default of its --max-lora-chunk-size."""


@dataclass(frozen=True)
class Contender:
    """`shrink` leaves a layer's hidden values behind for `expand`, which adds to y [T, sum of N_i]."""

    name: str
    shrink: Callable[[int], None]
    expand: Callable[[int, torch.Tensor], None]


def ours(name: str, batch: Batch, group: str, x: torch.Tensor) -> Contender:
    launcher = batch.launcher
    return Contender(
        name,
        lambda layer: launcher.shrink(layer, group, x),
        lambda layer, y: launcher.expand(layer, group, y),
    )


def theirs(
    wheel: Wheel, modules: SimpleNamespace, case: LoraCase, matrices: Matrices, x: torch.Tensor
) -> Iterator[Contender]:
    """The contenders of a wheel whose `modules` are imported. Raises WheelError where a function is not what it was."""
    make = {"vllm": _vllm, "sglang": _sglang}[wheel.package]
    for name, shrink, expand in make(modules, case, matrices, x):
        yield Contender(
            f"{wheel.title}{name}",
            _guarded(wheel, "the A side", shrink),
            _guarded(wheel, "the B side", expand),
        )


@dataclass(frozen=True)
class Matrices:
    """An arena's numbers as [slots, rank, K] and [slots, N, rank], by layer and site, in their own dtype. Adapters of
    smaller ranks end with zeros."""

    a: list[list[torch.Tensor]]
    b: list[list[torch.Tensor]]


def read_matrices(arena: ManualArena, group: SiteGroup, layers: int, ranks: Sequence[int]) -> Matrices:
    dtype, device, most = arena.weights.storage.dtype, arena.weights.storage.device, max(ranks)
    found = Matrices([], [])
    for layer in range(layers):
        found.a.append([])
        found.b.append([])
        for site, width in zip(group.sites, group.out_features, strict=True):
            a = torch.zeros(len(ranks), most, group.in_features, dtype=dtype, device=device)
            b = torch.zeros(len(ranks), width, most, dtype=dtype, device=device)
            for slot, rank in enumerate(ranks):
                tiles = arena.site(slot, layer, site, group.in_features, width)
                assert tiles is not None
                a[slot, :rank], b[slot, :, :rank] = tiles[0][:rank], tiles[1][:rank].T
            found.a[-1].append(a)
            found.b[-1].append(b)
    return found


_Sides = tuple[str, Callable[[int], None], Callable[[int, torch.Tensor], None]]


def _vllm(modules: SimpleNamespace, case: LoraCase, matrices: Matrices, x: torch.Tensor) -> Iterator[_Sides]:
    """A and B sides through the metadata that vLLM prepares for a step, over hidden values in float32."""
    slots = [slot for slot, count in case.rows for _ in range(count)]
    meta = modules.lora_kernel_metadata.LoRAKernelMeta.make(len(case.ranks), len(slots), x.device)
    meta.prepare_tensors(torch.tensor(slots, dtype=torch.int32, device=x.device))
    step = meta.meta_args(len(slots), False)
    hidden = torch.empty(
        len(matrices.a[0]), len(slots), max(case.ranks), dtype=torch.float32, device=x.device
    )
    a = [tuple(matrix.unsqueeze(1) for matrix in layer) for layer in matrices.a]
    b = [tuple(matrix.unsqueeze(1) for matrix in layer) for layer in matrices.b]

    def shrink(layer: int) -> None:
        modules.lora_shrink_op.lora_shrink(x, a[layer], hidden, *step, 1.0)

    def expand(layer: int, y: torch.Tensor) -> None:
        modules.lora_expand_op.lora_expand(hidden, b[layer], y, *step, offset_start=0, add_inputs=True)

    yield "", shrink, expand


def _sglang(
    modules: SimpleNamespace, case: LoraCase, matrices: Matrices, x: torch.Tensor
) -> Iterator[_Sides]:
    """Chunked SGMV, the default backend: A and B of a group's sites lie side by side, those of an adapter of a smaller
    rank close together. Once as it is launched unless a setting says so, once with K split in 8. Rows of the base are
    those of one slot more, of rank 0."""
    step = _segments(case, x.device)
    most, sites = max(case.ranks), len(matrices.a[0])
    a, b = [], []
    for layer_a, layer_b in zip(matrices.a, matrices.b, strict=True):
        joined = torch.zeros(len(case.ranks) + 1, sites * most, x.shape[1], dtype=x.dtype, device=x.device)
        for slot, rank in enumerate(case.ranks):
            joined[slot, : sites * rank] = torch.cat([matrix[slot, :rank] for matrix in layer_a])
        a.append(joined)
        widened = torch.cat(layer_b, dim=1)
        b.append(torch.cat([widened, torch.zeros_like(widened[:1])]))
    widths = [matrix.shape[1] for matrix in matrices.b[0]]
    ends = [sum(widths[:site]) for site in range(sites + 1)]
    offsets = torch.tensor(ends, dtype=torch.int32, device=x.device)
    offsets_cpu = torch.tensor(ends, dtype=torch.int32)

    def sides(split_k: int | None) -> tuple[Callable[[int], None], Callable[[int, torch.Tensor], None]]:
        hidden: dict[int, torch.Tensor] = {}

        def shrink(layer: int) -> None:
            hidden[layer] = modules.chunked_sgmv_shrink.chunked_sgmv_lora_shrink_forward(
                x, a[layer], step, sites, split_k=split_k
            )

        def expand(layer: int, y: torch.Tensor) -> None:
            modules.chunked_sgmv_expand.chunked_sgmv_lora_expand_forward(
                hidden[layer], b[layer], step, offsets, max(widths), y, slice_offsets_cpu=offsets_cpu
            )

        return shrink, expand

    yield "", *sides(None)
    yield ", K split", *sides(8)


def _segments(case: LoraCase, device: torch.device) -> SimpleNamespace:
    """The rows of each adapter in pieces of up to CHUNK_ROWS, in the fields that SGLang's functions read."""
    base = len(case.ranks)
    rows: dict[int, list[int]] = {}
    for slot, first, count in case.segments:
        rows.setdefault(slot if slot >= 0 else base, []).extend(range(first, first + count))
    pieces = [
        (slot, found[at : at + CHUNK_ROWS])
        for slot, found in sorted(rows.items())
        for at in range(0, len(found), CHUNK_ROWS)
    ]
    ends = [0]
    for _, piece in pieces:
        ends.append(ends[-1] + len(piece))

    def numbers(values: Sequence[float], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return SimpleNamespace(
        use_cuda_graph=False,
        num_segments=len(pieces),
        max_len=CHUNK_ROWS,
        seg_indptr=numbers(ends),
        weight_indices=numbers([slot for slot, _ in pieces]),
        permutation=numbers([row for _, piece in pieces for row in piece]),
        lora_ranks=numbers([*case.ranks, 0]),
        scalings=numbers([1.0] * (base + 1), torch.float32),
    )


def _guarded(wheel: Wheel, side: str, launch: Callable[..., None]) -> Callable[..., None]:
    """Launch, and name the wheel of a function that is missing or takes other arguments."""

    def guarded(*arguments: Any) -> None:
        try:
            launch(*arguments)
        except (AttributeError, TypeError) as error:
            raise missing(wheel, side, error) from error

    return guarded
