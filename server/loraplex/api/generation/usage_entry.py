"""One request's line in the usage ledger, and its place in the counts of a release's arms: opened when the request is
accepted, closed when its answer is complete."""

from __future__ import annotations

import time
from datetime import UTC, datetime

from loraplex.api.context import DataContext
from loraplex.api.deps import ApiServices
from loraplex.api.errors import from_exception
from loraplex.api.generation.planning import GenerationPlan
from loraplex.api.outcome import RequestOutcome
from loraplex.control.types import Principal, ResolvedModel
from loraplex.control.usage.outcome import Outcome, key_hash
from loraplex.control.usage.records import BASE, CANCELLED, Accepted
from loraplex.http.errors import ClientGone


class UsageEntry:
    """Made by `open`, ended by `close`; only the first `close` counts."""

    def __init__(self, services: ApiServices, accepted: Accepted, arrived: float, *, is_arm: bool) -> None:
        self._services = services
        self._accepted = accepted
        self._arrived = arrived
        self._is_arm = is_arm
        self._closed = False

    @classmethod
    def open(
        cls,
        services: ApiServices,
        context: DataContext,
        principal: Principal,
        model: ResolvedModel,
        plan: GenerationPlan,
        endpoint: str,
    ) -> UsageEntry:
        """Raises JournalFull (503): what could not be accounted for does not run."""
        adapter = model.adapter
        accepted = Accepted(
            id=context.internal_id,
            at=datetime.now(UTC),
            tenant_id=principal.tenant_id or "",
            key_id=principal.key_id or "",
            adapter=BASE if adapter is None else adapter.name,
            version=0 if adapter is None else adapter.version,
            digest="" if adapter is None else adapter.digest,
            endpoint=endpoint,
            streamed=bool(plan.request.stream),
            n=plan.num_choices,
            key_hash=0 if model.release is None else key_hash(model.caller or context.internal_id),
        )
        services.ledger.accept(accepted)
        if model.is_arm:
            services.running_arms.begin(accepted)
        return cls(services, accepted, context.started, is_arm=model.is_arm)

    async def close(self, outcome: RequestOutcome) -> None:
        """Returns when the row can't be lost any more."""
        if self._closed:
            return
        self._closed = True
        usage, first = outcome.usage, outcome.first_token_at
        row = self._accepted.ended(
            datetime.now(UTC),
            outcome.status,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            queue_s=outcome.queue_s,
            first_token_s=None if first is None else first - self._arrived,
            total_s=time.monotonic() - self._arrived,
        )
        if self._is_arm:
            self._services.running_arms.end(self._accepted)
            self._services.metrics.arms.ended(Outcome.of(row))
        await self._services.ledger.end(row)


def status_of(error: BaseException) -> str:
    """The ledger's name for the end of a request that failed with this error."""
    if isinstance(error, Exception) and not isinstance(error, ClientGone):
        return from_exception(error).code
    return CANCELLED
