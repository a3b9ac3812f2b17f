"""States that the device's pool forgot come back from host memory with their blocks, and only for their owner."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest

from loraplex.engine.kv import prefix_keys
from loraplex.engine.kv.host_tier import HostTier
from loraplex.engine.kv.sequence_blocks import SequenceBlocks
from loraplex.engine.kv.sequence_states import SequenceStates
from loraplex.engine.types import BlockKey, EngineRequest, Sequence
from support.engine.core_engine import CoreEngine, adapter, expected
from support.engine.fake_runner import Fault
from support.simulator.histories import Summary, Violation, play

HISTORIES = range(60)
LONG = tuple(range(1, 162))
"""A prompt of ten blocks and a token."""


@functools.cache
def played() -> Summary:
    total = Summary()
    for seed in HISTORIES:
        total.add(play(seed, states=True, host=True))
    return total


def test_histories_with_states_in_host_memory_keep_every_promise() -> None:
    """Each row's state is the recurrence over its own sequence alone, wherever it was meanwhile."""
    total = played()
    assert min(total.states_restored, total.preemptions, total.out_of_memory, total.poisoned) > 0
    assert min(total.deletions, total.restarts, total.cut_prompts, total.endings["abort"]) > 0


def test_drafts_leave_no_trace_in_states_that_come_back() -> None:
    total = Summary()
    for seed in range(12):
        total.add(play(seed, states=True, host=True, drafts="right"))
    assert 0 < total.accepted <= total.drafted


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_two_thousand_histories_with_states_in_host_memory() -> None:
    for seed in range(2_000):
        play(seed, states=True, host=True)


def adapter_left_out_of_the_key(patch: pytest.MonkeyPatch) -> None:
    def without(key: BlockKey) -> BlockKey:
        return (key[0][0], None), bytes(32) + b"\xff"

    patch.setattr(prefix_keys, "of_state", without)


def begins_without_its_state(patch: pytest.MonkeyPatch) -> None:
    def begin_later(self: SequenceStates, seq: Sequence, number: int, state: int | None = None) -> None:
        seq.states = ((number, seq.states[-1][1]),)

    patch.setattr(SequenceStates, "begin_later", begin_later)


def state_of_a_shorter_prefix(patch: pytest.MonkeyPatch) -> None:
    bring = SequenceBlocks._bring_state

    def other(self: SequenceBlocks, seq: Sequence, key: BlockKey, number: int) -> Any:
        assert self.host is not None
        found = next((one for one in seq.block_keys if prefix_keys.of_state(one) in self.host), key)
        return bring(self, seq, found, number)

    patch.setattr(SequenceBlocks, "_bring_state", other)


def only_the_first_part(patch: pytest.MonkeyPatch) -> None:
    take = SequenceBlocks.take_copies
    patch.setattr(SequenceBlocks, "take_copies", lambda self: tuple(c for c in take(self) if not c.part))


def copied_behind_what_reads_it(patch: pytest.MonkeyPatch) -> None:
    take = SequenceBlocks.take_copies
    patch.setattr(
        SequenceBlocks, "take_copies", lambda self: tuple(sorted(take(self), key=lambda one: one.to_host))
    )


def blocks_kept_beyond_the_state(patch: pytest.MonkeyPatch) -> None:
    stop = SequenceBlocks.stop_restoring

    def keeps(self: SequenceBlocks, seq: Sequence) -> None:
        count = len(seq.block_ids)
        held = seq.block_ids[: [*seq.block_ids, -1].index(-1)]
        stop(self, seq)
        if count == len(held) > len(seq.block_ids):
            seq.num_computed = count * 16

    patch.setattr(SequenceBlocks, "stop_restoring", keeps)


def any_number_in_a_step(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SequenceBlocks, "_may_restore", lambda self, count: True)


def deleted_version_stays(patch: pytest.MonkeyPatch) -> None:
    erase = HostTier.erase

    def blocks_alone(self: HostTier, digest: str) -> None:
        kept = {key: slots for key, slots in self._slots.items() if prefix_keys.is_of_state(key)}
        erase(self, digest)
        for key in kept.keys() - self._slots.keys():
            self._empty = [slot for slot in self._empty if slot not in kept[key]]
            self._slots[key] = kept[key]
            self.order.add(key)
            self._taken[key[0][0]] += len(kept[key])
            self._of_tenant.setdefault(key[0][0], OrderedDict())[key] = None
        self._sum_weights()

    patch.setattr(HostTier, "erase", blocks_alone)


BUGS: tuple[Callable[[pytest.MonkeyPatch], None], ...] = (
    adapter_left_out_of_the_key, begins_without_its_state, state_of_a_shorter_prefix, only_the_first_part,
    copied_behind_what_reads_it, blocks_kept_beyond_the_state, any_number_in_a_step,
)  # fmt: skip


@pytest.mark.parametrize("plant", BUGS)
def test_planted_bug_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(Violation):
        for seed in range(100):
            play(seed, states=True, host=True)


def engine_that_forgot(*requests: tuple[str, tuple[int, ...], Any], **config: Any) -> CoreEngine:
    """An engine with these prompts and their states in host memory, and nothing of them on the device."""
    sizes: dict[str, Any] = {
        "num_blocks": 24, "num_states": 4, "num_windows": 2, "num_host_blocks": 200, "state_slots": 3,
        "most_restored_blocks": 2,
    }  # fmt: skip
    engine = CoreEngine(**(sizes | config))
    for number, (tenant, prompt, ref) in enumerate(requests):
        engine.add(f"first {number}", ref, tenant_id=tenant, prompt_ids=prompt, max_tokens=1)
        engine.run()
    for number in range(3):
        prompt = tuple(range(400 * number + 180, 400 * number + 180 + 16 * 20))
        engine.add(f"other {number}", tenant_id="other", prompt_ids=prompt, max_tokens=1)
        engine.run()
    engine.runner.keep_plans = True
    return engine


def restored(engine: CoreEngine) -> list[tuple[int, int]]:
    """Blocks, and parts of states, that came back in each step."""
    back = [[one.part is not None for one in plan.copies if not one.to_host] for plan in engine.runner.plans]
    return [(parts.count(False), parts.count(True)) for parts in back]


def cached(engine: CoreEngine, request: EngineRequest) -> int:
    usage = engine.end(request.request_id).usage
    assert usage is not None
    return usage.cached_tokens


@pytest.mark.parametrize("lookahead", [0, 1])
def test_others_pass_a_request_whose_state_is_on_its_way(lookahead: int) -> None:
    """Two blocks come in a step, and a state of three alone."""
    engine = engine_that_forgot(("acme", LONG, None), lookahead=lookahead)
    neighbour = engine.add("neighbour", tenant_id="other", max_tokens=40)
    while len(engine.tokens("neighbour")) < 4:
        engine.step(0.01)
    engine.runner.plans.clear()
    long = engine.add("long", prompt_ids=LONG)
    engine.run()
    assert restored(engine)[:6] == [(2, 0)] * 5 + [(0, 3)]
    rows = [{row.request_id for row in plan.scheduled} for plan in engine.runner.plans]
    assert all("neighbour" in ids and "long" not in ids for ids in rows[:5])
    assert "long" in rows[5]
    assert engine.tokens("neighbour") == expected(neighbour, 40)
    assert engine.tokens("long") == expected(long, 5)
    assert cached(engine, long) == 160
    counts = engine.core.stats().kv_host
    assert (counts.restored, counts.states_restored) == (10, 1)
    assert counts.restore_s == pytest.approx(0.05)  # five steps


@pytest.mark.parametrize("kept", ["blocks", "states"])
def test_one_without_the_other_is_computed(kept: str) -> None:
    engine = engine_that_forgot(("acme", LONG, None))
    host = engine.core._scheduler.blocks.host
    assert host is not None
    keys = host.keys_of_tenant("acme")
    host.disown([key for key in keys if prefix_keys.is_of_state(key) == (kept == "blocks")])
    long = engine.add("long", prompt_ids=LONG)
    engine.run()
    assert sum(map(sum, restored(engine))) == 0
    assert engine.tokens("long") == expected(long, 5)
    assert cached(engine, long) == 0


def test_a_state_that_leaves_while_its_blocks_come_back() -> None:
    """The request goes on behind the longest prefix that has both: that of an earlier, shorter prompt."""
    engine = engine_that_forgot(("acme", LONG[:81], None), ("acme", LONG, None), most_restored_blocks=4)
    long = engine.add("long", prompt_ids=LONG)
    engine.step(0.01)
    engine.step(0.01)
    host = engine.core._scheduler.blocks.host
    assert host is not None
    (*_, last) = [key for key in host.keys_of_tenant("acme") if prefix_keys.is_of_state(key)]
    host.disown([last])
    engine.run()
    assert engine.tokens("long") == expected(long, 5)
    assert cached(engine, long) == 80


def test_blocks_here_and_a_state_there_are_one_hit() -> None:
    """Plenty of blocks, few states."""
    engine = engine_that_forgot(("acme", LONG, None), num_blocks=300)
    long = engine.add("long", prompt_ids=LONG)
    engine.run()
    assert [each for each in restored(engine) if sum(each)] == [(0, 3)]
    assert cached(engine, long) == 160
    assert engine.tokens("long") == expected(long, 5)


def test_a_state_here_and_blocks_there_are_one_hit() -> None:
    engine = engine_that_forgot(("acme", LONG, None), num_states=24, num_windows=2, most_restored_blocks=10)
    long = engine.add("long", prompt_ids=LONG)
    engine.run()
    assert [each for each in restored(engine) if sum(each)] == [(10, 0)]
    assert cached(engine, long) == 160
    assert engine.tokens("long") == expected(long, 5)


@pytest.mark.parametrize(("most", "found"), [(12, 0), (13, 160)])
def test_a_line_brings_no_blocks_without_their_state(most: int, found: int) -> None:
    """Ten blocks and a state of three come in one step, or none of them."""
    engine = engine_that_forgot(("acme", LONG, None), most_restored_blocks=most, num_blocks=60)
    engine.add("neighbour", tenant_id="other", max_tokens=60)
    engine.step(0.01)
    line = engine.add("line", prompt_ids=LONG, background=True, batch=True)
    engine.run()
    assert [each for each in restored(engine) if sum(each)] == ([(10, 3)] if found else [])
    assert cached(engine, line) == found
    assert engine.tokens("line") == expected(line, 5)


@pytest.mark.parametrize("ref", [None, adapter(1)], ids=["base", "adapter"])
def test_nothing_of_a_deleted_tenant_is_found(ref: Any) -> None:
    engine = engine_that_forgot(("acme", LONG, ref), ("kept", LONG, None))
    engine.core.forget_tenant("acme")
    for tenant, own, found in (("acme", ref, 0), ("kept", None, 160)):
        again = engine.add(tenant, own, tenant_id=tenant, prompt_ids=LONG)
        engine.run()
        assert cached(engine, again) == found
        assert engine.tokens(tenant) == expected(again, 5)


def answer_of_a_version_deleted_on_the_way() -> tuple[CoreEngine, EngineRequest]:
    """All blocks have come back, and the state has not, when the version of the request is deleted."""
    ref = adapter(1)
    engine = engine_that_forgot(("acme", LONG, ref), most_restored_blocks=10)
    engine.add("neighbour", tenant_id="other", max_tokens=60)
    engine.step(0.01)
    long = engine.add("long", ref, prompt_ids=LONG)
    while sum(blocks for blocks, _ in restored(engine)) < 10:
        engine.step(0.01)
    engine.core.drop(ref.digest)
    engine.runner.host.erased(ref.digest)
    engine.run()
    return engine, long


def test_a_version_that_is_deleted_before_its_state_comes_back() -> None:
    engine, long = answer_of_a_version_deleted_on_the_way()
    assert sum(parts for _, parts in restored(engine)) == 0
    assert cached(engine, long) == 0
    assert engine.tokens("long") == expected(long, 5)


def test_a_state_of_a_deleted_version_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    deleted_version_stays(monkeypatch)
    with pytest.raises(AssertionError, match="comes back after its version was deleted"):
        answer_of_a_version_deleted_on_the_way()


def test_a_state_that_was_not_finite_is_not_found_on_the_host() -> None:
    engine = engine_that_forgot(("acme", LONG, None), most_restored_blocks=20)
    engine.runner.fault = lambda plan: Fault(poisoned=frozenset({0}))
    engine.add("spoilt", prompt_ids=LONG, max_tokens=3)
    engine.step(0.01)
    engine.runner.fault = lambda plan: Fault()
    engine.run()
    assert engine.error("spoilt") == "internal_error"
    engine.runner.plans.clear()
    long = engine.add("long", prompt_ids=LONG)
    engine.run()
    assert sum(map(sum, restored(engine))) == 0
    assert engine.tokens("long") == expected(long, 5)


def test_a_tenants_states_count_towards_its_share() -> None:
    """A tenant has half of 40 slots: with states of eight at most two."""
    engine = engine_that_forgot(
        *(("acme", (number, *LONG), None) for number in range(300, 306)), num_host_blocks=40, state_slots=8
    )
    host = engine.core._scheduler.blocks.host
    assert host is not None
    keys = host.keys_of_tenant("acme")
    taken = sum(8 if prefix_keys.is_of_state(key) else 1 for key in keys)
    assert taken <= 20
    assert 1 <= sum(map(prefix_keys.is_of_state, keys)) <= 2
    stats = engine.core.stats()
    assert stats.num_kv_host_blocks_used == sum(map(host.size, [*host._slots])) <= 40
    assert stats.kv_host.states_written > stats.kv_host.states_evicted > 0
