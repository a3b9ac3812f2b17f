"""Log probabilities of sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from loraplex.engine.execution.riders.rider import Copy, Forward, Rider
from loraplex.engine.execution.step_results import StepResult
from loraplex.engine.host_to_device import HostToDevice
from loraplex.engine.logprobs import Scores
from loraplex.engine.sampling.scoring import TokenScores, pack
from loraplex.engine.types import SamplingParams


class Logprobs(Rider):
    """The scores of the sampled rows of slices that ask for them: of the most likely tokens, and of those that a
    request names. Computed behind `Tokens`, which keeps these rows' logits."""

    def __init__(self) -> None:
        self._slices: list[tuple[int, int, int, tuple[int, ...]]] = []
        """Index in the plan, place of its first row in `_rows`, most likely tokens wanted, and tokens named."""
        self._rows: list[int] = []
        self._named: list[Sequence[int]] = []
        self._on_device: torch.Tensor
        self._listed: torch.Tensor | None = None
        self._scores: TokenScores

    def want(self, index: int, rows: range, sampling: SamplingParams, *, failed: bool) -> None:
        """Score a slice, whose index in the plan this is. `rows`: its numbers among the sampled rows. `failed`: its
        input is wrong, and nothing of it will be told."""
        named = () if failed else sampling.logprob_token_ids
        self._slices.append((index, len(self._rows), sampling.logprobs or 0, named))
        self._rows += rows
        self._named += [named] * len(rows)

    def send(self, inputs: HostToDevice) -> None:
        self._on_device = inputs.ints(self._rows)
        longest = max(map(len, self._named))
        if longest:
            padded = [token for ids in self._named for token in (*ids, *(0,) * (longest - len(ids)))]
            self._listed = inputs.ints(padded).view(len(self._rows), longest)

    def of_these(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows that are scored, of all that are sampled: a copy."""
        return tensor.index_select(0, self._on_device)

    def compute(self, forward: Forward) -> None:
        assert forward.tokens is not None
        num_top = max(num_top for _, _, num_top, _ in self._slices)
        self._scores = forward.sampler.score(
            forward.logits, self.of_these(forward.tokens), num_top, listed=self._listed
        )

    def to_host(self, copy: Copy) -> None:
        self._scores = self._scores.to_host(copy)

    def collect(self, result: StepResult) -> None:
        scores = self._scores.numpy()
        for index, first, num_top, named in self._slices:
            row = result.rows[index]
            if count := len(row.token_ids):
                rows = slice(first, first + count)
                row.scores = replace(row.scores or Scores(), output=pack(scores, rows, num_top, named=named))
