"""A step's time is bounded while more than one tenant is served, and prompts of tenants that are behind get a share."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from loraplex.adapters.ref import AdapterRef
from loraplex.engine.scheduling.timing import step_bound
from loraplex.engine.scheduling.timing.step_bound import (
    AHEAD_CHUNK,
    AUTO_STEPS,
    LEAD,
    LEAST_CHUNK,
    MOST_SHARING,
    MOST_SLOWED,
    PROMPTS_SHARE,
    RECENT_S,
    StepBound,
    make_bound,
)
from loraplex.engine.scheduling.timing.step_costs import MOST_ROWS, StepCosts
from loraplex.engine.scheduling.timing.step_times import MeasuredTimes, StepLoad, StepTimes
from loraplex.engine.types import SequenceState, StepPlan
from support.engine.scheduler_bench import Bench, sizes

COSTS = StepCosts(tuple(1 + 0.1 * rows for rows in range(MOST_ROWS)))
MEASURED = MeasuredTimes({1: 0.010, 256: 0.110}, pair=4e-7, sample=1e-5, score=1e-3, costs=COSTS)
MAX_S = 0.06
STEP = 256
LONG = 6400


def bound(max_s: float | None = MAX_S, measured: MeasuredTimes = MEASURED) -> StepBound:
    return StepBound(StepTimes(measured), max_s)


def bench(
    max_s: float | None = MAX_S, measured: MeasuredTimes = MEASURED, *, seqs: int = 64, blocks: int = 1000
) -> Bench:
    return Bench(blocks=blocks, seqs=seqs, tokens=STEP, bound=bound(max_s, measured))


def predicted(plan: StepPlan, measured: MeasuredTimes = MEASURED) -> float:
    return StepTimes(measured).seconds(StepLoad.of(plan.scheduled))


def streaming(made: Bench, tenant: str = "chat", number: int = 1) -> None:
    """Sequences of a tenant that decode."""
    for turn in range(number):
        made.add(f"{tenant}{turn}", 1, 10**4, tenant=tenant, first=10**6 + 50 * len(made.live))
    made.step()


def test_a_step_beside_another_tenants_stream_takes_no_longer_than_its_bound() -> None:
    made = bench()
    streaming(made)
    seq = made.add("long", LONG, tenant="acme")
    chunks = {}
    while seq.num_computed < LONG:
        start = seq.num_computed
        plan = made.plan()
        made.collect(plan)
        assert sizes(plan)["chat0"] == 1
        chunks[start] = sizes(plan)["long"]
        assert chunks[start] >= LEAST_CHUNK
        assert predicted(plan) <= MAX_S
        assert predicted(plan) > 0.9 * MAX_S or seq.num_computed == LONG, "the time is used"
    at = sorted(chunks)
    first, middle, last = (chunks[next(start for start in at if start >= least)] for least in (0, 1000, 6000))
    assert first > 1.5 * middle > 3 * last


def test_alone_a_prompt_is_computed_in_steps_as_large_as_they_may_be() -> None:
    made = bench()
    streaming(made, "acme")
    made.add("long", LONG, tenant="acme")
    done = [made.step()["long"] for _ in range(LONG // (STEP - 1))]
    assert {*done} == {STEP - 1}


def test_a_tenant_that_has_just_left_counts_as_here() -> None:
    made = bench()
    streaming(made)
    made.add("long", LONG, tenant="acme")
    assert made.step()["long"] < STEP - 1
    made.finish(made.live["chat0"])
    made.now += RECENT_S
    assert made.step()["long"] < STEP
    made.now += 0.1
    assert made.step()["long"] == STEP


def test_a_tenants_own_second_request_is_nobody_else() -> None:
    made = bench()
    streaming(made)
    made.finish(made.live["chat0"])
    streaming(made)
    made.add("long", LONG, tenant="chat")
    assert made.step()["long"] == STEP - 1


def test_prompts_go_on_beside_rows_that_take_the_whole_bound() -> None:
    max_s = 0.02
    made = bench(max_s)
    for number in range(40):
        made.add(f"chat{number}", 1, 10**4, tenant=f"chat{number}", first=10**6 + 50 * number)
        made.step()
    seq = made.add("long", 600, 1, tenant="acme")
    for _ in range(600 // LEAST_CHUNK):
        plan = made.plan()
        made.collect(plan)
        decoding = StepTimes(MEASURED).seconds(
            StepLoad.of(row for row in plan.scheduled if row.samples and row.start)
        )
        assert len(plan.scheduled) == 41, "nobody waits"
        assert sizes(plan)["long"] >= LEAST_CHUNK or seq.num_computed == 600
        assert predicted(plan) <= max(max_s, decoding + min(decoding, max_s)) + 1e-3 * LEAST_CHUNK
        assert sizes(plan)["long"] > 2 * LEAST_CHUNK or seq.num_computed > 100, "its share, not the least"
        if "long" not in made.live:
            return
    raise AssertionError("the prompt has not ended")


@pytest.mark.parametrize(
    ("ahead", "positions"), [(0.0, 20), (LEAD - 1, 20), (LEAD + STEP, AHEAD_CHUNK), (10**6, AHEAD_CHUNK)]
)
def test_a_short_prompt_is_in_the_next_step_beside_long_ones(ahead: float, positions: int) -> None:
    """Whatever is left of the others' chunks, and who has been served more so far."""
    made = bench(blocks=2000)
    for number in range(4):
        made.add(f"long{number}", LONG, tenant="hog", first=10**5 * (1 + number))
    for _ in range(5):
        made.step()
    made.add("short", 20, tenant="chat", first=1)
    made.scheduler.queue.charge_tenant("chat", ahead)
    plan = made.plan()
    assert sizes(plan)["short"] == positions
    assert sum(size for name, size in sizes(plan).items() if name != "short") >= LEAST_CHUNK
    assert predicted(plan) <= MAX_S


def test_each_of_many_tenants_gets_its_part_of_a_step() -> None:
    made = bench(0.1, blocks=2000)
    for tenant in "abcd":
        made.add(tenant, LONG, tenant=tenant, first=10**5 * ord(tenant))
    done = sizes(made.plan())
    assert {*done} == {*"abcd"}
    assert predicted_of(done) <= 0.1
    assert min(done.values()) >= LEAST_CHUNK
    assert max(done.values()) < 4 * min(done.values())


def predicted_of(done: dict[str, int]) -> float:
    load = StepLoad()
    for count in done.values():
        load.add(0, count)
    return StepTimes(MEASURED).seconds(load)


def test_in_the_long_run_prompts_are_served_by_weight() -> None:
    made = bench(seqs=8, blocks=520)
    weights, done = {"one": 1.0, "three": 3.0}, Counter[str]()
    number = 0
    for _ in range(600):
        for tenant, weight in weights.items():
            while sum(seq.request.tenant_id == tenant for seq in made.live.values()) < 3:
                number += 1
                made.add(f"{tenant}-{number}", 1000, 1, tenant=tenant, weight=weight, first=10**4 * number)
        for name, size in made.step().items():
            done[name.partition("-")[0]] += size
    assert done["three"] / done["one"] == pytest.approx(3.0, rel=0.05)


@pytest.mark.parametrize("scarce", ["blocks", "places", "nothing"])
def test_a_share_takes_nothing_that_the_head_of_the_queue_needs(scarce: str) -> None:
    made = Bench(
        blocks=20 if scarce == "blocks" else 100,
        seqs=2 if scarce == "places" else 9,
        tokens=STEP,
        bound=bound(),
    )
    streaming(made)
    made.add("head", 16 * 17, tenant="a", first=1)
    made.add("next", 16 * 5, tenant="b", first=10**5)
    made.scheduler.queue.charge_tenant("b", 10)
    plan = made.plan()
    assert {*sizes(plan)} == {"chat0", "head"} | ({"next"} if scarce == "nothing" else set())
    assert not plan.preempted


@pytest.mark.parametrize("seed", range(24))
def test_whoever_yields_does_so_for_one_that_starts_at_once(seed: int) -> None:
    """Blocks are plenty: only the head of the queue, which lacks a place, has others preempted."""
    rng = random.Random(seed)
    max_s = rng.choice((0.002, 0.02, MAX_S, 0.2))
    made = Bench(blocks=400, seqs=rng.randint(1, 5), tokens=rng.choice((24, 64, STEP)), bound=bound(max_s))
    tenants = {f"t{number}": rng.choice((1.0, 2.0, 4.0)) for number in range(rng.randint(2, 4))}
    for number in range(150):
        if rng.random() < 0.3 or not made.live:
            tenant = rng.choice([*tenants])
            made.add(
                f"r{number}",
                rng.choice((3, 40, 700)),
                rng.randint(1, 60),
                tenant=tenant,
                weight=tenants[tenant],
                first=10**4 * number,
                prompt_logprobs=rng.choice((None, None, 0)),
            )
        if rng.random() < 0.03 and made.live:
            made.finish(rng.choice([*made.live.values()]))
        made.now += rng.choice((0.01, 0.01, 2.0))
        head, before = made.scheduler.queue.head(), {*made.scheduler.running}
        plan = made.plan()
        assert plan.scheduled or not made.live, "something is always computed"
        if plan.preempted:
            assert head in made.scheduler.running
            assert len(made.scheduler.running) >= len(before)
        made.collect(plan)


@pytest.mark.parametrize("seed", range(12))
def test_no_step_of_any_mix_takes_longer_than_its_bound(seed: int) -> None:
    rng = random.Random(seed)
    max_s = rng.choice((0.012, 0.03, MAX_S, 0.2))
    made = bench(max_s, seqs=rng.choice((2, 8, 32)))
    for number in range(150):
        if rng.random() < 0.2:
            made.add(
                f"r{number}",
                rng.choice((3, 40, 700)),
                rng.randint(1, 60),
                tenant=rng.choice("abc"),
                first=10**4 * number,
                prompt_logprobs=rng.choice((None, None, 0)),
            )
        several = len({seq.request.tenant_id for seq in made.live.values()}) > 1
        plan = made.plan()
        ones = [row for row in plan.scheduled if row.num_tokens == 1]
        prompts = [row for row in plan.scheduled if row.num_tokens > 1]
        if several and prompts:
            rows = StepLoad.of(ones)
            for name in plan.preempted:  # its row was counted before it gave its place
                rows.add(made.live[name].most_computed, 1, sampled=1)
            decoding = StepTimes(MEASURED).seconds(rows)
            most = max(max_s, decoding + min(max(decoding, PROMPTS_SHARE * max_s), max_s))
            large = [row for row in prompts if row.num_tokens > LEAST_CHUNK]
            assert StepTimes(MEASURED).seconds(StepLoad.of([*ones, *large])) <= most
            assert len(prompts) - len(large) <= MOST_SHARING + 1
        made.collect(plan)


def test_a_prompt_that_hangs_up_leaves_at_once_and_its_tenant_pays_for_what_was_computed() -> None:
    made = bench()
    streaming(made)
    queue = made.scheduler.queue
    seq = made.add("long", LONG, tenant="hog")
    made.add("other", LONG, tenant="hog", first=10**5)
    before = queue.counter("hog")
    done = sum(size for _ in range(7) for name, size in made.step().items() if name != "chat0")
    made.finish(seq)
    assert queue.counter("hog") - before == pytest.approx(done)
    assert "long" not in sizes(made.plan())


def first_chunk(measured: MeasuredTimes = MEASURED, *, rank: int = 0, scores: bool = False) -> int:
    """Positions of a prompt of 3,000 that its first step beside a stream takes."""
    made = bench(measured=measured)
    streaming(made)
    ref = AdapterRef("acme", "a", 1, "a" * 64, rank) if rank else None
    made.add("long", 3000, tenant="acme", adapter=ref, prompt_logprobs=0 if scores else None)
    for _ in range(5):
        plan = made.plan()
        made.transport.settle()
        if "long" in sizes(plan):
            return sizes(plan)["long"]
        made.collect(plan)
    raise AssertionError("it has not started")


def test_scores_and_adapters_count_by_their_time() -> None:
    plain = first_chunk()
    assert LEAST_CHUNK < first_chunk(scores=True) < 0.5 * plain
    assert first_chunk(rank=64) < 0.9 * plain
    assert first_chunk(rank=64) < first_chunk(rank=8) < plain


@pytest.mark.parametrize(("max_s", "rows"), [(0.02, 16), (0.065, 128), (0.09, 128), (0.2, 256)])
def test_a_step_begins_no_recorded_size_that_does_not_fit(max_s: float, rows: int) -> None:
    recorded = replace(MEASURED, sizes=(16, 64, 128, 256), pair=0.0)
    made = bench(max_s, recorded)
    streaming(made)
    made.add("long", LONG, tenant="acme")
    for _ in range(5):
        plan = made.plan()
        assert plan.num_tokens == rows
        made.collect(plan)


def test_the_bound_of_a_setting() -> None:
    times = StepTimes(MEASURED)
    assert make_bound(0, times) is None
    assert make_bound(50, None) is None
    set_so, auto = make_bound(50, times), make_bound(-1, times)
    assert set_so is not None
    assert auto is not None
    assert set_so.max_s == 0.05
    one = times.seconds(StepLoad(1, 0.0, 1))
    assert auto.max_s == pytest.approx(AUTO_STEPS * one)
    for _ in range(300):
        times.took(StepLoad(1, 0.0, 1), 50 * one)
    assert set_so.max_s == 0.05
    assert auto.max_s == pytest.approx(AUTO_STEPS * MOST_SLOWED * times.one_row), "however slow it has become"


def test_shares_leave_something_to_the_first_tenant() -> None:
    assert 0 < step_bound.OTHERS_SHARE < 1


def test_a_newcomer_does_not_wait_for_another_tenants_whole_prompt() -> None:
    """It begins at the level of the tenant that got most: one whose answers have used what was idle."""
    made = bench(blocks=4000)
    for number in range(4):
        made.add(f"answer{number}", 2, 2000, tenant="busy", first=10**6 + 1000 * number)
    made.add("long", LONG, tenant="hog", first=1)
    for _ in range(5):
        made.step()
    made.scheduler.queue.charge_tenant("busy", 5000.0)
    assert made.scheduler.queue.counter("busy") > made.scheduler.queue.counter("hog") + LEAD
    made.add("short", 40, tenant="new", first=10**5)
    computed = [made.step().get("short", 0) for _ in range(4)]
    assert sum(computed) >= 40, computed


@pytest.mark.parametrize("weights", [(1.0, 4.0), (4.0, 1.0), (1.0, 1.0, 8.0), (0.25, 1.0, 1.0)])
@pytest.mark.parametrize("answer", [2, 30])
def test_no_tenant_gets_further_and_further_ahead_by_steps_with_room_for_little(
    weights: tuple[float, ...], answer: int
) -> None:
    """A step has room for some 20 positions of prompts, and each tenant always has more waiting."""
    made = bench(0.02, seqs=4, blocks=400)
    tenants, number, gaps = {f"t{index}": weight for index, weight in enumerate(weights)}, 0, []
    for _ in range(1500):
        for tenant, weight in tenants.items():
            while sum(seq.request.tenant_id == tenant for seq in made.live.values()) < 6:
                number += 1
                made.add(f"{number}", 38, answer, tenant=tenant, weight=weight, first=100 * number)
        made.step()
        counters = [made.scheduler.queue.counter(tenant) for tenant in tenants]
        gaps.append(max(counters) - min(counters))
    most = 2 * max(38, 2 * 4 * (38 + answer)) / min(weights)
    assert max(gaps) <= most + LEAD
    assert max(gaps[750:]) <= max(gaps[:750]) + 38 / min(weights), "it does not grow"


def test_a_tenant_that_is_ahead_goes_on_before_its_turn_as_the_first_one_does() -> None:
    """Equal weights: each step in which the first one gets as many has its positions."""
    made = bench(blocks=4000)
    made.add("hog", LONG, tenant="hog", first=1)
    made.add("other", LONG, tenant="other", first=10**5)
    made.scheduler.queue.charge_tenant("other", 5000.0)
    steps = [made.step() for _ in range(20)]
    assert [step["other"] for step in steps] == [AHEAD_CHUNK] * 20
    assert min(step["hog"] for step in steps) > AHEAD_CHUNK


def test_forced_tokens_advance_where_blocks_run_short() -> None:
    made = bench(blocks=20, seqs=8)
    light = made.add("light", 8, 200, tenant="light", first=1)
    for number in range(5):
        made.add(f"hog{number}", 8, 200, tenant="hog", first=1000 * (1 + number))
    skipped = 0
    for _ in range(150):
        if "light" not in made.live:
            break
        plan = made.plan()
        is_running = light.state is SequenceState.RUNNING
        skipped = skipped + 1 if is_running and "light" not in sizes(plan) and not plan.preempted else 0
        assert skipped <= 1, "it advances in each step"
        made.collect(plan)
        if light.state is SequenceState.RUNNING and light.num_outputs < 190:
            light.token_ids += [7] * 2  # forced
