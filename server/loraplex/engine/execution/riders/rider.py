"""The base of all by-products of steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from loraplex.engine.execution.step_results import StepResult
from loraplex.engine.host_to_device import HostToDevice
from loraplex.engine.sampling.sampler import Sampler

Copy = Callable[[torch.Tensor], torch.Tensor]
"""Begins a copy of a tensor to the host."""


@dataclass(slots=True)
class Forward:
    """A step as far as the worker has computed it. `logits` [rows whose logits are wanted, V] are overwritten by
    sampling; `hidden` [P, C] are the hidden states that pooling asked for; `tokens` [S] int64 are sampled."""

    sampler: Sampler
    logits: torch.Tensor
    hidden: torch.Tensor | None = None
    tokens: torch.Tensor | None = None


class Rider:
    """One kind of by-product of one step. A step without it has no such object.

    `want`, whose arguments depend on the kind, `send` and `collect` belong to the thread that plans. `compute` and
    `to_host` belong to the worker, which runs them after `send` and before `collect`.
    """

    prevents_replay = False
    """Whether a recorded pass cannot serve the step: that one computes a row of logits for each sequence."""

    def send(self, inputs: HostToDevice) -> None:
        """Give the numbers that `compute` reads to `inputs`."""

    def compute(self, forward: Forward) -> None:
        """Queue its work on the device, behind the forward pass."""

    def to_host(self, copy: Copy) -> None:
        """Replace what `compute` made by copies on the host. Not called on a CPU."""

    def collect(self, result: StepResult) -> None:
        """Enter what it has found, which has arrived on the host, into `result`."""
