"""Weighted virtual token counters: who goes next, what is charged, what being away is worth."""

from __future__ import annotations

import time
from itertools import count

import pytest

from loraplex.adapters.ref import AdapterRef
from loraplex.engine.config import Charges
from loraplex.engine.scheduling.fair_queue import FairQueue
from loraplex.engine.types import EngineRequest, SamplingParams, Sequence
from support.engine.scheduler_bench import Bench
from support.simulator.core_integrity import check_queue
from support.work import lines_run

_orders = count()


def waiting(
    tenant: str,
    *,
    priority: int = 0,
    epoch: int = 0,
    adapter: int | None = None,
) -> Sequence:
    order = next(_orders)
    prompt = (1,)
    ref = None if adapter is None else AdapterRef(tenant, f"a{adapter}", 1, digest(adapter), 8)
    sampling = SamplingParams(max_tokens=1)
    request = EngineRequest(f"{tenant}-{order}", tenant, prompt, sampling, ref, priority=priority)
    return Sequence(request, 0.0, order, list(prompt), epoch=epoch)


def digest(number: int) -> str:
    return f"{number:064x}"


def arrive(queue: FairQueue, *seqs: Sequence) -> None:
    for seq in seqs:
        queue.enter(seq)
        queue.push(seq)


def serve(queue: FairQueue, units: float) -> str:
    """Take the head, charge it, end it. Returns its tenant."""
    seq = queue.head()
    assert seq is not None
    queue.remove(seq)
    queue.charge(seq, units)
    queue.leave(seq)
    return seq.request.tenant_id


def serve_backlog(
    queue: FairQueue, weights: dict[str, float], costs: dict[str, float], rounds: int
) -> dict[str, float]:
    """Keep every tenant backlogged for `rounds` turns; returns the units served to each."""
    served = dict.fromkeys(weights, 0.0)
    for tenant, weight in weights.items():
        queue.set_weight(tenant, weight)
        arrive(queue, waiting(tenant), waiting(tenant))
    for _ in range(rounds):
        head = queue.head()
        assert head is not None
        tenant = head.request.tenant_id
        arrive(queue, waiting(tenant))
        assert serve(queue, costs[tenant]) == tenant
        served[tenant] += costs[tenant]
    return served


def test_the_least_served_tenant_goes_next_and_equals_take_turns() -> None:
    queue = FairQueue()
    arrive(queue, *(waiting(tenant) for tenant in "aaabbbccc"))
    assert [serve(queue, 1.0) for _ in range(9)] == list("abcabcabc")


@pytest.mark.parametrize(("weight", "share"), [(1.0, 0.5), (3.0, 0.75)])
def test_backlogged_tenants_share_by_weight_whatever_their_requests_cost(weight: float, share: float) -> None:
    costs = {"a": 700.0, "b": 12.0}
    served = serve_backlog(FairQueue(), {"a": weight, "b": 1.0}, costs, 5000)
    assert served["a"] / sum(served.values()) == pytest.approx(share, abs=0.02)
    # The bound of the paper, for requests that are charged whole: 2·max(charge per weight).
    assert abs(served["a"] / weight - served["b"]) <= 2 * max(costs["a"] / weight, costs["b"])


def test_more_requests_do_not_buy_a_share() -> None:
    queue = FairQueue()
    arrive(queue, *(waiting("many") for _ in range(100)), *(waiting("few") for _ in range(10)))
    first = [serve(queue, 5.0) for _ in range(20)]
    assert first.count("few") == 10


def test_absence_earns_no_credit() -> None:
    queue = FairQueue()
    arrive(queue, *(waiting("busy") for _ in range(50)), *(waiting("other") for _ in range(50)))
    for _ in range(60):
        serve(queue, 10.0)
    arrive(queue, *(waiting("late") for _ in range(20)))
    nexts = [serve(queue, 10.0) for _ in range(30)]
    assert nexts.count("late") == pytest.approx(10, abs=1), "a newcomer starts level, not ahead"


def test_leaving_and_coming_back_clears_no_debt() -> None:
    queue = FairQueue()
    arrive(queue, *(waiting("steady") for _ in range(30)), waiting("hog"))
    serve(queue, 1.0)
    assert serve(queue, 500.0) == "hog"  # its only request: it has left the engine now
    arrive(queue, *(waiting("hog") for _ in range(30)))
    nexts = [serve(queue, 10.0) for _ in range(20)]
    assert "hog" not in nexts


def test_tenant_in_an_empty_queue_starts_at_the_last_counter() -> None:
    queue = FairQueue()
    running = waiting("old")
    arrive(queue, running)
    queue.remove(running)
    queue.charge(running, 1000.0)
    arrive(queue, waiting("new"))
    assert queue.counter("new") == queue.counter("old")


def test_counters_of_idle_tenants_are_forgotten_once_they_mean_nothing() -> None:
    queue = FairQueue()
    arrive(queue, *(waiting("steady") for _ in range(200)))
    for index in range(100):
        arrive(queue, waiting(f"visitor-{index}"))
        while serve(queue, 3.0) == "steady":
            pass
    for _ in range(10):
        serve(queue, 3.0)
    arrive(queue, waiting("x"))
    serve(queue, 1.0)
    assert sum(queue.counter(f"visitor-{index}") > 0 for index in range(100)) <= 2
    while queue:
        serve(queue, 3.0)
    assert queue.counter("steady") == 0.0
    assert queue.tenants() == []


def test_priority_orders_within_the_tenant_only() -> None:
    queue = FairQueue()
    low, high, other = waiting("a"), waiting("a", priority=9), waiting("b", priority=-5)
    arrive(queue, low, high, other)
    assert queue.head() is high
    queue.remove(high)
    queue.charge(high, 1.0)
    assert queue.head() is other


def test_a_preempted_sequence_goes_before_its_tenants_others() -> None:
    queue = FairQueue()
    urgent, preempted = waiting("a", priority=9), waiting("a", epoch=1)
    arrive(queue, urgent, preempted)
    assert queue.head() is preempted


def test_removal_anywhere_and_a_second_stay() -> None:
    queue = FairQueue()
    first, second, third = waiting("a"), waiting("a"), waiting("a")
    arrive(queue, first, second, third)
    queue.remove(second)
    queue.remove(first)
    assert queue.head() is third
    queue.push(first)
    assert queue.head() is first
    assert second not in queue
    check_queue(queue, {"a": 3})
    assert queue.requests == {first, third}
    queue.remove(first)
    queue.remove(third)
    assert queue.head() is None
    assert len(queue) == 0


def test_aborted_requests_behind_a_standing_head_leave_nothing_behind() -> None:
    queue = FairQueue()
    arrive(queue, waiting("a", priority=1))
    started = time.process_time()
    for _ in range(20_000):
        seq = waiting("a")
        arrive(queue, seq)
        queue.remove(seq)
        queue.leave(seq)
    assert time.process_time() - started < 2.0
    check_queue(queue, {"a": 1})
    assert queue.requests == ({head} if (head := queue.head()) else set())


def test_choosing_among_many_tenants_costs_a_logarithm() -> None:
    def cost(tenants: int) -> int:
        queue = FairQueue()
        arrive(queue, *(waiting(f"t{index}") for index in range(tenants) for _ in range(2)))

        def choose() -> None:
            for _ in range(200):
                head = queue.head()
                assert head is not None
                queue.charge(head, 5.0)

        return lines_run(choose)

    assert cost(10_000) <= 1.5 * cost(100), (
        "a hundred times the tenants must not cost a hundred times the work"
    )


# Adapters.


def test_nonresident_adapter_is_not_backlog_and_earns_no_credit() -> None:
    queue = FairQueue()
    arrive(queue, *(waiting("busy") for _ in range(100)))
    cold = [waiting("cold", adapter=1) for _ in range(100)]
    arrive(queue, *cold)
    for _ in range(20):
        assert serve(queue, 10.0) == "busy"
    queue.open(digest(1))
    nexts = [serve(queue, 10.0) for _ in range(25)]
    assert nexts.count("cold") in (12, 13), "in turns from the start"


def test_an_adapter_that_leaves_takes_its_requests_and_no_others_out_of_the_choice() -> None:
    queue = FairQueue()
    first, urgent, base = waiting("a", adapter=1), waiting("a", adapter=1, priority=3), waiting("a")
    other = waiting("b", adapter=1)
    arrive(queue, first, urgent, base, other)
    assert queue.head() is base
    queue.open(digest(1))
    assert queue.head() is urgent
    queue.charge(urgent, 1.0)
    assert queue.head() is other
    queue.close(digest(1))
    assert queue.head() is base
    queue.remove(base)
    assert queue.head() is None
    assert len(queue) == 3
    check_queue(queue, {"a": 3, "b": 1})
    assert queue.requests == {first, urgent, other}
    queue.open(digest(1))
    queue.remove(other)
    assert queue.head() is urgent
    queue.remove(urgent)
    assert queue.head() is first


def test_moving_an_adapter_costs_the_same_for_one_request_and_for_ten_thousand() -> None:
    def operations(requests: int) -> int:
        queue = FairQueue()
        arrive(queue, *(waiting("a", adapter=1) for _ in range(requests)), waiting("b"))
        return lines_run(lambda: (queue.open(digest(1)), queue.head(), queue.close(digest(1)), queue.head()))

    assert operations(10_000) == operations(10)


# Weights.


def test_a_changed_weight_counts_at_once_and_for_what_comes() -> None:
    queue = FairQueue()
    arrive(queue, *(waiting(tenant) for tenant in ["a"] * 200 + ["b"] * 200))
    for _ in range(20):
        serve(queue, 10.0)
    before = queue.counter("a")
    queue.set_weight("a", 3.0)
    assert queue.counter("a") == before
    assert [serve(queue, 10.0) for _ in range(40)].count("a") == 30
    queue.set_weight("later", 2.0)
    arrive(queue, *(waiting("later") for _ in range(30)))
    assert queue.weight("later") == 2.0


def test_a_rank_costs_what_it_is_said_to() -> None:
    charges = Charges(per_rank=0.01)
    assert charges.price(0) == 1.0
    assert charges.price(64) == pytest.approx(1.64)


@pytest.mark.parametrize(("num_prompt", "charged"), [(1, 16), (15, 16), (16, 16), (40, 40)])
def test_a_short_input_is_charged_a_block(num_prompt: int, charged: int) -> None:
    """Thousands of one token each take a place and a block each."""
    bench = Bench()
    request = EngineRequest("r", "acme", tuple(range(num_prompt)), SamplingParams(0), pooling="mean")
    seq = Sequence(request, 0.0, 0, list(request.prompt_ids))
    bench.scheduler.add_sequence(seq)
    bench.live["r"] = seq
    bench.plan()
    assert bench.scheduler.queue.counter("acme") == charged
