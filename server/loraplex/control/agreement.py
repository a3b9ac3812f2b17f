"""Agreement of a trainer and the server: the log probabilities that both give the same tokens under one version."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loraplex.control.db.tables import Series
from loraplex.control.errors import AgreementMissing, Conflict
from loraplex.control.types import Refusal

MOST_IN_EXPONENT = 80.0
"""Differences above it count as it in the KL estimate, which would overflow."""


@dataclass(frozen=True, slots=True)
class TrainerNumbers:
    """The log probabilities that a trainer computed of some tokens. Both have one list a sequence."""

    tokens: list[list[int]]
    """Token ids, two of each sequence or more."""
    logprobs: list[list[float]]
    """[tokens - 1] of each sequence, in nats: of each token from the second on, given those before it."""


@dataclass(frozen=True, slots=True)
class DueAgreement:
    """A comparison that decides on a version."""

    numbers: TrainerNumbers
    """The log probabilities that came with the version."""
    within: float
    """Largest mean absolute difference with which the version serves, in nats."""

    def as_json(self) -> dict[str, Any]:
        return {"tokens": self.numbers.tokens, "logprobs": self.numbers.logprobs, "within": self.within}

    def refusal(self, agreement: Agreement) -> Refusal | None:
        """The reason to reject the version by this outcome of the comparison. None: it agrees."""
        if agreement.mean <= self.within:
            return None
        index = max(range(len(agreement.sequences)), key=lambda place: agreement.sequences[place].max)
        return Refusal(
            "agreement_exceeded",
            f"the trainer's log probabilities differ from the server's by {agreement.mean:.3g} nats on average, and "
            f"the series has agree_within {self.within:g}: the largest difference is {agreement.max:.3g} (token "
            f"{agreement.sequences[index].max_at} of sequence {index}), the bias {agreement.bias:.3g}, the estimated "
            f"KL divergence {agreement.kl:.3g}, of {agreement.tokens} tokens. These are not the weights that the "
            "trainer computed them with, or the two compute in other precisions",
        )


@dataclass(frozen=True, slots=True)
class SequenceAgreement:
    """Differences of one sequence."""

    differences: tuple[float, ...]
    """[tokens - 1], in nats: the trainer's log probability of each token from the second on, less the server's."""

    @property
    def mean(self) -> float:
        """Mean of the absolute differences."""
        return math.fsum(map(abs, self.differences)) / len(self.differences)

    @property
    def max(self) -> float:
        """Largest absolute difference."""
        return abs(self.differences[self.max_at - 1])

    @property
    def max_at(self) -> int:
        """Index in the sequence of the token with the largest difference; the first of equal ones."""
        return 1 + max(range(len(self.differences)), key=lambda index: abs(self.differences[index]))


@dataclass(frozen=True, slots=True)
class Agreement:
    """Statistics of all sequences together, in nats. `sequences` is not empty."""

    sequences: tuple[SequenceAgreement, ...]

    @property
    def differences(self) -> list[float]:
        return [one for sequence in self.sequences for one in sequence.differences]

    @property
    def tokens(self) -> int:
        """Number of tokens that were compared."""
        return sum(len(sequence.differences) for sequence in self.sequences)

    @property
    def mean(self) -> float:
        """Mean of the absolute differences."""
        return math.fsum(map(abs, self.differences)) / self.tokens

    @property
    def max(self) -> float:
        """Largest absolute difference."""
        return max(sequence.max for sequence in self.sequences)

    @property
    def bias(self) -> float:
        """Mean of the differences, trainer less server: -k1 of the source below."""
        return math.fsum(self.differences) / self.tokens

    @property
    def kl(self) -> float:
        """KL(server || trainer) of tokens that were sampled from the server, as the estimate k3: the mean of
        exp(d) - 1 - d over the differences d. It is never negative, and has less variance than k1, the mean of -d. For
        other tokens it is no divergence, and yet 0 for equal log probabilities alone. Source: J. Schulman,
        "Approximating KL Divergence", 2020."""
        capped = (min(one, MOST_IN_EXPONENT) for one in self.differences)
        return math.fsum(math.expm1(one) - one for one in capped) / self.tokens

    def figures(self) -> dict[str, Any]:
        """The part that a version's report keeps."""
        return {"mean": self.mean, "max": self.max, "bias": self.bias, "kl": self.kl, "tokens": self.tokens}


def compare(trainer: Sequence[Sequence[float]], server: Sequence[Sequence[float]]) -> Agreement:
    """The agreement of log probabilities of the tokens of each sequence from its second on: one list a sequence, none
    of them empty, all finite. Raises ValueError where the two differ in their lengths."""
    return Agreement(
        tuple(
            SequenceAgreement(tuple(ours - other for ours, other in zip(mine, theirs, strict=True)))
            for mine, theirs in zip(trainer, server, strict=True)
        )
    )


def threshold(series: Series | None, *, compared: bool) -> float | None:
    """The threshold that the next version of a name is held to; None: none. `compared`: a trainer's numbers come with
    it. Raises AgreementMissing where its series wants them and they do not, and Conflict where nothing is done with
    them."""
    within = None if series is None else series.agree_within
    if series is not None and within is not None and not compared:
        raise AgreementMissing(series.name, within)
    if compared and within is None:
        raise Conflict(
            "The push has a trainer's log probabilities, and the series has no agree_within to hold it to: PUT one, or "
            "compare them with the version once it serves, by POST …/versions/{version}/agreement.",
            param="agree_within",
        )
    return within
