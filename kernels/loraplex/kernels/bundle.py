"""The kernels of one backend for one device, as the engine gets them: resolved once, at the start, and handed down."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from loraplex.kernels.attention.choice import AttentionChoice
from loraplex.kernels.attention.kernel import AttentionNeeds
from loraplex.kernels.experts.lora_types import MakeExpertLoraPass
from loraplex.kernels.lora.types import LoraPass, LoraWeights, Scratch, Segment
from loraplex.kernels.ops import Ops

Backend = Literal["torch", "numba", "triton"]
"""The implementations, by name. "torch" runs on any device, "numba" on CPUs, "triton" on GPUs, and where its kernels
are interpreted, as in tests (TRITON_INTERPRET=1)."""
MakeLoraPass = Callable[[LoraWeights, Scratch, Mapping[int, Sequence[Segment]], int], LoraPass]
"""Prepares a step's adapters: weights, scratch memory, segments by slot, rows of the step."""


class Compilation(Protocol):
    """Kernels that are compiled before the first step, for a model in a dtype. `parts` says by name what it has:
    linears that are `codes`, keys and values that are (`kv_codes`), `recurrent` layers with a state, `experts`."""

    def is_done(self, dtype: torch.dtype, **parts: bool) -> bool: ...

    def run(self, dtype: torch.dtype, **parts: bool) -> None:
        """In the thread that will run the steps. Raises whatever the compiler does."""
        ...


@dataclass(frozen=True, slots=True)
class FourBits:
    """The `library`, with its version, that multiplies with 4-bit codes of its form; empty for the backend's own
    kernels. `reason`: why, in words."""

    library: str
    reason: str


@dataclass(frozen=True, slots=True)
class Kernels:
    """One backend on one device. Made by `loraplex.kernels.backend.resolve_kernels`.

    `choose_attention` gives the attention of a model in a dtype: `choice` names one of
    `loraplex.kernels.attention.choice.AttentionName`; it raises AttentionUnavailable for one that can't be had.
    `lora_pass` prepares a step's adapters on the host; None where lists of work lie on the device
    (`loraplex.kernels.lora.triton_lora`). `expert_lora_pass` does so for its adapters on routed experts; None where
    `lora_pass` is (`loraplex.kernels.experts.triton_expert_lora`).
    `obstacle_to_same_bits` (dtype, batch_invariant) says why these kernels
    cannot promise the same bits of a model in this dtype; None where they can. `multiplies`: whether products in a
    dtype are fit for use; the others take tens of times as long as in float32. `processor`: what decides bits beside
    sources and versions, on a CPU. `compilation` None: kernels are compiled as they are launched, or not at all.
    `choose_four_bits` (inputs of a group, dtype of x) says what multiplies with codes of 4 bits; None: no library
    could."""

    backend: Backend
    device: torch.device
    batch_invariant: bool
    ops: Ops
    choose_attention: Callable[[str, AttentionNeeds, torch.dtype], AttentionChoice]
    lora_pass: MakeLoraPass | None
    obstacle_to_same_bits: Callable[[torch.dtype, bool], str | None]
    multiplies: Callable[[torch.dtype], bool]
    processor: Callable[[], list[str]] = list
    compilation: Compilation | None = None
    expert_lora_pass: MakeExpertLoraPass | None = None
    choose_four_bits: Callable[[int, torch.dtype], FourBits] | None = None
