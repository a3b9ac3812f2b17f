"""The tier behind host memory: which requests it holds, for how long, and what it does beside a disk that fails."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from loraplex.adapters.ref import AdapterRef
from loraplex.engine.core.waits import Waits
from loraplex.engine.kv import disk_tier
from loraplex.engine.kv.disk_tier import KEPT_S, MOST_WAIT_S, REST_S, DiskTier
from loraplex.engine.types import BlockKey, EngineRequest, Sequence
from support.engine.core_engine import CoreEngine, adapter, expected
from support.fake_block_disk import BlockDisk, FakeBlockStore
from support.fake_host_memory import BLOCK_BYTES

LONG = tuple(range(1, 162))
"""A prompt of ten blocks and a token."""


class Disk(BlockDisk):
    """One that neither loses nor refuses anything by itself."""

    def __init__(self) -> None:
        super().__init__(random.Random(1))
        self.store.p_lost = self.store.p_refused = 0.0


@pytest.fixture
def disk() -> Disk:
    return Disk()


def engine_on(disk: Disk, **config: Any) -> CoreEngine:
    sizes: dict[str, Any] = {"num_host_blocks": 100, "most_restored_blocks": 4}
    return CoreEngine(disk=disk, **(sizes | config))


def restarted(disk: Disk, ref: AdapterRef | None = None, tenant: str = "acme", **config: Any) -> CoreEngine:
    """An engine on a disk on which one before it has left the prompt LONG: two requests had it."""
    engine = engine_on(disk, most_restored_blocks=20)
    for name in ("first", "second"):
        engine.add(name, ref, tenant_id=tenant, prompt_ids=LONG, max_tokens=1)
        engine.run()
    disk.settle()
    assert disk.store.counts.written == 10
    return engine_on(disk, **config)


def run(engine: CoreEngine, disk: Disk) -> None:
    """Until nothing is left to do, with a disk that does all at once."""
    for _ in range(1000):
        if not engine.core.has_work:
            return
        disk.settle()
        engine.step(0.01)
    raise AssertionError("the core does not come to an end")


def cached(engine: CoreEngine, request: EngineRequest) -> int:
    usage = engine.end(request.request_id).usage
    assert usage is not None
    return usage.cached_tokens


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("ref", [None, adapter(1)], ids=["base", "adapter"])
def test_a_prefix_outlives_its_engine(disk: Disk, ref: AdapterRef | None, lookahead: int) -> None:
    engine = restarted(disk, ref, lookahead=lookahead)
    long = engine.add("long", ref, prompt_ids=LONG)
    late = engine.add("other", tenant_id="other", prompt_ids=(7, 8, 9))
    stats = engine.core.stats()
    assert (stats.num_waiting, stats.num_waiting_for_grammar) == (2, 0)
    engine.step(0.01)
    engine.step(0.01)
    assert engine.tokens("other")  # another passes the one that waits
    assert not engine.tokens("long")
    run(engine, disk)
    for request in (long, late):
        assert engine.tokens(request.request_id) == expected(request, 5)
    assert cached(engine, long) == 160
    assert engine.core.stats().kv_disk.restored == 10
    assert disk.tier._arrived == {}


def test_a_few_blocks_are_computed(disk: Disk) -> None:
    engine = restarted(disk)
    disk.tier._least_blocks = 11
    engine.add("long", prompt_ids=LONG)
    assert engine.core.stats().num_waiting == 1
    engine.run()
    assert engine.core.stats().kv_disk.restored == 0


@pytest.mark.parametrize(
    ("tenant", "ref"),
    [("acme", None), ("other", None), ("acme", adapter(2)), ("other", adapter(1, "other"))],
    ids=["base", "tenant on base", "version", "tenant on the same bytes"],
)
def test_nobody_else_finds_it(disk: Disk, tenant: str, ref: AdapterRef | None) -> None:
    engine = restarted(disk, adapter(1))
    foreign = engine.add("foreign", ref, tenant_id=tenant, prompt_ids=LONG)
    run(engine, disk)
    assert cached(engine, foreign) == 0
    assert engine.core.stats().kv_disk.restored == 0
    assert engine.tokens("foreign") == expected(foreign, 5)


@pytest.mark.parametrize("num_read", [0, 4, 10])
@pytest.mark.parametrize("what", ["version", "tenant"])
def test_an_owner_that_is_erased_while_its_blocks_are_read(disk: Disk, num_read: int, what: str) -> None:
    ref = adapter(1)
    engine = restarted(disk, ref)
    long = engine.add("long", ref, prompt_ids=LONG)
    for _ in range(num_read):
        disk.tier.read_one()
    if what == "version":
        engine.core.drop(ref.digest)
    else:
        engine.core.forget_tenant("acme")
    run(engine, disk)
    assert engine.core.stats().kv_disk.restored == 0
    assert cached(engine, long) == 0
    assert engine.tokens("long") == expected(long, 5)
    assert not disk.store.owners()


def test_a_version_that_is_erased_before_its_blocks_are_written(disk: Disk) -> None:
    ref, engine = adapter(1), engine_on(disk)
    for name in ("first", "second"):
        engine.add(name, ref, prompt_ids=LONG, max_tokens=1)
        engine.run()
    engine.core.drop(ref.digest)
    disk.settle()
    assert (disk.store.counts.written, disk.store.owners()) == (0, set())


def test_a_version_that_is_erased_while_a_block_is_written(disk: Disk) -> None:
    store, (first, *_) = disk.store, keys(1)
    tier = disk.open(engine_on(Disk()).runner.host, lambda: 0.0)
    write = store.write

    def erased_meanwhile(key: BlockKey, payload: memoryview) -> bool:
        tier.erase_version("d")
        return write(key, payload)

    store.write = erased_meanwhile  # type: ignore[method-assign]
    assert tier.reserve(first)
    tier.put(first, memoryview(bytes(2048)))
    tier.write_one()
    assert first not in tier


def test_a_disk_that_hangs_is_waited_for_no_longer_than_that(
    disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    engine = restarted(disk)
    long = engine.add("long", prompt_ids=LONG)
    disk.tier.read_one()
    assert engine.core.idle_s() == pytest.approx(MOST_WAIT_S)
    engine.step(MOST_WAIT_S - 0.01)
    assert not engine.tokens("long")
    engine.step(0.02)
    engine.run()
    assert engine.tokens("long") == expected(long, 5)
    assert cached(engine, long) == 16  # what was read in time
    stats = engine.core.stats()
    assert (stats.kv_disk.late, stats.num_kv_disks_off) == (1, 1)
    assert "--kv-disk: blocks were not read in time; it is left alone for 30 s" in caplog.text
    # Nobody waits for it now, and after a while it is tried again.
    engine.add("next", tenant_id="other", prompt_ids=LONG)
    assert disk.tier.next_timeout_s() is None
    engine.run()
    engine.now += REST_S
    assert engine.core.stats().num_kv_disks_off == 0


def test_blocks_that_made_room_meanwhile_are_no_fault_of_the_disk(disk: Disk) -> None:
    tier = tier_on(disk, lambda: 0.0)
    for number in range(4):
        own = [(("acme", str(number)), key[1]) for key in stored(disk, keys(4))]
        stored(disk, own)
        assert tier.ask(str(number), own, 1.0)
        disk.store.remove(own)
    disk.settle()
    assert tier.take_ended() == ["0", "1", "2", "3"]
    assert not tier.is_off


def test_a_slow_read_is_forgotten_after_a_while(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    tier = tier_on(disk, lambda: now[0])
    many, read = stored(disk, keys(8)), disk.store.read

    def stalled(key: BlockKey) -> bytes | None:
        now[0] += 5.0
        return read(key)

    monkeypatch.setattr(disk.store, "read", stalled)
    assert tier.ask("stalled", many, 3.0)
    tier.read_one()
    assert tier.take_ended() == ["stalled"]
    assert not tier.ask("next", many, 3.0)
    now[0] += REST_S
    assert tier.ask("later", many, 3.0)


def test_a_queue_is_no_slow_disk(disk: Disk) -> None:
    now = [0.0]
    tier = tier_on(disk, lambda: now[0])
    many = stored(disk, keys(100))
    assert tier.ask("long", many, 3.0)
    assert tier.ask("short", [*many[:4]], 0.3)
    for _ in range(3):
        now[0] += 0.15
        tier.read_one()
    assert tier.take_ended() == ["short"]
    assert (tier.num_late, tier.is_off) == (1, False)


def test_a_tenant_leaves_others_room_to_be_read(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_tier, "READ_BYTES", 40 * BLOCK_BYTES)
    now = [0.0]
    tier = tier_on(disk, lambda: now[0])
    assert tier.ask("all", stored(disk, keys(60)), 3.0)
    disk.settle()
    assert (tier.take_ended(), len(tier._arrived)) == (["all"], 20)
    assert not tier.ask("more", [(("acme", "e"), key[1]) for key in keys(9)], 3.0)
    other = [(("other", "d"), key[1]) for key in keys(20)]
    assert tier.ask("other", stored(disk, other), 3.0)
    now[0] += MOST_WAIT_S + KEPT_S  # they cannot begin: what was read for them goes
    for _ in range(2):
        tier.take_ended()
    assert not any((tier._arrived, tier._asked, tier._num_wanted))


def test_a_line_of_a_batch_does_not_wait_for_the_disk(disk: Disk) -> None:
    engine = restarted(disk)
    line = engine.add("line", prompt_ids=LONG, background=True, batch=True)
    assert disk.tier.next_timeout_s() is None
    engine.run()
    assert engine.tokens("line") == expected(line, 5)


def test_a_grammar_that_fails_while_the_prefix_arrives(disk: Disk) -> None:
    """Both are told in one step."""
    engine = engine_on(disk)
    tier = tier_on(disk, lambda: 0.0)
    many = stored(disk, keys(4))

    class Failing:
        """A grammar that fails at once."""

        def open(self, *_: str) -> bool:
            return False

        def take_built(self) -> list[tuple[str, str | None]]:
            return [("both", "no grammar")]

        def next_timeout_s(self) -> None: ...

        def close_request(self, _: str) -> None: ...

    blocks = engine.core._scheduler.blocks
    waits = Waits(Failing(), tier, blocks, None, 64)  # type: ignore[arg-type]
    request = replace(engine.add("both", prompt_ids=LONG), grammar="{}")
    seq = Sequence(request, 0.0, 1, list(LONG))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "on_disk", lambda _: (many, len(many)))
        assert waits.begin(seq)
    disk.settle()
    assert waits.take_ended() == [("both", "no grammar")]
    assert waits.take_ended() == []


def test_nobody_waits_longer_than_computing_takes(disk: Disk) -> None:
    tier = tier_on(disk, lambda: 0.0)
    many = stored(disk, keys(20))
    tier._read_s = 0.02
    assert not tier.ask("long", many, 0.3)
    assert tier.ask("short", many[:10], 0.3)
    assert tier.next_timeout_s() == pytest.approx(0.3)


def test_what_others_read_is_shared_and_given_back(disk: Disk) -> None:
    engine = restarted(disk)
    both = [engine.add(f"long {number}", prompt_ids=(*LONG, 300 + number)) for number in range(2)]
    gone = engine.add("gone", prompt_ids=(*LONG, 400))
    engine.core.abort("gone")
    run(engine, disk)
    assert engine.end(gone.request_id).finish_reason == "abort"
    for request in both:
        assert engine.tokens(request.request_id) == expected(request, 5)
        assert cached(engine, request) == 160
    assert disk.store.counts.read == 10
    assert not any((disk.tier._arrived, disk.tier._wanted, disk.tier._asked))


def test_a_held_request_has_its_deadline(disk: Disk) -> None:
    engine = restarted(disk)
    engine.add("long", prompt_ids=LONG, deadline=1.0)
    engine.step(1.1)
    assert engine.error("long") == "deadline_exceeded"
    assert disk.tier.next_timeout_s() is None


def test_an_answer_of_another_engine_goes_on_behind_a_prefix_of_the_disk(disk: Disk) -> None:
    engine = restarted(disk)
    whole = engine.add("whole", prompt_ids=LONG, tenant_id="other")
    run(engine, disk)
    begun = tuple(engine.tokens("whole")[:2])
    engine.add("resumed", prompt_ids=LONG, generated=begun)
    run(engine, disk)
    assert [*begun, *engine.tokens("resumed")] == expected(whole, 5)
    assert engine.core.stats().kv_disk.restored == 10


def test_a_disk_that_brings_nothing_is_left_alone(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    engine = restarted(disk)
    disk.store.p_lost = 1.0
    long = engine.add("long", prompt_ids=LONG)
    run(engine, disk)
    assert (cached(engine, long), engine.tokens("long")) == (0, expected(long, 5))
    assert disk.store.counts.damaged == 1  # no block behind a gap is read
    assert engine.core.stats().num_kv_disks_off == 0
    for digest in "de":
        others = [((("acme", digest)), key[1]) for key in keys(4)]
        for key in others:
            disk.store.write(key, memoryview(bytes(BLOCK_BYTES)))
        assert disk.tier.ask(digest, others, 1.0)
        disk.settle()
    assert engine.core.stats().num_kv_disks_off == 1
    assert "the last 3 blocks could not be read" in caplog.text


def test_a_writer_that_hangs_is_not_waited_for(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_tier, "WRITE_BYTES", 3 * 2048)
    engine = engine_on(disk)
    for number in range(4):
        prompt = tuple(range(200 * number, 200 * number + 97))
        for name in "ab":
            asked = engine.add(f"{number}{name}", prompt_ids=prompt)
            engine.run()
            assert engine.tokens(asked.request_id) == expected(asked, 5)
    assert disk.store.counts.written == 0
    assert engine.core.stats().kv_disk.refused > 0
    disk.settle()
    assert disk.store.counts.written == 3


def test_a_disk_that_refuses_is_left_alone(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    disk.store.p_refused = 1.0
    engine = engine_on(disk, most_restored_blocks=20)
    for name in "ab":
        asked = engine.add(name, prompt_ids=LONG)
        engine.run()
    disk.settle()
    assert engine.tokens(asked.request_id) == expected(asked, 5)
    assert "the last 3 blocks could not be written" in caplog.text
    assert engine.core.stats().num_kv_disks_off == 1
    assert not disk.tier.reserve(keys(1)[0])


class SlowStore(FakeBlockStore):
    """A store whose writes and reads take no time, and which is used by real threads."""

    def __init__(self) -> None:
        super().__init__(random.Random(1))
        self.p_lost = self.p_refused = 0.0
        self.is_closed = False
        self.num_sweeps = 0

    def sweep(self) -> None:
        self.num_sweeps += 1

    def close(self) -> None:
        self.is_closed = True


def test_the_threads_write_what_waits_and_read_it() -> None:
    store, woken = SlowStore(), list[int]()
    tier = DiskTier(store, 4, lambda: woken.append(1))
    for key in keys(8):
        assert tier.reserve(key)
        tier.put(key, memoryview(key[1]))
    tier.close()
    assert store.is_closed
    assert all(key in store for key in keys(8))
    store = SlowStore()
    tier = DiskTier(store, 4, lambda: woken.append(1))
    for key in keys(8):
        store.write(key, memoryview(key[1]))
    assert tier.ask("one", keys(8), 3.0)
    ended: list[str] = []
    while not ended:
        ended = tier.take_ended()
    assert [tier.payload(key) for key in keys(8)] == [key[1] for key in keys(8)]
    assert woken
    tier.close()


def test_what_was_erased_is_removed_before_the_end() -> None:
    """However soon the end comes: else it would be there when the next engine starts."""
    for _ in range(50):
        store = SlowStore()
        tier = DiskTier(store, 4, lambda: None)
        tier.erase_version("d")
        tier.close()
        assert (store.num_sweeps, store.is_closed) == (1, True)


def tier_on(disk: Disk, clock: Callable[[], float]) -> DiskTier:
    return disk.open(engine_on(Disk()).runner.host, clock)


def stored(disk: Disk, given: list[BlockKey]) -> list[BlockKey]:
    for key in given:
        disk.store.write(key, memoryview(bytes(BLOCK_BYTES)))
    return given


def keys(count: int) -> list[BlockKey]:
    return [(("acme", "d"), number.to_bytes(4, "little")) for number in range(count)]
