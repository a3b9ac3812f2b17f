"""Prefixes that come back from host memory within a budget for each step: random histories, and cases by hand."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from loraplex.adapters.ref import AdapterRef
from loraplex.engine.kv import prefix_keys
from loraplex.engine.kv.host_tier import HostTier
from loraplex.engine.kv.layers import BlockNeeds
from loraplex.engine.kv.prefix_blocks import GIVEN_BACK
from loraplex.engine.kv.sequence_blocks import SequenceBlocks
from loraplex.engine.tenant_terms import TenantTerms
from loraplex.engine.types import EngineRequest, SamplingParams, Sequence
from support.engine.core_engine import CoreEngine, adapter, expected
from support.engine.fake_runner import Fault
from support.simulator.histories import Summary, Violation, play

HISTORIES = range(40)
LONG = tuple(range(1, 162))
"""A prompt of ten blocks and a token."""


@functools.cache
def played() -> Summary:
    total = Summary()
    for seed in HISTORIES:
        total.add(play(seed, host=True))
    return total


def test_histories_with_host_memory_keep_every_promise() -> None:
    """No step of several sequences restores more than the budget, nothing comes back for another owner or after its
    version was deleted, and every request ends."""
    total = played()
    assert min(total.restored, total.preemptions, total.out_of_memory, total.poisoned, total.deletions) > 0
    assert min(total.restarts, total.cut_prompts, total.endings["abort"]) > 0


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_two_thousand_histories_with_host_memory() -> None:
    for seed in range(2_000):
        play(seed, host=True)


def restored_after_its_owner_was_erased_in_flight(patch: pytest.MonkeyPatch) -> None:
    erase = SequenceBlocks.erase

    def once_it_is_here(self: SequenceBlocks, digest: str, *, is_used: bool) -> None:
        on = [seq.request.adapter for seq in self.restoring]
        if digest not in {ref.digest for ref in on if ref is not None}:
            erase(self, digest, is_used=is_used)

    patch.setattr(SequenceBlocks, "erase", once_it_is_here)


def deleted_version_stays_on_the_host(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostTier, "erase", lambda self, digest: None)


def as_many_restored_as_there_are(patch: pytest.MonkeyPatch) -> None:
    restore = SequenceBlocks.restore

    def without_a_budget(self: SequenceBlocks, seq: Sequence, now: float) -> bool:
        self._num_restored = -self.num_blocks
        return restore(self, seq, now)

    patch.setattr(SequenceBlocks, "restore", without_a_budget)


def restored_before_the_block_was_written(patch: pytest.MonkeyPatch) -> None:
    take = SequenceBlocks.take_copies
    patch.setattr(
        SequenceBlocks, "take_copies", lambda self: tuple(sorted(take(self), key=lambda one: one.to_host))
    )


def forgotten_while_it_is_on_its_way(patch: pytest.MonkeyPatch) -> None:
    restore = SequenceBlocks.restore

    def once(self: SequenceBlocks, seq: Sequence, now: float) -> bool:
        return restore(self, seq, now) if not seq.block_ids else False

    patch.setattr(SequenceBlocks, "restore", once)


BUGS = {
    as_many_restored_as_there_are: "blocks come back in a step, .* may",
    restored_before_the_block_was_written: "wrong (tokens|embedding|log prob)|instead of|reads KV that",
    forgotten_while_it_is_on_its_way: "have not ended",
}
"""And what is complained of."""
BUGS_OF_DELETIONS = {
    plant.__name__: plant
    for plant in (restored_after_its_owner_was_erased_in_flight, deleted_version_stays_on_the_host)
}


@pytest.mark.parametrize(("plant", "complaint"), BUGS.items())
def test_planted_bug_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(Violation, match=complaint):
        for seed in range(60):
            play(seed, host=True)


def engine_that_forgot(*requests: tuple[str, tuple[int, ...], Any], **config: Any) -> CoreEngine:
    """An engine with these prompts in host memory, and nothing of them on the device."""
    sizes: dict[str, Any] = {"num_blocks": 24, "num_host_blocks": 200, "most_restored_blocks": 2}
    engine = CoreEngine(**(sizes | config))
    for number, (tenant, prompt, ref) in enumerate(requests):
        engine.add(f"first {number}", ref, tenant_id=tenant, prompt_ids=prompt, max_tokens=1)
        engine.run()
    for number in range(2):
        prompt = tuple(range(400 * number + 180, 400 * number + 180 + 16 * 20))
        engine.add(f"other {number}", tenant_id="other", prompt_ids=prompt, max_tokens=1)
        engine.run()
    engine.runner.keep_plans = True
    return engine


def restored(engine: CoreEngine) -> list[int]:
    """Blocks that came back in each step."""
    return [sum(not one.to_host for one in plan.copies) for plan in engine.runner.plans]


def cached(engine: CoreEngine, request: EngineRequest) -> int:
    usage = engine.end(request.request_id).usage
    assert usage is not None
    return usage.cached_tokens


@pytest.mark.parametrize("lookahead", [0, 1])
def test_neighbours_decode_while_a_long_prefix_comes_back(lookahead: int) -> None:
    engine = engine_that_forgot(("acme", LONG, None), lookahead=lookahead)
    neighbour = engine.add("neighbour", tenant_id="other", max_tokens=40)
    while len(engine.tokens("neighbour")) < 4:
        engine.step(0.01)
    engine.runner.plans.clear()
    long = engine.add("long", prompt_ids=LONG)
    late = engine.add("late", tenant_id="third", prompt_ids=(7, 8, 9))
    engine.run()
    assert restored(engine)[:5] == [2, 2, 2, 2, 2]
    rows = [{row.request_id for row in plan.scheduled} for plan in engine.runner.plans]
    assert all("neighbour" in ids and "long" not in ids for ids in rows[:4])
    assert "late" in rows[0]
    assert "long" in rows[4]
    for request, count in ((neighbour, 40), (long, 5), (late, 5)):
        assert engine.tokens(request.request_id) == expected(request, count)
    assert cached(engine, long) == 160
    stats = engine.core.stats()
    assert stats.prefix_cache_hits == 160
    assert (stats.kv_host.restored, stats.num_kv_host_blocks) == (10, 200)
    assert stats.kv_host.written == stats.num_kv_host_blocks_used >= 10
    assert stats.kv_host.restore_s == pytest.approx(0.04)  # four steps


@pytest.mark.parametrize("lookahead", [0, 1])
def test_alone_it_comes_back_in_steps_of_copies(lookahead: int) -> None:
    engine = engine_that_forgot(("acme", LONG, None), lookahead=lookahead)
    long = engine.add("long", prompt_ids=LONG)
    engine.run()
    assert restored(engine)[:5] == [2, 2, 2, 2, 2]
    assert [len(plan.parts) for plan in engine.runner.plans[:5]] == [0, 0, 0, 0, 1]
    assert engine.tokens("long") == expected(long, 5)
    assert cached(engine, long) == 160


@pytest.mark.parametrize("at", ["submit", "collect"])
@pytest.mark.parametrize("memory", [False, True])
def test_a_step_of_copies_that_fails_ends_nobody(at: str, memory: bool) -> None:
    engine = engine_that_forgot(("acme", LONG, None))
    engine.runner.fault = lambda plan: Fault() if plan.parts else Fault(at, memory=memory)
    long = engine.add("long", prompt_ids=LONG)
    engine.run()
    assert engine.tokens("long") == expected(long, 5)
    assert engine.core.stats().num_out_of_memory == 0


def test_lines_wait_while_a_prefix_comes_back() -> None:
    engine = engine_that_forgot(("acme", LONG, None))
    long = engine.add("long", prompt_ids=LONG)
    engine.add("line", tenant_id="third", background=True, batch=True, prompt_ids=(7, 8, 9))
    engine.add("shadow", tenant_id="third", background=True, prompt_ids=(7, 8))
    engine.run()
    first = next(plan for plan in engine.runner.plans if plan.scheduled)
    assert first.scheduled[0].request_id == "long"
    assert engine.tokens("long") == expected(long, 5)


def test_a_request_that_ends_while_its_prefix_comes_back() -> None:
    """The prompt of such a request is counted, as what was found of it is, and the time that it waited."""
    engine = engine_that_forgot(("acme", LONG, None))
    engine.add("gone", prompt_ids=LONG)
    for _ in range(3):
        engine.step(0.01)
    engine.core.abort("gone")
    engine.step()
    usage = engine.end("gone").usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.cached_tokens) == (len(LONG), 6 * 16)
    assert engine.core.stats().kv_host.restore_s == pytest.approx(0.02)


def test_a_full_queue_sheds_none_whose_prefix_comes_back() -> None:
    """Such a request runs: its end would leave no place in the queue."""
    engine = engine_that_forgot(("acme", LONG, None), max_waiting=4, max_num_seqs=2)
    engine.add("decodes", max_tokens=60)
    engine.step(0.01)
    long = engine.add("long", prompt_ids=LONG)
    engine.step(0.01)
    for number in range(4):
        engine.add(f"waits {number}", tenant_id=f"tenant {number}")
    engine.add("other", tenant_id="third")
    assert engine.core.stats().num_waiting == 4
    engine.run()
    assert engine.error("other") == "server_overloaded"
    assert engine.tokens("long") == expected(long, 5)


def test_a_prefix_on_its_way_loses_nothing_to_what_it_displaces() -> None:
    """A tenant has its half of 60 blocks. What comes back takes the places of its blocks on the device, and these go
    where its oldest blocks in host memory are."""
    engine = CoreEngine(num_blocks=24, num_host_blocks=60, most_restored_blocks=2)
    engine.add("first", prompt_ids=LONG, max_tokens=1)
    engine.run()
    for number in range(2):
        prompt = tuple(range(400 * number + 180, 400 * number + 180 + 16 * 20))
        engine.add(f"own {number}", prompt_ids=prompt, max_tokens=1)
        engine.run()
    engine.runner.keep_plans = True
    long = engine.add("long", prompt_ids=LONG)
    engine.run()
    assert sum(restored(engine)) == 10
    assert cached(engine, long) == 160


def test_a_prefix_half_here_and_half_there_is_one_hit() -> None:
    engine = engine_that_forgot(("acme", LONG, None), most_restored_blocks=20)
    engine.add("half", prompt_ids=(*LONG[:81], 500), max_tokens=1)
    engine.run()
    before = sum(restored(engine))
    assert before == 5
    long = engine.add("long", prompt_ids=LONG)
    engine.run()
    assert sum(restored(engine)) == 10
    assert cached(engine, long) == 160
    assert engine.tokens("long") == expected(long, 5)


def test_two_that_want_the_same_prefix_have_it_brought_once() -> None:
    engine = engine_that_forgot(("acme", LONG, None))
    engine.add("neighbour", tenant_id="other", max_tokens=60)
    engine.step(0.01)
    both = [engine.add(f"long {number}", prompt_ids=(*LONG, 300 + number)) for number in range(2)]
    engine.run()
    assert sum(restored(engine)) == 10
    for request in both:
        assert engine.tokens(request.request_id) == expected(request, 5)
        assert cached(engine, request) == 160


def test_another_tenant_with_the_same_tokens_finds_nothing() -> None:
    engine = engine_that_forgot(("acme", LONG, None))
    foreign = engine.add("foreign", tenant_id="third", prompt_ids=LONG)
    engine.run()
    assert sum(restored(engine)) == 0
    assert cached(engine, foreign) == 0


def answer_of_a_version_deleted_on_the_way() -> tuple[CoreEngine, EngineRequest]:
    """Four of ten blocks have come back when the version of a running request is deleted."""
    ref = adapter(1)
    engine = engine_that_forgot(("acme", LONG, ref))
    engine.add("neighbour", tenant_id="other", max_tokens=60)
    engine.step(0.01)
    long = engine.add("long", ref, prompt_ids=LONG)
    while sum(restored(engine)) < 4:
        engine.step(0.01)
    engine.core.drop(ref.digest)
    engine.runner.host.erased(ref.digest)
    engine.run()
    return engine, long


@pytest.mark.parametrize("ref", [None, adapter(1)], ids=["base", "adapter"])
@pytest.mark.parametrize("num_blocks", [24, 64], ids=["in host memory", "on the device"])
def test_nothing_of_a_deleted_tenant_is_found(ref: AdapterRef | None, num_blocks: int) -> None:
    engine = engine_that_forgot(("acme", LONG, ref), ("kept", LONG, None), num_blocks=num_blocks)
    engine.core.forget_tenant("acme")
    for tenant, own, found in (("acme", ref, 0), ("kept", None, 160)):
        again = engine.add(tenant, own, tenant_id=tenant, prompt_ids=LONG)
        engine.run()
        assert cached(engine, again) == found
        assert engine.tokens(tenant) == expected(again, 5)


@pytest.mark.parametrize(("weight", "kept"), [(1.0, 5), (9.0, 10)])
def test_a_tenants_share_is_by_its_weight(weight: float, kept: int) -> None:
    engine = CoreEngine(num_blocks=24, num_host_blocks=20, most_restored_blocks=20)
    engine.core.set_terms("acme", TenantTerms(weight=weight))
    engine.add("first", prompt_ids=LONG, max_tokens=1)
    engine.run()
    for number in range(9):
        prompt = tuple(range(200 + 16 * 20 * number, 200 + 16 * 20 * (number + 1)))
        engine.add(f"other {number}", tenant_id=f"flood {number % 3}", prompt_ids=prompt, max_tokens=1)
        engine.run()
    engine.runner.keep_plans = True
    long = engine.add("long", prompt_ids=LONG)
    engine.run()
    assert sum(restored(engine)) == kept
    assert engine.tokens("long") == expected(long, 5)


def test_a_version_that_is_deleted_while_its_prefix_comes_back() -> None:
    engine, long = answer_of_a_version_deleted_on_the_way()
    assert sum(restored(engine)) == 4
    assert cached(engine, long) == 64
    assert engine.tokens("long") == expected(long, 5)


@pytest.mark.parametrize("name", BUGS_OF_DELETIONS)
def test_planted_bug_of_a_deletion_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS_OF_DELETIONS[name](monkeypatch)
    with pytest.raises(AssertionError, match="a block comes back after its version was deleted"):
        answer_of_a_version_deleted_on_the_way()


def test_an_aborted_request_leaves_what_came_back_to_the_next() -> None:
    engine = engine_that_forgot(("acme", LONG, None))
    engine.add("neighbour", tenant_id="other", max_tokens=60)
    engine.step(0.01)
    engine.add("gone", prompt_ids=LONG)
    while sum(restored(engine)) < 4:
        engine.step(0.01)
    engine.core.abort("gone")
    long = engine.add("long", prompt_ids=LONG)
    engine.run()
    assert sum(restored(engine)) == 10
    assert engine.tokens("long") == expected(long, 5)


def test_kv_that_was_not_finite_is_not_found_on_the_host() -> None:
    engine = engine_that_forgot(("acme", LONG, None), most_restored_blocks=10)
    engine.runner.fault = lambda plan: Fault(poisoned=frozenset({0}))
    engine.add("spoilt", prompt_ids=LONG, max_tokens=3)
    engine.step(0.01)
    engine.runner.fault = lambda plan: Fault()
    engine.run()
    assert engine.error("spoilt") == "internal_error"
    engine.runner.plans.clear()
    long = engine.add("long", prompt_ids=LONG)
    engine.run()
    assert sum(restored(engine)) == 0
    assert engine.tokens("long") == expected(long, 5)


@pytest.mark.parametrize("at", ["submit", "collect"])
def test_a_step_that_fails_beside_its_copies(at: str) -> None:
    engine = engine_that_forgot(("acme", LONG, None), most_restored_blocks=10)
    engine.runner.fault = lambda plan: Fault(at)
    engine.add("first", prompt_ids=LONG)
    engine.step(0.01)
    engine.runner.fault = lambda plan: Fault()
    engine.run()
    long = engine.add("long", prompt_ids=LONG)
    engine.run()
    assert engine.tokens("long") == expected(long, 5)


def test_a_prefix_with_a_gap_that_is_dropped_takes_nothing_of_others() -> None:
    """The head of a prefix is in host memory, the tail in the pool, and the request ends before the head has come."""
    blocks = SequenceBlocks(24, BlockNeeds(), num_host_blocks=48, most_restored=2)

    def begun(tenant: str) -> Sequence:
        request = EngineRequest(f"request of {tenant}", tenant, LONG, SamplingParams(max_tokens=4))
        return Sequence(request, 0.0, 0, [*LONG])

    first, second = begun("one"), begun("one")
    for seq, named in ((first, range(5)), (second, range(5, 10))):
        seq.block_ids = tuple(blocks.allocate(10))
        blocks.register_all((seq.block_ids[n], prefix_keys.extend_keys(seq)[n]) for n in named)
    blocks.drop(first)
    others = blocks.allocate(blocks.num_free)  # the head goes to host memory
    blocks.drop(second)
    blocks.take_copies()

    waits = begun("one")
    blocks.begin(waits, blocks.find(waits))
    assert not blocks.restore(waits, 0.0)
    assert GIVEN_BACK in waits.block_ids
    blocks.take_copies()
    blocks.drop(waits)

    assert blocks.num_used == len(others)
    free = blocks.allocate(blocks.num_free)
    assert sorted([*free, *others]) == [*range(24)]


@pytest.mark.parametrize("is_put_back", [False, True])
def test_a_line_in_the_background_pays_little_for_what_it_found(is_put_back: bool) -> None:
    """Whether the line begins beside another request, or one comes while its prefix is on its way."""
    engine = engine_that_forgot(("acme", LONG, None))
    engine.step(5.0)
    if not is_put_back:
        engine.add("neighbour", tenant_id="third", max_tokens=100)
        engine.step(0.01)
    line = engine.add("line", background=True, batch=True, prompt_ids=LONG, max_tokens=3)
    while is_put_back and sum(restored(engine)) < 4:
        engine.step(0.01)
        assert engine.core._scheduler.batch_lines.is_on
    if is_put_back:
        engine.add("neighbour", tenant_id="third", max_tokens=100)
    while not engine.tokens("line"):
        engine.step(0.01)
    charged = engine.core._scheduler.background.turns.of("acme")
    num_tokens = len(engine.tokens("line"))
    engine.run()
    found = cached(engine, line)
    assert 32 <= found < 160
    assert charged == pytest.approx(0.1 * found + (len(LONG) - found) + 2.0 * num_tokens)
