"""How a tenant gets a place in the batch while others hold them all."""

from __future__ import annotations

import random
from itertools import count

import pytest

from loraplex.engine.types import Sequence, SequenceState
from loraplex.kernels.attention import BLOCK_SIZE
from support.engine.scheduler_bench import Bench, sizes

STEPS_TO_A_PLACE = 8
"""A request of a tenant with nothing running, whose turn it is, waits for this number of steps at most."""


def hog(
    bench: Bench, number: int, *, tenant: str = "hog", num_prompt: int = 8, weight: float = 1.0
) -> list[Sequence]:
    return [
        bench.add(
            f"{tenant}{turn}",
            num_prompt,
            400,
            tenant=tenant,
            weight=weight,
            first=1_000 * hash_of(tenant, turn),
        )
        for turn in range(number)
    ]


def hash_of(tenant: str, turn: int) -> int:
    """No two prompts begin alike."""
    return 100 * sum(map(ord, tenant)) + turn


def running(bench: Bench) -> dict[str, int]:
    held: dict[str, int] = {}
    for seq in bench.scheduler.running:
        held[seq.request.tenant_id] = held.get(seq.request.tenant_id, 0) + 1
    return held


def test_tenant_without_slots_preempts_one_that_has_them_all() -> None:
    bench = Bench(blocks=400, seqs=4)
    hogs = hog(bench, 6)
    for _ in range(5):
        bench.step()
    light = bench.add("light", 8, 4, tenant="light")
    assert "light" in bench.step(), "it came level with the hog, and holds nothing"
    assert running(bench) == {"hog": 3, "light": 1}
    assert hogs[3].state is SequenceState.WAITING, "of the hog's the latest went"
    while "light" in bench.live:
        bench.step()
    bench.step()
    assert hogs[3].state is SequenceState.RUNNING, "it goes on before its tenant's others"
    assert light.num_outputs == 4
    assert bench.scheduler.num_preemptions == 1


def test_preempted_request_finds_its_blocks_again() -> None:
    bench = Bench(blocks=400, seqs=2)
    hogs = hog(bench, 2, num_prompt=4 * BLOCK_SIZE)
    for _ in range(20):
        bench.step()
    bench.add("light", 8, 1, tenant="light")
    while bench.scheduler.num_preemptions == 0 or "light" in bench.live:
        bench.step()
    assert sizes(bench.plan())["hog1"] <= BLOCK_SIZE, "all full blocks were found"
    assert hogs[1].num_outputs >= 10


def test_places_are_shared_by_weight_and_nobody_takes_them_back_in_turn() -> None:
    bench = Bench(blocks=900, seqs=12)
    hog(bench, 20)
    bench.step()
    bench.step()
    hog(bench, 20, tenant="double", weight=2.0)
    for _ in range(20):
        bench.step()
    assert running(bench) == {"hog": 4, "double": 8}
    assert bench.scheduler.num_preemptions == 8
    for _ in range(100):
        bench.step()
    assert bench.scheduler.num_preemptions == 8


def test_blocks_are_shared_where_places_are_not_short() -> None:
    bench = Bench(blocks=40, seqs=16, tokens=256)
    hog(bench, 4, num_prompt=8 * BLOCK_SIZE)
    bench.step()
    bench.step()
    assert running(bench) == {"hog": 4}
    bench.add("light", 6 * BLOCK_SIZE, 4, tenant="light", first=5)
    bench.step()
    assert "light" in bench.step()
    assert running(bench) == {"hog": 3, "light": 1}


def test_nobody_is_preempted_where_that_would_not_be_enough() -> None:
    bench = Bench(blocks=40, seqs=16, tokens=256)
    hog(bench, 4, num_prompt=8 * BLOCK_SIZE)
    bench.step()
    bench.step()
    # With two of the hog's gone it would have more than the hog, and one is not enough.
    light = bench.add("light", 20 * BLOCK_SIZE, 4, tenant="light", first=5)
    for _ in range(20):
        bench.step()
    assert light.state is SequenceState.WAITING
    assert bench.scheduler.num_preemptions == 0


def test_nobody_is_preempted_for_one_that_has_room_by_now() -> None:
    bench = Bench(blocks=400, seqs=3)
    hogs = hog(bench, 3)
    for _ in range(5):
        bench.step()
    bench.add("light", 8, 4, tenant="light")
    bench.finish(hogs[1])  # its client went away
    assert "light" in bench.step()
    assert bench.scheduler.num_preemptions == 0


def test_blocks_that_others_share_do_not_count_as_freed() -> None:
    bench = Bench(blocks=32, tokens=256)
    bench.add("h0", 16 * 8 + 1, 300, tenant="hog", first=0)
    bench.step()
    for number in (1, 2, 3):
        bench.add(f"h{number}", 16 * 8 + 1, 300, tenant="hog", first=0)
    bench.step()
    assert len(bench.scheduler.running) == 4
    assert bench.scheduler.blocks.num_used == 12, "the first eight are the same"
    # Two of the hog's have seventeen blocks each by their own account, and give one each.
    bench.add("light", 16 * 15, 4, tenant="light", first=5000)
    for _ in range(2):
        bench.step()
    assert bench.scheduler.num_preemptions == 0


def test_large_prompts_of_ever_new_tenants_do_not_preempt_each_other() -> None:
    bench = Bench(blocks=64)
    for number in range(6):
        bench.add(f"r{number}", 900, 4, tenant=f"t{number}", first=10_000 * number)
        for _ in range(9):
            bench.step()
    while bench.live:
        bench.step()
    assert bench.scheduler.num_preemptions == 0


def test_prompts_are_computed_in_the_order_of_counters() -> None:
    bench = Bench(blocks=400, tokens=64)
    long = bench.add("long", 640, tenant="hog", first=1000)
    bench.step()
    bench.add("light", 70, tenant="light", first=9000)
    assert bench.step() == {"long": 64}, "they are level, and it began first"
    assert bench.step() == {"light": 64}
    assert bench.step() == {"long": 64}
    assert bench.step() == {"light": 6, "long": 58}
    assert long.num_computed == 3 * 64 + 58


def test_answers_that_grow_into_all_that_a_prompt_in_the_making_held() -> None:
    bench = Bench(blocks=9, seqs=16, tokens=4)
    for number in range(3):
        bench.add(f"d{number}", 1, 100, tenant=f"d{number}", first=1000 * number)
    bench.step()
    bench.add("x", 40, 5, tenant="x", first=90_000)
    while bench.scheduler.num_preemptions == 0:
        bench.step()
    for _ in range(60):
        bench.step()


def test_slots_taken_while_idle_protect_no_other_tenant() -> None:
    """`many` holds all places but one, and waits for nothing; `busy` gets more and more by the last."""
    bench = Bench(blocks=3000, seqs=16, tokens=256)
    for number in range(15):
        bench.add(f"c{number}", 8, 3000, tenant="many", first=100 * number)
    for number in range(20):
        bench.add(f"h{number}", 700, 1, tenant="busy", first=100_000 + 1000 * number)
        while f"h{number}" in bench.live:
            bench.step()
    bench.add("holds", 8, 3000, tenant="busy", first=90_000)
    bench.step()
    assert bench.scheduler.queue.counter("busy") > 2 * bench.scheduler.queue.counter("many")
    bench.add("light", 8, 2, tenant="light", first=95_000)
    steps = 0
    while "light" in bench.live:
        bench.step()
        steps += 1
    assert steps <= STEPS_TO_A_PLACE


def test_tenant_with_the_most_blocks_is_preempted_where_they_run_short() -> None:
    bench = Bench(blocks=10, tokens=64)
    heavy = bench.add("heavy", 120, 40, tenant="heavy", first=1000)
    light = bench.add("light", 1, 40, tenant="light", first=2000)
    preempted: tuple[str, ...] = ()
    while not preempted:
        plan = bench.plan()
        bench.collect(plan)
        preempted = plan.preempted
    assert preempted == ("heavy",)
    assert light.state is SequenceState.RUNNING
    assert (heavy.state, heavy.num_computed, heavy.epoch) == (SequenceState.WAITING, 0, 1)
    assert heavy.block_ids == ()


@pytest.mark.parametrize("seed", range(12))
def test_a_place_within_steps_whatever_others_hold(seed: int) -> None:
    """At any size of the pool, any number of places and any number of hogs, for a request that fits its share."""
    rng = random.Random(seed)
    hogs = rng.randint(1, 3)
    bench = Bench(
        blocks=rng.choice((60, 100, 300, 2000)), seqs=rng.choice((4, 8, 64)), tokens=rng.choice((64, 256))
    )
    turns = count()
    light: Sequence | None = None
    waits: list[int] = []
    for step in range(300):
        for number in range(hogs):
            while sum(seq.request.tenant_id == f"hog{number}" for seq in bench.live.values()) < 70:
                turn = next(turns)
                bench.add(
                    f"r{turn}",
                    rng.randint(1, 60),
                    rng.randint(20, 200),
                    tenant=f"hog{number}",
                    first=100 * turn,
                )
        if step >= 40 and light is None and rng.random() < 0.2:
            turn = next(turns)
            light, begun = (
                bench.add(f"light{turn}", rng.randint(1, 30), 2, tenant="light", first=100 * turn),
                step,
            )
        plan = bench.plan()
        if (
            light is not None
            and light.num_outputs == 0
            and light.first_scheduled is not None
            and light.request_id in sizes(plan)
        ):
            waits.append(step - begun)
        bench.collect(plan)
        if light is not None and light.request_id not in bench.live:
            light = None
    assert len(waits) > 10
    assert max(waits) <= STEPS_TO_A_PLACE
