"""The attention of a model, as a backend chooses it once when the model is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from loraplex.kernels.attention.kernel import AttentionKernel

AttentionName = Literal["auto", "triton", "torch"]
"""Names that may be asked for; "auto" is the backend's own. Beside Triton's other kernels, "torch" computes chunks of
prompts, and Triton all other rows."""


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


def check_name(choice: str) -> None:
    """Raises AttentionUnavailable for a name that no kernel has."""
    if choice not in get_args(AttentionName):
        raise AttentionUnavailable(f"there is no '{choice}' attention; choose auto, triton or torch")


def reason_for(choice: str, backend: str) -> str:
    """The reason of a backend with one attention."""
    return f"it goes with {backend}'s other kernels" if choice == "auto" else "as was asked for"
