"""Agreement of a trainer and the server: the log probabilities that both give the same tokens under one version."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loraplex.control.audit.recorder import Actor, record
from loraplex.control.catalog.versions import require_version, version_target
from loraplex.control.db.database import Database
from loraplex.control.types import VersionInfo

MOST_IN_EXPONENT = 80.0
"""Differences above it count as it in the KL estimate, which would overflow."""


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


def record_agreement(database: Database, info: VersionInfo, agreement: Agreement, *, by: Actor) -> None:
    """Keep the figures in the version's report, in place of earlier ones. Raises TenantNotFound, AdapterNotFound,
    VersionNotFound."""
    figures = agreement.figures()
    with database.write() as session:
        row = require_version(session, info.tenant_id, info.name, info.version)
        before = row.report.get("agreement")
        row.report = row.report | {"agreement": figures}
        record(
            session,
            by,
            "version.agreement",
            version_target(info.tenant_id, info.name, info.version),
            tenant_id=info.tenant_id,
            before=before,
            after=figures | {"digest": info.digest},
        )
