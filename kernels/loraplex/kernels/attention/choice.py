"""Which kernel computes a model's attention, chosen once when the model is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from loraplex.kernels.attention.kernel import AttentionKernel, AttentionNeeds
from loraplex.kernels.attention.torch_kernel import TorchAttention
from loraplex.kernels.backend import Backend

AttentionName = Literal["auto", "triton", "torch", "flash-attn-3"]
"""What may be asked for. Beside Triton's other kernels, "torch" and "flash-attn-3" compute the steps that have chunks
of prompts, whole or in part, and Triton all others."""


class AttentionUnavailable(ValueError):
    """A kernel was asked for by name that cannot compute this model's attention here."""


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """`reason`: why this kernel, and what stands in the way of others."""

    kernel: AttentionKernel
    reason: str

    @property
    def name(self) -> str:
        return self.kernel.name


def choose_attention(
    choice: str,
    backend: Backend,
    needs: AttentionNeeds,
    dtype: torch.dtype,
    device: torch.device,
    *,
    batch_invariant: bool = False,
) -> AttentionChoice:
    """The kernel for a model, beside the other kernels of a `backend` that `resolve_backend` returned. `choice` "auto"
    is the backend's own. `batch_invariant`: a row gets the same bits in every step, where that is a choice.

    Raises AttentionUnavailable rather than fall back where an explicit choice can't be had.
    """
    if backend != "triton":
        return _choose_without_triton(choice, backend, needs, dtype, device)
    # Triton need not be there where it does not run.
    from loraplex.kernels.attention import library_kernel
    from loraplex.kernels.attention.triton_kernel import TritonAttention

    obstacles = {
        name: find(needs, dtype, device, batch_invariant=batch_invariant)
        for name, find in (
            ("torch", library_kernel.obstacle_to_torch),
            ("flash-attn-3", library_kernel.obstacle_to_flash_attn_3),
        )
    }
    if choice in ("auto", "triton"):
        kernel = TritonAttention(needs, dtype, device, batch_invariant=batch_invariant)
        return AttentionChoice(kernel, "as was asked for" if choice == "triton" else _why_triton(obstacles))
    if choice not in obstacles:
        raise AttentionUnavailable(_unknown(choice))
    obstacle = obstacles[choice]
    if obstacle is not None:
        raise AttentionUnavailable(f"{obstacle}; choose auto or triton")
    library: library_kernel.Library = (
        library_kernel.TorchPrompts() if choice == "torch" else library_kernel.FlashAttention3()
    )
    return AttentionChoice(library_kernel.LibraryAttention(library, needs, dtype, device), "as was asked for")


def _choose_without_triton(
    choice: str, backend: Backend, needs: AttentionNeeds, dtype: torch.dtype, device: torch.device
) -> AttentionChoice:
    reason = f"it goes with {backend}'s other kernels" if choice == "auto" else "as was asked for"
    if choice in ("triton", "flash-attn-3"):
        raise AttentionUnavailable(f"it runs beside Triton's kernels, and {backend}'s are used; choose auto")
    if choice not in ("auto", "torch"):
        raise AttentionUnavailable(_unknown(choice))
    if backend == "numba":
        if choice == "torch":
            raise AttentionUnavailable("numba's kernels keep K and V in an order of their own; choose auto")
        # numba takes a second to import.
        from loraplex.kernels.attention.numba_kernel import NumbaAttention

        return AttentionChoice(NumbaAttention(), reason)
    return AttentionChoice(
        TorchAttention(needs.shape.num_kv_heads, needs.shape.head_dim, dtype, device), reason
    )


def _why_triton(obstacles: dict[str, str | None]) -> str:
    others = [name for name, obstacle in obstacles.items() if obstacle is None]
    parts = [f"{name}: {obstacle}" for name, obstacle in obstacles.items() if obstacle is not None]
    if others:
        parts.insert(0, f"--attention {', '.join(others)} would run too")
    return "; ".join(["the default", *parts])


def _unknown(choice: str) -> str:
    return f"there is no '{choice}' attention; choose auto, triton, torch or flash-attn-3"
