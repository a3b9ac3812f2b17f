"""The facts of one ended request that a guard reads, from its ledger row.

The ledger is the source since it has each request of all servers exactly once. Its table does not have the sticky key;
`outcome_inbox` keeps the outcomes that a guard is to read.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from loraplex.control.usage.records import Ended

PROPER = frozenset({"stop", "length"})
"""Statuses of requests that came to their end."""
FAILURES = frozenset(
    {
        "adapter_not_finite",
        "adapter_unavailable",
        "deadline_exceeded",
        "engine_restarting",
        "internal_error",
        "numbers_unchecked",
        "storage_unavailable",
    }
)
"""Statuses that count as errors of the version that served. Refusals for the caller's own request or limits, and those
of a full or draining server, do not."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One ended request. `version` 0 is the base model. `key_hash` is of the sticky key (see `key_hash`), 64 bits.
    `started_at` and `ended_at` are in seconds since the epoch, the other times in seconds. `first_token_s` and
    `inter_token_s` are None where no such token came; `output_tokens` is the mean of the request's choices."""

    tenant_id: str
    adapter: str
    version: int
    key_hash: int
    started_at: float
    ended_at: float
    status: str
    first_token_s: float | None
    inter_token_s: float | None
    output_tokens: float

    @classmethod
    def of(cls, row: Ended) -> Outcome:
        """The outcome that a ledger row tells."""
        tokens = row.completion_tokens / max(1, row.n)
        ended_at = row.at.timestamp()
        return cls(
            tenant_id=row.tenant_id,
            adapter=row.adapter,
            version=row.version,
            key_hash=row.key_hash,
            started_at=ended_at - row.total_s,
            ended_at=ended_at,
            status=row.status,
            first_token_s=row.first_token_s,
            inter_token_s=inter_token_s(row.first_token_s, row.total_s, tokens),
            output_tokens=tokens,
        )

    @property
    def failed(self) -> bool | None:
        """Whether the version failed; None where the end says nothing of it, as for a client that went away."""
        if self.status in PROPER:
            return False
        return True if self.status in FAILURES else None

    @property
    def cut_at_length(self) -> bool | None:
        """Whether the answer ended at its limit of tokens; None where it did not come to its end."""
        return self.status == "length" if self.status in PROPER else None


def inter_token_s(first_token_s: float | None, total_s: float, tokens: float) -> float | None:
    """Mean time between the tokens of an answer, in seconds; None of an answer without a second token."""
    if first_token_s is None or tokens <= 1:
        return None
    return max(0.0, total_s - first_token_s) / (tokens - 1)


def key_hash(key: str) -> int:
    """A sticky key's 64 bits for the guard, independent of those that choose its version. A request without a key, or
    of a release that is not sticky, hashes its own id."""
    digest = hashlib.sha256(b"guard/" + key.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big")
