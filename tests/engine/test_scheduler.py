"""Plans, step by step, with fabricated outputs: no runner, no clock but the numbers passed in."""

from __future__ import annotations

from itertools import count

import pytest

from loraplex.adapters.ref import AdapterRef
from loraplex.engine.config import BLOCK_SIZE, Charges, SchedulerConfig
from loraplex.engine.scheduler import Scheduler
from loraplex.engine.types import EngineRequest, SamplingParams, Sequence, SequenceState, StepPlan
from support.fake_transport import FakeTransport, Fate, make_cache
from support.work import lines_run


class Bench:
    """A scheduler with lookahead 0 whose runner is the test: every sampling slice draws token 7."""

    def __init__(
        self, *, blocks: int = 64, seqs: int = 16, tokens: int = 64, charges: Charges | None = None
    ) -> None:
        self.now = 0.0
        self.transport = FakeTransport(lambda: self.now, num_pages=4)
        self.cache = make_cache(self.transport)
        config = SchedulerConfig(blocks, 4096, seqs, tokens, 1000, charges=charges or Charges())
        self.scheduler = Scheduler(config, self.cache)
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
    ) -> Sequence:
        prompt = tuple(range(first, first + num_prompt))
        request = EngineRequest(
            name,
            tenant,
            prompt,
            SamplingParams(max_tokens=max_tokens),
            adapter,
            weight=weight,
            priority=priority,
        )
        seq = Sequence(request, self.now, next(self._order), list(prompt))
        self.scheduler.add(seq)
        self.live[name] = seq
        return seq

    def plan(self) -> StepPlan:
        self.cache.poll()
        plan = self.scheduler.plan(self.now)
        self.check()
        return plan

    def collect(self, plan: StepPlan) -> None:
        for row in plan.scheduled:
            seq = row.seq
            self.scheduler.computed(row)
            if row.samples:
                seq.token_ids.append(7)
                seq.num_pending -= 1
                self.scheduler.delivered(seq, 1)
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
        self.scheduler.check_integrity(self.live.values())


def sizes(plan: StepPlan) -> dict[str, int]:
    return {row.seq.request_id: row.num_tokens for row in plan.scheduled}


def test_a_prompt_is_computed_at_once_and_then_decoded_token_by_token() -> None:
    bench = Bench()
    seq = bench.add("a", 10, max_tokens=3)
    plan = bench.plan()
    (row,) = plan.scheduled
    assert (row.start, row.num_tokens, row.samples, row.output_index) == (0, 10, True, 0)
    assert row.token_ids == seq.request.prompt_ids
    bench.collect(plan)
    (row,) = bench.plan().scheduled
    assert (row.start, row.token_ids, row.samples, row.output_index) == (10, (7,), True, 1)


def test_chunked_prefill_fills_the_budget_beside_decodes() -> None:
    bench = Bench(tokens=20)
    bench.add("short", 4)
    bench.step()
    bench.add("long", 50)
    assert bench.step() == {"short": 1, "long": 19}
    assert bench.step() == {"short": 1, "long": 19}
    plan = bench.plan()
    assert sizes(plan) == {"short": 1, "long": 12}
    assert [row.samples for row in plan.scheduled] == [True, True]
    bench.collect(plan)
    assert bench.step() == {"short": 1, "long": 1}


def test_no_step_exceeds_the_token_budget_or_the_number_of_sequences() -> None:
    bench = Bench(tokens=24, seqs=3)
    for index in range(10):
        bench.add(f"r{index}", 5 + 7 * index, max_tokens=5, first=1000 * index)
    while bench.live:
        plan = bench.plan()
        assert 0 < plan.num_tokens <= 24
        assert len(plan.scheduled) <= 3
        bench.collect(plan)


def test_with_fewer_tokens_than_sequences_every_running_sequence_still_moves() -> None:
    bench = Bench(tokens=2, seqs=8)
    for name in "abcd":
        bench.add(name, 3, max_tokens=4)
    steps = 0
    while bench.live:
        assert sum(bench.step().values()) <= 2
        assert len(bench.scheduler.running) <= 2
        steps += 1
    assert steps < 40


def test_a_common_prefix_is_computed_once() -> None:
    bench = Bench()
    bench.add("first", 40)
    bench.step()
    second = bench.add("second", 40)
    assert bench.step()["second"] == 40 - 2 * BLOCK_SIZE
    assert second.num_cached == 2 * BLOCK_SIZE
    assert second.block_ids[:2] == bench.live["first"].block_ids[:2]
    assert second.block_ids[2] != bench.live["first"].block_ids[2]


def test_at_least_one_token_is_computed_even_if_all_are_cached() -> None:
    bench = Bench()
    bench.add("first", 2 * BLOCK_SIZE)
    bench.step()
    second = bench.add("second", 2 * BLOCK_SIZE)
    assert bench.step()["second"] == BLOCK_SIZE
    assert second.num_cached == BLOCK_SIZE


def test_a_prefix_is_not_found_before_the_step_that_computes_it_was_collected() -> None:
    bench = Bench()
    bench.add("first", 40)
    plan = bench.plan()
    second = bench.add("second", 40)
    later = bench.plan()
    assert sizes(later)["second"] == 40
    assert not set(second.block_ids) & set(plan.scheduled[0].block_ids)


def test_no_prefix_is_shared_between_tenants() -> None:
    bench = Bench()
    bench.add("ours", 40, tenant="acme")
    bench.step()
    other = bench.add("theirs", 40, tenant="umbrella")
    bench.step()
    assert other.num_cached == 0


def test_a_finished_sequences_blocks_are_found_until_they_are_needed() -> None:
    bench = Bench(blocks=4)
    bench.finish(bench_run_once(bench, "first", 40))
    assert bench.scheduler.blocks.num_used == 0
    again = bench_run_once(bench, "again", 40)
    assert again.num_cached == 2 * BLOCK_SIZE
    bench.finish(again)
    bench.finish(bench_run_once(bench, "other", 4 * BLOCK_SIZE - 1, first=5000))
    assert bench_run_once(bench, "late", 40).num_cached == 0


def bench_run_once(bench: Bench, name: str, num_prompt: int, first: int = 1000) -> Sequence:
    seq = bench.add(name, num_prompt, first=first)
    bench.step()
    return seq


def test_preemption_takes_from_the_tenant_that_got_the_most() -> None:
    bench = Bench(blocks=10, tokens=64)
    heavy = bench.add("heavy", 120, 40, tenant="heavy", first=1000)
    light = bench.add("light", 1, 40, tenant="light", first=2000)
    assert _first_preempted(bench) == ("heavy",)
    assert light.state is SequenceState.RUNNING
    assert (heavy.state, heavy.num_computed, heavy.epoch) == (SequenceState.WAITING, 0, 1)
    assert heavy.block_ids == ()


def _first_preempted(bench: Bench) -> tuple[str, ...]:
    while bench.live:
        plan = bench.plan()
        bench.collect(plan)
        if plan.preempted:
            return plan.preempted
    raise AssertionError("nobody was")


def test_of_tenants_that_are_level_the_newest_is_preempted() -> None:
    bench = Bench(blocks=5, tokens=64)
    bench.add("old", 40, tenant="a", first=1000)
    new = bench.add("new", 10, tenant="b", first=2000)
    assert _first_preempted(bench) == ("new",), "though the other got more by some tokens"
    assert new.num_outputs > 0


def test_what_a_tenant_is_about_to_get_counts_when_someone_must_go() -> None:
    bench = Bench(blocks=5, tokens=16)
    bench.add("long", 1, 300, tenant="long", first=1000)
    bench.add("short", 48, 25, tenant="short", first=2000)
    preempted = _first_preempted(bench)
    counter = bench.scheduler.queue.counter
    assert counter("long") < counter("short")
    assert preempted == ("long",), "its answer has only begun"


def test_a_newcomer_leaves_those_who_run_a_block_to_grow_into() -> None:
    bench = Bench(blocks=4)
    for number, name in enumerate("abc"):
        bench.add(name, 15, first=1000 * number)
    bench.step()
    assert [seq.request_id for seq in bench.scheduler.running] == ["a", "b"]
    assert bench.scheduler.blocks.num_free == 2


def test_who_cannot_outgrow_its_blocks_keeps_nobody_out() -> None:
    bench = Bench(blocks=3)
    for number, name in enumerate("abc"):
        bench.add(name, 10, 7, first=1000 * number)
    bench.step()
    assert len(bench.scheduler.running) == 3


def test_prompts_of_who_got_more_wait_a_step_for_that_of_who_got_less() -> None:
    bench = Bench(blocks=200, tokens=64)
    bench.add("runs", 16, 300, tenant="heavy", first=100)
    for _ in range(5):
        bench.step()
    bench.add("light", 8, 10, tenant="light", first=1000)
    bench.add("heavy", 8, 10, tenant="heavy", first=2000)
    # Its expectation puts the heavy tenant ahead by 128 units, two steps' tokens.
    assert bench.step() == {"runs": 1, "light": 8}
    assert bench.step() == {"runs": 1, "light": 1, "heavy": 8}


def test_who_is_put_off_once_is_not_put_off_again() -> None:
    bench = Bench(blocks=200, tokens=64)
    bench.add("runs", 16, 300, tenant="heavy", first=100)
    bench.step()
    bench.add("heavy", 8, tenant="heavy", first=500)
    started = []
    for number in range(4):  # ever new tenants, all of whom got less
        bench.add(f"light{number}", 8, tenant=f"light{number}", first=1000 + 1000 * number)
        started.append({name for name, tokens in bench.step().items() if tokens == 8})
    assert started[:2] == [{"light0"}, {"light1", "heavy"}]


def test_a_tenant_far_ahead_makes_way_for_the_first_in_the_queue() -> None:
    bench = Bench(blocks=16)  # 256 tokens: a lead of an eighth of the bound is 128 units, 64 tokens drawn
    hog = [bench.add(f"hog{number}", 16, 100, tenant="hog", first=1000 * number) for number in range(2)]
    bench.step()
    light = bench.add("light", 220, 4, tenant="light", first=5000)
    level = bench.scheduler.queue.counter("hog")
    while light.state is not SequenceState.RUNNING:
        itself = 16 + 2 * hog[0].num_outputs  # what a request was charged itself is not held against it
        ahead = bench.scheduler.queue.counter("hog") - level - itself
        assert ahead <= 128 + 2 * len(hog)
        assert bench.scheduler.num_preemptions == 0
        bench.step()
    assert ahead > 128 - 2 * len(hog)
    assert bench.scheduler.num_preemptions == 2
    outputs = [list(seq.token_ids) for seq in hog]
    while bench.live:
        bench.step()
    assert [seq.num_outputs for seq in hog] == [100, 100]
    assert [seq.token_ids[: len(before)] for seq, before in zip(hog, outputs, strict=True)] == outputs


def test_nobody_makes_way_where_that_would_not_be_enough() -> None:
    bench = Bench(blocks=32)
    hogs = [bench.add(f"hog{number}", 16, 100, tenant="hog", first=1000 * number) for number in range(3)]
    # Is behind all others, whatever it gets.
    bench.add("dear", 16, 80, tenant="dear", weight=1e6, first=9000)
    bench.step()
    light = bench.add("light", 28 * BLOCK_SIZE - 8, 4, tenant="light", first=5000)
    while "dear" in bench.live:
        bench.step()
        assert bench.scheduler.num_preemptions == 0
    assert bench.scheduler.queue.giving_way(light, bench.scheduler.running) == hogs
    while light.state is not SequenceState.RUNNING:
        bench.step()
    assert bench.scheduler.num_preemptions == 3, "now it is enough"


def test_large_prompts_of_ever_new_tenants_do_not_preempt_each_other() -> None:
    bench = Bench(blocks=64)  # a lead of 512
    for number in range(6):
        bench.add(f"r{number}", 900, 4, tenant=f"t{number}", first=10_000 * number)
        for _ in range(9):
            bench.step()
    while bench.live:
        bench.step()
    assert bench.scheduler.num_preemptions == 0


def _until_far_ahead(bench: Bench, light: Sequence) -> None:
    """Step until somebody would give way in the next plan, if that were enough for the light one."""
    while not bench.scheduler.queue.giving_way(light, bench.scheduler.running):
        assert bench.scheduler.num_preemptions == 0
        bench.step()


def test_nobody_makes_way_for_one_that_has_room_by_now() -> None:
    bench = Bench(blocks=32)
    for number in range(3):
        bench.add(f"hog{number}", 16, 100, tenant="hog", first=1000 * number)
    ends = bench.add("ends", 8 * BLOCK_SIZE, 100, tenant="hog", first=9000)
    while not ends.num_outputs:
        bench.step()
    light = bench.add("light", 14 * BLOCK_SIZE, 4, tenant="light", first=5000)
    _until_far_ahead(bench, light)
    assert light.state is SequenceState.WAITING
    bench.finish(ends)  # its client went away
    assert "light" in bench.step()
    assert bench.scheduler.num_preemptions == 0


def test_blocks_that_others_share_do_not_count_as_freed_by_who_makes_way() -> None:
    bench = Bench(blocks=32, tokens=256)
    bench.add("h0", 16 * 5 + 1, 80, tenant="hog")
    bench.step()
    for number in (1, 2, 3):
        bench.add(f"h{number}", 16 * 5 + 1, 80, tenant="hog")
    # Behind all others, whatever it gets: it makes no way.
    bench.add("dear", 16 * 3, 200, tenant="dear", weight=1e6, first=9000)
    bench.step()
    bench.step()
    assert len(bench.scheduler.running) == 5
    light = bench.add("light", 16 * 26, 4, tenant="light", first=5000)
    _until_far_ahead(bench, light)
    # All of the hog's blocks would not do, though their sum, the shared ones four times, would.
    for _ in range(5):
        bench.step()
    assert bench.scheduler.num_preemptions == 0


def test_how_far_tenants_may_be_apart_and_level_depends_on_their_weights() -> None:
    bench = Bench(blocks=7, tokens=16)
    bench.add("hog", 64, 100, tenant="hog", weight=1000.0)
    bench.add("light", 10, 100, tenant="light", weight=1000.0, first=2000)
    assert _first_preempted(bench) == ("hog",), "it is ahead by more than a step's tokens over the weight"


def test_a_prompt_in_the_making_is_not_dropped_for_a_tenant_that_got_more() -> None:
    bench = Bench(blocks=47, tokens=16)
    hogs = [bench.add(f"hog{number}", 31, 200, tenant="hog", first=1000 * number) for number in range(8)]
    while len(bench.scheduler.running) < len(hogs) or any(not seq.num_outputs for seq in hogs):
        bench.step()
    light = bench.add("light", 200, 4, tenant="light", first=9000)
    preempted: list[str] = []
    while not light.num_outputs:
        plan = bench.plan()
        preempted += plan.preempted
        bench.collect(plan)
    assert preempted
    assert "light" not in preempted


def test_within_a_tenant_the_least_urgent_and_then_the_latest_is_preempted() -> None:
    bench = Bench(blocks=6)
    bench.add("urgent", 15, priority=5, max_tokens=60, first=1000)
    bench.add("early", 15, max_tokens=60, first=2000)
    bench.add("late", 15, max_tokens=60, first=3000)
    preempted: list[str] = []
    while len(preempted) < 2:  # first to have a third block each, then a fourth
        plan = bench.plan()
        preempted += plan.preempted
        bench.collect(plan)
    assert preempted == ["late", "early"]
    assert [seq.request_id for seq in bench.scheduler.running] == ["urgent"]
    assert bench.scheduler.queue.head() is bench.live["early"]


def test_a_preempted_sequence_resumes_with_its_outputs_and_is_not_charged_again() -> None:
    bench = Bench(blocks=3)
    first = bench.add("first", 15, max_tokens=30)
    second = bench.add("second", 15, max_tokens=12, first=2000)
    while not second.epoch:
        bench.step()
    outputs = list(second.token_ids)
    while second.state is not SequenceState.RUNNING:
        assert "second" in bench.live
        bench.step()
    assert first.request_id not in bench.live, "there is no room for both until the first has ended"
    assert second.token_ids[: len(outputs)] == outputs
    while bench.live:
        bench.step()
    assert second.num_outputs == 12


def test_recomputation_is_free_and_every_token_is_charged_once() -> None:
    bench = Bench(blocks=4)
    bench.add("x", 1, tenant="anchor", weight=1e9, max_tokens=1)  # keeps the accounts from starting anew
    first, second = bench.add("a", 15, max_tokens=30), bench.add("b", 15, max_tokens=30, first=2000)
    charged = 0.0
    while bench.live:
        bench.step()
        charged = max(charged, bench.scheduler.queue.counter("acme"))
    assert first.epoch + second.epoch > 0
    # The last charge falls together with the accounts being closed: 2 units for the last token.
    assert charged == pytest.approx(2 * 15 * 1.0 + (2 * 30 - 1) * 2.0)


def test_an_adapter_costs_its_ranks_by_the_token_and_its_load_once() -> None:
    charges = Charges(per_rank=0.01, load_per_rank=2.0)
    bench = Bench(charges=charges)
    ref = AdapterRef("acme", "a", 1, "a" * 64, 16)
    bench.add("x", 1, tenant="anchor")  # keeps the accounts from starting anew
    bench.step()
    before = bench.scheduler.queue.counter("anchor")
    for name in "ab":
        bench.add(name, 10, max_tokens=4, adapter=ref, first=ord(name) * 1000)
    level = bench.scheduler.queue.counter("acme")
    assert level == before
    while bench.live.keys() > {"x"}:
        bench.transport.settle()
        bench.step()
    charged = bench.scheduler.queue.counter("acme") - level
    assert charged == pytest.approx(16 * 2.0 + 1.16 * 2 * (10 + 4 * 2.0))


def test_a_lone_sequence_can_use_the_whole_pool() -> None:
    bench = Bench(blocks=3)
    bench.add("a", 20, max_tokens=3 * BLOCK_SIZE + 1 - 20)
    while bench.live:
        assert bench.step()
    assert bench.scheduler.num_preemptions == 0


def test_a_newcomer_is_not_let_in_on_blocks_that_a_running_prompt_still_needs() -> None:
    bench = Bench(blocks=4, tokens=16)
    bench.add("long", 60)
    assert bench.step() == {"long": 16}
    bench.add("other", 20, tenant="other", first=5000)
    for _ in range(3):
        assert "other" not in bench.step()
    assert bench.scheduler.num_preemptions == 0


def test_smaller_requests_do_not_overtake_one_that_waits_for_blocks() -> None:
    bench = Bench(blocks=4)
    runner = bench.add("runner", 30, max_tokens=3)
    bench.step()
    bench.add("big", 50, tenant="big", first=2000)
    bench.add("small", 4, tenant="big", first=5000)
    bench.step()
    assert list(bench.scheduler.running) == [runner]
    bench.step()
    assert bench.step() == {"big": 50}


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_backlogged_tenants_share_the_engine_by_weight(weight: float) -> None:
    bench = Bench(blocks=8, seqs=2, tokens=48)
    served = {"heavy": 0.0, "light": 0.0}
    for index in range(120):
        bench.add(f"h{index}", 40, 5, tenant="heavy", first=10_000 + 100 * index, weight=weight)
        bench.add(f"l{index}", 10, 5, tenant="light", first=50_000 + 100 * index)
    for _ in range(120):
        plan = bench.plan()
        for row in plan.scheduled:
            prefill = min(row.start + row.num_tokens, row.seq.num_prompt) - row.start
            served[row.seq.request.tenant_id] += max(prefill, 0) + 2 * row.samples
        bench.collect(plan)
    assert len([seq for seq in bench.live.values() if seq.request.tenant_id == "light"]) > 10, (
        "still backlogged"
    )
    # Bound of the weighted counters: 2·max(largest charged prompt, decode cost · tokens in the batch).
    assert abs(served["heavy"] / weight - served["light"]) <= 2 * max(40, 2 * 8 * BLOCK_SIZE)
    assert served["heavy"] / sum(served.values()) == pytest.approx(weight / (weight + 1), abs=0.06)


@pytest.mark.parametrize("adapters", ["base", "cold", "resident"])
def test_planning_a_deep_queue_is_no_more_work_than_a_short_one(adapters: str) -> None:
    def work(waiting: int) -> int:
        bench = Bench(blocks=16, seqs=4, tokens=64)
        for index in range(waiting):
            tenant = f"t{index % 500}"
            shared = AdapterRef(tenant, "a", 1, f"{index % 4:064x}", 8)
            own = AdapterRef(tenant, "a", 1, f"{index % 500:064x}", 8)
            ref = {"base": None, "cold": own, "resident": shared}[adapters]
            bench.add(f"r{index}", 20, tenant=tenant, adapter=ref, first=index * 50)
        if adapters == "cold":
            bench.transport.load_fate = lambda digest: Fate(None)
        for _ in range(12):
            bench.transport.settle()
            bench.cache.poll()
            bench.collect(bench.scheduler.plan(bench.now))

        def plan() -> None:
            for _ in range(10):
                bench.cache.poll()
                bench.scheduler.plan(bench.now)

        return lines_run(plan)

    assert work(3000) <= 1.2 * work(50)
