"""Tokens that grammars force: what of a step they take."""

from __future__ import annotations

from loraplex.engine.types import StepPlan
from support.engine.scheduler_bench import Bench, sizes

FORCED = 31


def collect(bench: Bench, plan: StepPlan, *, forcing: str = "") -> None:
    """As `Bench.collect`, and behind each token of a tenant `forcing` its grammar forces some."""
    for row in plan.scheduled:
        seq = bench.live[row.request_id]
        bench.scheduler.computed(seq, row)
        if row.samples:
            count = 1 + FORCED * (row.request.tenant_id == forcing)
            seq.token_ids += [7] * count
            seq.num_pending -= 1
            bench.scheduler.delivered(seq, count)
    bench.check()


def filled(bench: Bench, tenant: str, number: int, *, num_prompt: int = 2) -> None:
    """`number` sequences of a tenant that decode."""
    for turn in range(number):
        bench.add(f"{tenant}{turn}", num_prompt, 2000, tenant=tenant, first=1000 * (1 + len(bench.live)))


def test_a_few_sequences_take_their_forced_tokens_at_once() -> None:
    bench = Bench(blocks=400, seqs=64, tokens=256)
    filled(bench, "acme", 1)
    collect(bench, bench.plan(), forcing="acme")
    plan = bench.plan()
    assert sizes(plan) == {"acme0": 1 + FORCED}
    assert plan.scheduled[0].samples


def test_every_sequence_advances_beside_forced_tokens_of_many() -> None:
    """60 of them fill a step of 256, as prompts do: nobody waits for another step."""
    bench = Bench(blocks=1000, seqs=64, tokens=256)
    filled(bench, "acme", 60)
    collect(bench, bench.plan(), forcing="acme")
    for _ in range(40):
        plan = bench.plan()
        assert len(plan.scheduled) == 60, "each advances in each step"
        assert plan.num_tokens <= 256
        collect(bench, plan, forcing="acme")


def test_a_neighbours_prompt_does_not_wait_for_forced_tokens() -> None:
    bench = Bench(blocks=1000, seqs=64, tokens=256)
    filled(bench, "acme", 60)
    collect(bench, bench.plan(), forcing="acme")
    bench.add("chat", 50, tenant="other", first=10**6)
    plan = bench.plan()
    assert sizes(plan)["chat"] == 50
    forced = plan.num_tokens - 50
    assert 60 < forced <= 60 + (256 - 60) // 2, "half of what is left is for prompts"


def test_the_least_served_tenants_forced_tokens_are_first() -> None:
    bench = Bench(blocks=400, seqs=8, tokens=64)
    filled(bench, "hog", 7)
    for _ in range(5):
        collect(bench, bench.plan())
    bench.add("light", 2, 2000, tenant="light", first=10**6)
    plan = bench.plan()
    for row in plan.scheduled:
        collect(bench, StepPlan(plan.step_id, (row,)), forcing=row.request.tenant_id)
    plan = bench.plan()
    assert sizes(plan)["light"] == 1 + FORCED, "all of its own"
    assert plan.num_tokens == 64, "and of the others' what is left of the step"


def test_what_is_computed_again_is_no_forced_token() -> None:
    """A sequence that was preempted behind many answers catches up as a prompt does."""
    bench = Bench(blocks=24, seqs=2, tokens=64)
    filled(bench, "acme", 2, num_prompt=16)
    for _ in range(200):
        plan = bench.plan()
        bench.collect(plan)
        if plan.preempted:
            break
    lost = bench.live[plan.preempted[0]]
    assert lost.num_outputs > 50
    bench.finish(next(seq for seq in bench.live.values() if seq is not lost))
    bench.scheduler.blocks.disown(lost.block_keys)  # nothing of it is found again
    rest = lost.num_tokens
    while rest > 0:
        assert bench.step() == {lost.request_id: min(64, rest)}
        rest -= 64


def test_steps_of_as_many_tokens_as_places_starve_nobody() -> None:
    bench = Bench(blocks=400, seqs=8, tokens=8)
    filled(bench, "acme", 8)
    while any(seq.num_outputs == 0 for seq in bench.live.values()):
        collect(bench, bench.plan(), forcing="acme")
    assert sizes(bench.plan()) == {f"acme{turn}": 1 for turn in range(8)}
