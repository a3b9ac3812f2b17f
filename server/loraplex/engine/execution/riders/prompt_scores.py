"""Log probabilities of the tokens of prompts."""

from __future__ import annotations

import numpy as np
import torch

from loraplex.engine.execution.riders.rider import Copy, Forward, Rider
from loraplex.engine.execution.step_results import StepResult
from loraplex.engine.host_to_device import HostToDevice
from loraplex.engine.logprobs import Scores
from loraplex.engine.sampling.scoring import TokenScores, pack
from loraplex.engine.types import ScheduledSequence


class PromptScores(Rider):
    """The scores of the prompt positions that a step is to score."""

    prevents_replay = True

    def __init__(self) -> None:
        self._slices: list[tuple[int, ScheduledSequence]] = []
        self._rows: list[int] = []
        self._targets: list[int] = []
        self._on_device: torch.Tensor
        self._wanted: torch.Tensor
        self._scores: TokenScores

    def want(self, index: int, item: ScheduledSequence, first_row: int, *, failed: bool) -> None:
        """Score the targets of a slice, whose index in the plan this is. `first_row`: the number of the first one's row
        among the logits' rows. `failed`: its input is wrong, so that zeros are scored and nothing is told."""
        count = len(item.targets)
        self._slices.append((index, item))
        self._rows += range(first_row, first_row + count)
        self._targets += (0,) * count if failed else item.targets

    def send(self, inputs: HostToDevice) -> None:
        self._on_device = inputs.ints(self._rows)
        self._wanted = inputs.ints(self._targets)

    def compute(self, forward: Forward) -> None:
        asked = [item.request.sampling for _, item in self._slices]
        self._scores = forward.sampler.score(
            forward.sampler.take(forward.logits, self._on_device),
            self._wanted,
            max(sampling.prompt_logprobs or 0 for sampling in asked),
            ranked=any(sampling.prompt_ranks for sampling in asked),
        )

    def to_host(self, copy: Copy) -> None:
        self._scores = self._scores.to_host(copy)

    def collect(self, result: StepResult) -> None:
        scores, end = self._scores.numpy(), 0
        for index, item in self._slices:
            rows = slice(end, end + len(item.targets))
            end, found, sampling = rows.stop, result.rows[index], item.request.sampling
            if found.failed is not None:
                continue
            if np.isfinite(scores.values[rows]).all():
                packed = pack(scores, rows, sampling.prompt_logprobs or 0, ranked=sampling.prompt_ranks)
                found.scores = Scores(prompt=packed)
            else:
                found.fail("the logits of the prompt are not finite")
