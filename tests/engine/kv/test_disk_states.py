"""States on a disk behind host memory: random histories, and prefixes that outlive an engine with their very bits."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.engine.kv import disk_tier, prefix_keys
from loraplex.engine.kv.cache import block_bytes
from loraplex.engine.kv.host_blocks import HostBlocks
from loraplex.engine.kv.states import slot_bytes, state_bytes
from loraplex.engine.types import BlockCopy, BlockKey
from support.adapters.tiny_adapters import ADAPTERS, save_adapters
from support.engine.core_engine import CoreEngine, adapter, expected
from support.engine.fake_runner import Fault
from support.engine.same_bits import Asked, Question
from support.fake_block_disk import BlockDisk, FakeBlockStore
from support.fake_host_memory import BLOCK_BYTES
from support.models.checkpoints import FAMILIES, VOCAB, save_tiny
from support.models.loading import plan_model
from support.simulator.histories import Summary, Violation, play

pytestmark = pytest.mark.usefixtures("one_torch_thread")
HISTORIES = (*range(40), 3018)
"""In the last one a line of a batch loses its adapter, which was deleted, and has a state."""
LONG = tuple(range(1, 162))
"""A prompt of ten blocks and a token."""


@functools.cache
def played() -> Summary:
    total = Summary()
    for seed in HISTORIES:
        total.add(play(seed, states=True, disk=True))
    return total


def test_histories_with_states_on_a_disk_keep_every_promise() -> None:
    total = played()
    assert min(total.from_disk, total.states_restored, total.restarts, total.deletions, total.poisoned) > 0
    assert min(total.preemptions, total.out_of_memory, total.late_reads) > 0


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_a_thousand_histories_with_states_on_a_disk() -> None:
    for seed in range(1_000):
        play(seed, states=True, disk=True)


def parts_of_two_states_mixed(patch: pytest.MonkeyPatch) -> None:
    def first_of_all(name: BlockKey, part: int) -> BlockKey:
        return name[0], (bytes(33) if part else name[1]) + part.to_bytes(4, "little")

    patch.setattr(prefix_keys, "part_of_state", first_of_all)


def key_without_digest(patch: pytest.MonkeyPatch) -> None:
    def name(key: BlockKey) -> object:
        return (key[0][0], key[1][32:]) if len(key[1]) > 32 else key

    patch.setattr(FakeBlockStore, "name", staticmethod(name))


@pytest.mark.parametrize("plant", [parts_of_two_states_mixed, key_without_digest])
def test_planted_bug_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(Violation):
        for seed in range(200):
            play(seed, states=True, disk=True)


def engine_on(disk: BlockDisk) -> CoreEngine:
    disk.store.p_lost = disk.store.p_refused = 0.0
    return CoreEngine(
        num_states=6, num_windows=2, num_host_blocks=200, state_slots=3, most_restored_blocks=20, disk=disk
    )


def cached_after_a_restart(disk: BlockDisk) -> int:
    """Tokens of `LONG` on an adapter that a new engine finds."""
    engine = engine_on(disk)
    long = engine.add("long", adapter(1), prompt_ids=LONG)
    disk.settle()
    engine.run()
    assert engine.tokens("long") == expected(long, 5)
    usage = engine.end("long").usage
    assert usage is not None
    return usage.cached_tokens


@pytest.mark.parametrize(("erased", "found"), [("", 160), ("version", 0), ("tenant", 0), ("part", 0)])
def test_what_is_erased_is_not_found_after_a_restart(erased: str, found: int) -> None:
    disk = BlockDisk(random.Random(1))
    engine = engine_on(disk)
    for name in "ab":  # what a second request finds goes to the disk
        engine.add(name, adapter(1), prompt_ids=LONG, max_tokens=1)
        engine.run()
    disk.settle()
    parts = [key for key, _ in disk.store._blocks.values() if len(key[1]) > 32]
    assert len(parts) == 3
    if erased == "version":
        engine.core.drop(adapter(1).digest)
    elif erased == "tenant":
        engine.core.forget_tenant("acme")
    elif erased == "part":
        disk.store.remove(parts[2:])
    disk.settle()
    assert {key[0] for key, _ in disk.store._blocks.values()} == (
        set() if erased in ("version", "tenant") else {("acme", adapter(1).digest)}
    )
    assert cached_after_a_restart(disk) == found


def test_a_damaged_part_of_a_state_is_computed() -> None:
    disk = BlockDisk(random.Random(1))
    engine = engine_on(disk)
    for name in "ab":
        engine.add(name, adapter(1), prompt_ids=LONG, max_tokens=1)
        engine.run()
    disk.settle()
    read = disk.store.read
    disk.store.read = lambda key: None if key[1][33:34] == b"\1" else read(key)  # type: ignore[method-assign]
    assert cached_after_a_restart(disk) == 0


def state_parts(disk: BlockDisk) -> list[int]:
    """The numbers of the parts of states on the disk."""
    return sorted(key[1][33] for key, _ in disk.store._blocks.values() if len(key[1]) > 32)


def spoil(engine: CoreEngine, name: str) -> None:
    """A request on `LONG` finds its prefix, and ends since its numbers are not finite."""
    engine.runner.fault = lambda plan: Fault(poisoned=frozenset({0}))
    engine.add(name, adapter(1), prompt_ids=LONG, max_tokens=3)
    engine.step(0.01)
    engine.runner.fault = lambda plan: Fault()
    engine.run()
    assert engine.error(name) == "adapter_not_finite"


@pytest.mark.parametrize("is_written", [True, False])
def test_no_part_of_a_spoilt_state_meets_those_of_the_next(is_written: bool) -> None:
    disk = BlockDisk(random.Random(1))
    engine = engine_on(disk)
    for name in "ab":
        engine.add(name, adapter(1), prompt_ids=LONG, max_tokens=1)
        engine.run()
    if is_written:
        disk.settle()
        assert state_parts(disk) == [0, 1, 2]
    spoil(engine, "spoilt")
    disk.settle()
    assert state_parts(disk) == ([1, 2] if is_written else [])
    written: list[int] = []
    write = disk.store.write

    def record(key: BlockKey, payload: memoryview) -> bool:
        written.extend(key[1][33:34])
        return write(key, payload)

    disk.store.write = record  # type: ignore[method-assign]
    for name in "cd":
        engine.add(name, adapter(1), prompt_ids=LONG, max_tokens=1)
        engine.run()
    disk.settle()
    assert written == [0, 1, 2]
    assert cached_after_a_restart(disk) == 160


def test_the_first_part_that_is_nowhere_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state may have hundreds of parts, and a prefix thousands of blocks."""
    disk = BlockDisk(random.Random(1))
    engine = engine_on(disk)
    for name in "ab":
        engine.add(name, adapter(1), prompt_ids=LONG, max_tokens=1)
        engine.run()
    disk.settle()
    keys = [key for key, _ in disk.store._blocks.values()]
    disk.store.remove([key for key in keys if len(key[1]) > 32])
    states, host = engine.core._scheduler.blocks.states, engine.core._scheduler.blocks.host
    assert states is not None
    assert host is not None
    states.disown(keys)
    host.disown(map(prefix_keys.of_state, keys))
    named: list[int] = []
    part_of_state = prefix_keys.part_of_state

    def counted(name: BlockKey, part: int) -> BlockKey:
        named.append(part)
        return part_of_state(name, part)

    monkeypatch.setattr(prefix_keys, "part_of_state", counted)
    engine.add("blocks here", adapter(1), prompt_ids=LONG)
    assert named == [0] * 20  # of what was read, and of what the disk has
    named.clear()
    engine_on(disk).add("blocks on the disk", adapter(1), prompt_ids=LONG)
    assert named == [0] * 10


def waiting_parts(disk: BlockDisk, link: bytes, count: int) -> int:
    """How many of the parts of a new state the disk takes."""
    name = prefix_keys.of_state((("acme", None), link * 32))
    return len(disk.tier.reserve_state([prefix_keys.part_of_state(name, part) for part in range(count)]))


def test_a_state_goes_to_the_disk_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_tier, "WRITE_BYTES", 4 * BLOCK_BYTES)
    disk = BlockDisk(random.Random(1))
    engine_on(disk)
    assert disk.tier.takes_more(9)
    assert waiting_parts(disk, b"a", 3) == 3
    assert not disk.tier.takes_more(3)
    assert waiting_parts(disk, b"b", 3) == 0
    assert disk.tier.num_not_asked == 6
    assert disk.tier.reserve((("acme", None), bytes(32)))  # a block has room


def test_a_state_larger_than_what_may_wait_goes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_tier, "WRITE_BYTES", 4 * BLOCK_BYTES)
    disk = BlockDisk(random.Random(1))
    engine_on(disk)
    assert waiting_parts(disk, b"a", 9) == 9
    assert waiting_parts(disk, b"b", 1) == 0


def test_a_request_asks_for_a_state_and_its_blocks_or_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks without the state behind them are of no use: nobody is held for them."""
    disk = BlockDisk(random.Random(1))
    engine = engine_on(disk)
    for name in "abcd":
        engine.add(name, adapter(1), prompt_ids=LONG if name in "ab" else LONG[::-1], max_tokens=1)
        engine.run()
    disk.settle()
    assert len(state_parts(disk)) == 6
    monkeypatch.setattr(
        disk_tier, "READ_BYTES", 2 * 20 * BLOCK_BYTES
    )  # a prefix of ten blocks and three parts
    again = engine_on(disk)
    again.add("first", adapter(1), prompt_ids=LONG)
    again.add("second", adapter(1), prompt_ids=LONG[::-1])
    assert [*disk.tier._asked] == ["first"]
    disk.settle()
    again.run()
    usages = [again.end(name).usage for name in ("first", "second")]
    assert [usage.cached_tokens for usage in usages if usage is not None] == [160, 0]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    family = FAMILIES["qwen3_5-2"] | {"max_position_embeddings": 2048}
    return save_tiny(tmp_path_factory.mktemp("disk") / "base", family)


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    chosen = {name: ADAPTERS[name] for name in ("all", "some")}
    return save_adapters(base, tmp_path_factory.mktemp("adapters"), chosen)


@pytest.fixture
def make_asked(base: Path, adapters: dict[str, Path], tmp_path: Path) -> Iterator[Callable[..., Asked]]:
    """An engine on a disk. One that is made closes those before it."""
    made: list[Asked] = []
    numbers = iter(range(9))

    def make(disk: bool = True, **more: Any) -> Asked:
        caches = plan_model(base).shape.caches
        one, state = block_bytes(caches, torch.float32), state_bytes(caches)
        while made:
            made.pop().close()
        settings: dict[str, Any] = {
            "kv_cache_memory": 64 * one + 4 * slot_bytes(caches) + 8 * state, "state_cache": 8 * state,
        }  # fmt: skip
        asked = Asked(
            base, tmp_path / str(next(numbers)), adapters, kernels="numba", dtype="float32",
            kv_host_memory=2000 * one, adapter_memory=8 << 20, adapter_cpu_memory=8 << 20,
            max_num_seqs=4, num_threads=1, max_model_len=240, kv_disk_bytes=8000 * one,
            kv_disk_dir=str(tmp_path / "disk") if disk else None, **(settings | more),
        )  # fmt: skip
        made.append(asked)
        return asked

    yield make
    while made:
        made.pop().close()


@pytest.mark.parametrize("lookahead", [0, 1])
def test_prefixes_with_states_have_the_same_bits_after_a_restart(
    make_asked: Callable[..., Asked], lookahead: int
) -> None:
    rng = random.Random(lookahead)
    asked = [
        Question(tuple(rng.randrange(3, VOCAB) for _ in range(130)), name, {"max_tokens": 4})
        for name in (None, "all", "some", None)
    ]
    lone = make_asked(disk=False)
    expected = lone.each_alone(asked)
    first = make_asked(lookahead=lookahead)
    for number, one in enumerate(asked):
        for again in "ab":  # what a second request finds goes to the disk
            assert first.alone(f"{number}{again}", one) == expected[one]
    second = make_asked(lookahead=lookahead)
    before = second.engine.core.stats().prefix_cache_hits
    for number, one in enumerate(asked):
        assert second.alone(str(number), one) == expected[one]
    assert second.engine.core.stats().prefix_cache_hits - before == 128 * len(asked)
    assert second.engine.core.stats().kv_disk.restored > 8 * len(asked)
    assert second.engine.core.stats().kv_host.states_restored == 0


def test_another_version_with_the_same_tokens_finds_no_state(make_asked: Callable[..., Asked]) -> None:
    rng = random.Random(5)
    prompt = tuple(rng.randrange(3, VOCAB) for _ in range(130))
    first = make_asked()
    for again in "ab":
        first.alone(again, Question(prompt, "all", {"max_tokens": 4}))
    second = make_asked()
    for name in (None, "some"):
        second.alone(str(name), Question(prompt, name, {"max_tokens": 4}))
    assert second.engine.core.stats().kv_disk.restored == 0


def test_the_last_part_of_a_state_brings_nobody_elses_bytes(
    make_asked: Callable[..., Asked], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state rarely fills its last slot; what a block left there does not go to the disk under another's key."""
    ends: list[bytes] = []
    slots: list[bytes] = []
    copy = HostBlocks.copy

    def dirty(blocks: HostBlocks, copies: tuple[BlockCopy, ...]) -> None:
        for one in copies:
            if one.to_host:
                blocks._memory[one.slot].fill_(7)
        last, size = blocks.state_slots - 1, blocks._states.shape[1] % blocks._slot_bytes
        keep = blocks.keep
        assert keep is not None

        def look(key: BlockKey, payload: memoryview) -> None:
            if key == prefix_keys.part_of_state(prefix_keys.state_of_part(key), last):
                ends.append(bytes(payload[size:]))
            keep(key, payload)

        blocks.keep = look
        copy(blocks, copies)
        blocks.keep = keep
        slots.extend(bytes(blocks._memory[one.slot, size:].numpy()) for one in copies if one.part == last)

    monkeypatch.setattr(HostBlocks, "copy", dirty)
    asked = make_asked()
    for again in "ab":
        asked.alone(again, Question(tuple(range(3, 100)), None, {"max_tokens": 1}))
    assert ends
    assert all(ends)
    assert not any(map(any, ends))
    # A copy that a GPU has yet to do may use the slot.
    assert {byte for end in slots for byte in end} == {7}
