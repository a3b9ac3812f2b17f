"""The comparison of a trainer's log probabilities with those of a version that must agree before it serves.

The server's are computed as a request to `/v1/completions` of the one who pushed, by a version that serves nobody yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, Protocol

from loraplex.adapters.errors import LoraplexError, RefusalCode
from loraplex.control.agreement import Agreement, DueAgreement, compare
from loraplex.control.agreement_records import count_failure, payer, pending_agreement, record_agreement
from loraplex.control.audit.recorder import Actor
from loraplex.control.db.database import Database
from loraplex.control.errors import AgreementUnchecked, SameBytesRefused
from loraplex.control.types import Principal, Refusal, VersionInfo
from loraplex.serving.engines.engines import Engines
from loraplex.serving.errors import EngineUnavailable, ScoringRefused

Score = Callable[[Principal, VersionInfo, Sequence[Sequence[int]]], Awaitable[list[list[float]]]]
"""The log probability of each token from the second on, of each sequence of token ids, under a version. The principal
is charged. Raises ScoringRefused for what is refused each time, EngineLost where the engine ended meanwhile,
EngineUnavailable and EngineOverloaded where it makes sense to try again, and other LoraplexErrors with the codes of a
completion that fails."""
Judgement = Literal["agreed", "exceeded", "failed"]
"""The outcome of a comparison that decides: `failed` where the server cannot compute what is to be compared."""
MOST_FAILURES = 5
"""Failures of one version's comparison that reject it, of those that may pass and often do not."""
_MAY_PASS = ("adapter_unavailable", "deadline_exceeded")
"""Codes of such failures: the adapter cannot be loaded, or takes longer than a request may. Each of the latter keeps
the other checks of the tenant waiting for a minute."""


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
        what the database and `Score` raise, except ScoringRefused."""
        found = await self._database.run(pending_agreement, self._database, info)
        if found is None:
            return None, None
        due, who = found
        if not self._engine.healthy:
            raise EngineUnavailable(self._engine.unhealthy_reason or "the engine is away")
        try:
            return await self._judge(info, due, who)
        except LoraplexError as error:
            if error.code not in _MAY_PASS:
                raise
            failures = await self._database.run(count_failure, self._database, info)
            if failures < MOST_FAILURES:
                raise
            return self._failed(f"{error.message.rstrip('.')} ({failures} times)"), None

    async def confirm(self, info: VersionInfo, due: DueAgreement, by: Actor, *, wait_s: float) -> VersionInfo:
        """Compare what `by` pushed with a version that has the same bytes, within `wait_s` seconds. The version gets
        the figures into its report. Raises SameBytesRefused where they disagree, AgreementUnchecked where they cannot
        be compared now, and what the database raises; then the version stays as it is."""
        who = await self._database.run(payer, self._database, info.tenant_id, by)
        try:
            async with asyncio.timeout(wait_s):
                refusal, found = await self._judge(info, due, who)
        except TimeoutError as error:
            raise AgreementUnchecked(info, "the engine is busy") from error
        except LoraplexError as error:
            raise AgreementUnchecked(info, error.message) from error
        figures = {} if found is None else {"agreement": found.figures()}
        shown = replace(info, report=info.report | figures)
        if refusal is not None:
            code: RefusalCode = "agreement_failed" if found is None else "agreement_exceeded"
            raise SameBytesRefused(shown, code, refusal.message)
        if found is not None:
            await self._database.run(partial(record_agreement, self._database, info, found, by=by))
        return shown

    async def _judge(
        self, info: VersionInfo, due: DueAgreement, who: Principal
    ) -> tuple[Refusal | None, Agreement | None]:
        try:
            ours = await self._score(who, info, due.numbers.tokens)
        except ScoringRefused as error:
            return self._failed(error.message.rstrip(".")), None
        found = compare(due.numbers.logprobs, ours)
        refusal = due.refusal(found)
        self._watch.compared(found.mean)
        self._watch.judged("agreed" if refusal is None else "exceeded")
        return refusal, found

    def _failed(self, reason: str) -> Refusal:
        self._watch.judged("failed")
        told = f"the server cannot compute the log probabilities of the trainer's tokens: {reason}"
        return Refusal("agreement_failed", told)
