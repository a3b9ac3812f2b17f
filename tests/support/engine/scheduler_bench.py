"""A scheduler whose runner is the test."""

from __future__ import annotations

from itertools import count, takewhile
from typing import Literal

from loraplex.adapters.ref import AdapterRef
from loraplex.engine.config import Charges, SchedulerConfig
from loraplex.engine.scheduling.scheduler import Scheduler
from loraplex.engine.scheduling.speculation import Speculation
from loraplex.engine.scheduling.timing.step_bound import StepBound
from loraplex.engine.types import EngineRequest, SamplingParams, Sequence, StepPlan
from support.engine.fake_transport import FakeTransport, make_cache
from support.simulator.core_integrity import check_scheduler


class Bench:
    """A scheduler whose runner is the test: every row that is sampled gives token 7. With `lookahead` 1 the test plans
    a step before it collects the one before."""

    def __init__(
        self,
        *,
        blocks: int = 64,
        seqs: int = 16,
        tokens: int = 64,
        charges: Charges | None = None,
        speculation: Speculation | None = None,
        bound: StepBound | None = None,
        windows: tuple[int | None, ...] = (None,),
        lookahead: Literal[0, 1] = 0,
    ) -> None:
        self.now = 0.0
        self.transport = FakeTransport(lambda: self.now, num_pages=4)
        self.cache = make_cache(self.transport)
        config = SchedulerConfig(
            blocks, 1 << 14, seqs, tokens, 1000, lookahead, charges=charges or Charges(), windows=windows
        )
        self.scheduler = Scheduler(config, self.cache, speculation, bound)
        self.live: dict[str, Sequence] = {}
        self._order = count()

    def add(
        self,
        name: str,
        num_prompt: int,
        max_tokens: int = 100,
        *,
        tenant: str = "acme",
        adapter: AdapterRef | None = None,
        first: int = 1000,
        priority: int = 0,
        weight: float = 1.0,
        speculation: bool = True,
        prompt_logprobs: int | None = None,
    ) -> Sequence:
        prompt = tuple(range(first, first + num_prompt))
        request = EngineRequest(
            name,
            tenant,
            prompt,
            SamplingParams(max_tokens=max_tokens, prompt_logprobs=prompt_logprobs),
            adapter,
            priority=priority,
            speculation=speculation,
        )
        seq = Sequence(request, self.now, next(self._order), list(prompt))
        self.scheduler.queue.set_weight(tenant, weight)
        self.scheduler.add_sequence(seq)
        self.live[name] = seq
        return seq

    def plan(self) -> StepPlan:
        self.cache.poll()
        plan = self.scheduler.plan(self.now)
        assert not sizes(plan).keys() & {*plan.preempted}, "a sequence was preempted and resumed in one plan"
        self.check()
        return plan

    def collect(self, plan: StepPlan) -> None:
        for row in plan.scheduled:
            seq = self.live[row.request_id]
            self.scheduler.computed(seq, row)
            if row.samples:
                accepted = len([*takewhile(lambda token: token == 7, row.drafted)])
                seq.token_ids += (7,) * (1 + accepted)
                seq.num_pending -= 1
                self.scheduler.delivered(seq, 1 + accepted)
                if row.drafted:
                    self.scheduler.verified(seq, row, accepted)
                if seq.num_outputs == seq.request.sampling.max_tokens:
                    self.finish(seq)
        self.check()

    def step(self) -> dict[str, int]:
        """One whole step; returns how many tokens of each request it computed."""
        plan = self.plan()
        self.collect(plan)
        return sizes(plan)

    def finish(self, seq: Sequence) -> None:
        self.scheduler.finish(seq)
        del self.live[seq.request_id]
        self.check()

    def check(self) -> None:
        check_scheduler(self.scheduler, self.live.values())


def sizes(plan: StepPlan) -> dict[str, int]:
    return {row.request_id: row.num_tokens for row in plan.scheduled}
