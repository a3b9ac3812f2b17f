"""The comparison of a trainer's log probabilities with those of a version that must agree before it serves.

The server's are computed as a request to `/v1/completions` of the one who pushed, by a version that serves nobody yet.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, Protocol

from loraplex.adapters.errors import AdapterRefused, LoraplexError
from loraplex.control.agreement import Agreement, DueAgreement, compare
from loraplex.control.agreement_records import payer, pending_agreement, record_agreement
from loraplex.control.audit.recorder import Actor
from loraplex.control.db.database import Database
from loraplex.control.types import Principal, Refusal, VersionInfo
from loraplex.serving.engines.engines import Engines
from loraplex.serving.errors import EngineLost, EngineUnavailable

Score = Callable[[Principal, VersionInfo, Sequence[Sequence[int]]], Awaitable[list[list[float]]]]
"""The log probability of each token from the second on, of each sequence of token ids, under a version. The principal
is charged. Raises LoraplexError with the codes of a completion that is refused."""
Judgement = Literal["agreed", "exceeded", "failed"]
"""The outcome of a comparison that decides: `failed` where the server cannot compute what is to be compared."""
_FAILED = ("adapter_not_finite", "adapter_not_invoked", "context_length_exceeded", "invalid_value")
"""Codes of a completion that will be refused each time."""


class AgreementWatch(Protocol):
    """Hears of comparisons."""

    def compared(self, mean: float) -> None:
        """`mean` is the mean absolute difference, in nats."""
        ...

    def judged(self, outcome: Judgement) -> None:
        """A comparison that decides has ended."""
        ...


class AgreementChecks:
    """Comparisons of one event loop."""

    def __init__(self, database: Database, engine: Engines, score: Score, watch: AgreementWatch) -> None:
        self._database = database
        self._engine = engine
        self._score = score
        self._watch = watch

    async def verdict(self, info: VersionInfo) -> tuple[Refusal | None, Agreement | None]:
        """The reason to reject a version that is validating, and the comparison. Both None: it waits for none. Raises
        EngineLost where the engine died meanwhile, and what reading the database and a completion raise."""
        found = await self._database.run(pending_agreement, self._database, info)
        if found is None:
            return None, None
        due, who = found
        if not self._engine.healthy:
            raise EngineUnavailable(self._engine.unhealthy_reason or "the engine is away")
        try:
            return await self._judge(info, due, who)
        except LoraplexError as error:
            if error.code == EngineLost.code:
                raise EngineLost(error.message) from error
            raise

    async def confirm(self, info: VersionInfo, due: DueAgreement, by: Actor) -> VersionInfo:
        """Compare what `by` pushed with a version that has the same bytes. The version gets the figures into its
        report. Raises AdapterRefused where they disagree, and what the database and a completion raise; then the
        version stays as it is."""
        who = await self._database.run(payer, self._database, info.tenant_id, by)
        refusal, found = await self._judge(info, due, who)
        if refusal is not None or found is None:
            told = "" if refusal is None else refusal.message
            raise AdapterRefused(
                "agreement_failed" if found is None else "agreement_exceeded",
                f"The bytes are those of {info.name}@{info.version}, which stays as it is: {told}.",
                report=info.report,
            )
        await self._database.run(partial(record_agreement, self._database, info, found, by=by))
        return replace(info, report=info.report | {"agreement": found.figures()})

    async def _judge(
        self, info: VersionInfo, due: DueAgreement, who: Principal
    ) -> tuple[Refusal | None, Agreement | None]:
        try:
            ours = await self._score(who, info, due.numbers.tokens)
        except LoraplexError as error:
            if error.code not in _FAILED:
                raise
            self._watch.judged("failed")
            told = f"the server cannot compute the log probabilities of the trainer's tokens: {error.message}"
            return Refusal("agreement_failed", told.rstrip(".")), None
        found = compare(due.numbers.logprobs, ours)
        refusal = due.refusal(found)
        self._watch.compared(found.mean)
        self._watch.judged("agreed" if refusal is None else "exceeded")
        return refusal, found
