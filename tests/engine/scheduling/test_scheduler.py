"""Plans, step by step, with fabricated outputs: no runner, no clock but the numbers passed in."""

from __future__ import annotations

import pytest

from loraplex.adapters.ref import AdapterRef
from loraplex.engine.config import Charges
from loraplex.engine.types import Sequence, SequenceState
from loraplex.kernels.attention import BLOCK_SIZE
from support.engine.fake_transport import Fate
from support.engine.scheduler_bench import Bench, sizes
from support.work import lines_run


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


def test_every_sequence_advances_with_fewer_tokens_than_sequences() -> None:
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


def test_new_request_leaves_running_ones_a_block_to_grow() -> None:
    bench = Bench(blocks=4)
    for number, name in enumerate("abc"):
        bench.add(name, 15, first=1000 * number)
    bench.step()
    assert [seq.request_id for seq in bench.scheduler.running] == ["a", "b"]
    assert bench.scheduler.blocks.num_free == 2


def test_request_that_cannot_outgrow_its_blocks_reserves_none() -> None:
    bench = Bench(blocks=3)
    for number, name in enumerate("abc"):
        bench.add(name, 10, 7, first=1000 * number)
    bench.step()
    assert len(bench.scheduler.running) == 3


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
    bench.add("x", 1, tenant="anchor", weight=1e9, max_tokens=1)  # keeps the accounts from starting again
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
    bench.add("x", 1, tenant="anchor")  # keeps the accounts from starting again
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
            prefill = min(row.start + row.num_tokens, row.num_prompt) - row.start
            served[row.request.tenant_id] += max(prefill, 0) + 2 * row.samples
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
