"""One ended request in the metrics: each of its sequences once, and each of its prompts."""

from __future__ import annotations

from loraplex.adapters.ref import AdapterRef
from loraplex.api.metrics.api_metrics import Metrics
from loraplex.api.outcome import RequestOutcome


def count_request(
    metrics: Metrics, tenant_id: str, adapter: AdapterRef | None, outcome: RequestOutcome
) -> None:
    """`adapter` is None of the base model."""
    for end in outcome.sequences:
        metrics.sequence_ended(
            tenant_id,
            end.reason,
            prompt_tokens=end.prompt_tokens,
            completion_tokens=end.completion_tokens,
            cached_tokens=end.cached_tokens,
            max_tokens=end.max_tokens,
            seconds=end.seconds,
            timing=end.timing,
        )
        if adapter is not None and end.shared_tokens is not None:
            metrics.shared_with_base(tenant_id, adapter, end.shared_tokens)
    for start in range(0, len(outcome.sequences), outcome.n):
        choices = outcome.sequences[start : start + outcome.n]
        metrics.prompt_ended(n=outcome.n, longest=max(end.completion_tokens for end in choices))
