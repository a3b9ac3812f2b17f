"""Batched LoRA whose A side runs beside the base's own product.

A·x of a group needs x alone, and W·x moves many times its bytes. So a step forks before the base's product and joins
behind it:

    begin    x ──┬── shrink, on a lane of its own ──┬── expand    apply
                 └── y = W·x ───────────────────────┘

Lanes may be recorded in a CUDA graph, where they become branches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from loraplex.kernels.lora.triton_lora import LoraLauncher


class Lane(Protocol):
    """Runs work beside what is queued meanwhile."""

    def fork(self, work: Callable[[], None]) -> None:
        """Queue work behind all that is queued so far, and beside what is queued until `join`."""
        ...

    def join(self) -> None:
        """Work that is queued from now on waits for the work of the last `fork`."""
        ...


class StreamLane:
    """A CUDA stream of its own, for work that is queued on the current one."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._fork = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def fork(self, work: Callable[[], None]) -> None:
        """See `Lane.fork`."""
        self._fork.record()
        self._stream.wait_event(self._fork)
        with torch.cuda.stream(self._stream):
            work()
            self._done.record()

    def join(self) -> None:
        """See `Lane.join`."""
        torch.cuda.current_stream().wait_event(self._done)


class OverlappedLora:
    """A LoraPass of a launcher's two halves, the first on `lane`. Every `begin` is followed by the `apply` of the same
    layer and group, with x unchanged and still held, before the next one: hidden values are shared."""

    def __init__(self, launcher: LoraLauncher, lane: Lane) -> None:
        """Raises ValueError for a launcher whose B side is launched while its A side runs: it could wait for no other
        stream's work."""
        if launcher.tiling.dependent_launch:
            raise ValueError(
                "an A side beside the base's product, and a dependent launch behind it, exclude each other"
            )
        self._launcher = launcher
        self._lane = lane
        self._begun: tuple[int, str] | None = None

    def start_shrink(self, layer: int, group: str, x: torch.Tensor) -> None:
        """Start the A side. Raises ValueError where another one was begun and never applied."""
        if self._begun is not None:
            raise ValueError(f"layer {layer}, '{group}' is begun before {self._begun} was applied")
        self._lane.fork(lambda: self._launcher.shrink(layer, group, x))
        self._begun = (layer, group)

    def apply(self, layer: int, group: str, x: torch.Tensor, y: torch.Tensor) -> None:
        """See `loraplex.kernels.lora.dispatch.LoraPass.apply`; of what was not begun, both sides. Raises ValueError
        where another one was begun."""
        self.shrink(layer, group, x)
        self._launcher.expand(layer, group, y)

    def shrink(self, layer: int, group: str, x: torch.Tensor) -> None:
        """The A side alone: wait for it where it was begun, else compute it. Raises ValueError where another one was
        begun."""
        if self._begun is None:
            self._launcher.shrink(layer, group, x)
            return
        if self._begun != (layer, group):
            raise ValueError(f"layer {layer}, '{group}' is applied where {self._begun} was begun")
        self._begun = None
        self._lane.join()
