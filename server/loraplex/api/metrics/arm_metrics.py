"""Requests of watched releases, by arm: the same facts that the guard reads."""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Histogram

from loraplex.api.metrics.label_sets import IDLE_S, OTHER, LabelSets, OwnedCounter
from loraplex.control.usage.outcome import Outcome

MAX_ARMS = 50
"""Arms with series of their own at a time: those of 25 releases."""
FIRST_TOKEN_S = (0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6)
INTER_TOKEN_S = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.045, 0.07, 0.1, 0.2, 0.4, 0.8)
_OUTCOMES = {False: "ok", True: "failed", None: "other"}


class ArmMeter:
    """Series by arm. Up to `max_arms` pairs of tenant and version have their own; the rest is counted under "other"."""

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        max_arms: int = MAX_ARMS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        owner = ["tenant", "adapter"]
        self._labels = LabelSets(max_arms, idle_s=IDLE_S, clock=clock, on_drop=self._drop_series)
        self._requests = OwnedCounter(
            Counter(
                "loraplex_release_requests",
                "Requests of watched releases: ok, failed, other.",
                [*owner, "outcome"],
                registry=registry,
            )
        )
        self._first_token = Histogram(
            "loraplex_release_first_token_seconds",
            "Arrival of a request of a watched release to its first token.",
            owner,
            buckets=FIRST_TOKEN_S,
            registry=registry,
        )
        self._inter_token = Histogram(
            "loraplex_release_inter_token_seconds",
            "Mean time between the tokens of a request of a watched release.",
            owner,
            buckets=INTER_TOKEN_S,
            registry=registry,
        )

    def ended(self, outcome: Outcome) -> None:
        """A request that a watched release sent to one of its arms has ended."""
        owner = self._labels.pair(outcome.tenant_id, f"{outcome.adapter}@v{outcome.version}")
        self._requests.inc(owner, _OUTCOMES[outcome.failed])
        # Begun without an observation too, so that series of an owner are there together.
        first_token, inter_token = self._first_token.labels(*owner), self._inter_token.labels(*owner)
        if outcome.first_token_s is not None:
            first_token.observe(outcome.first_token_s)
        if outcome.inter_token_s is not None:
            inter_token.observe(outcome.inter_token_s)

    def _drop_series(self, tenant: str, version: str | None) -> None:
        owner = (tenant, OTHER if version is None else version)
        self._requests.remove(owner)
        for histogram in (self._first_token, self._inter_token):
            histogram.remove(*owner)
