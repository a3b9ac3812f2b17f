"""Blocks of several groups of layers, some with windows, behind the pool in random histories, and planted bugs."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest

from loraplex.engine.kv import prefix_keys
from loraplex.engine.kv.disk_tier import READ_BYTES, DiskTier
from loraplex.engine.kv.layers import BlockNeeds, PrefixNeeds
from loraplex.engine.kv.sequence_blocks import SequenceBlocks
from loraplex.engine.types import BlockKey, EngineRequest, SamplingParams, Sequence
from support.fake_block_disk import FakeBlockStore
from support.simulator.histories import Summary, Violation, play

HISTORIES = range(40)
KINDS: dict[str, dict[str, bool]] = {
    "host": {"host": True},
    "disk": {"disk": True},
    "states": {"host": True, "states": True},
    "states on a disk": {"disk": True, "states": True},
}


@functools.cache
def played(kind: str) -> Summary:
    total = Summary()
    for seed in HISTORIES:
        total.add(play(seed, windows=True, **KINDS[kind]))
    return total


@pytest.mark.parametrize("kind", KINDS)
def test_histories_with_windows_keep_every_promise(kind: str) -> None:
    """Each row reads what its layers see of its own sequence, wherever that was meanwhile."""
    total = played(kind)
    assert min(total.restored, total.preemptions, total.out_of_memory, total.poisoned, total.deletions) > 0
    assert "disk" not in kind or total.from_disk > 0
    assert "states" not in kind or total.states_restored > 0


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_histories_with_windows(kind: str) -> None:
    for seed in range(1_000):
        play(seed, windows=True, **KINDS[kind])


def at_the_wrong_index(patch: pytest.MonkeyPatch) -> None:
    """The first block of a group with a window that comes is that of the index before."""
    bring = SequenceBlocks._bring

    def shifted(self: SequenceBlocks, seq: Any, keys: list[BlockKey]) -> Any:
        of_group = prefix_keys.of_group
        windows = dict(self._windows)

        def before(key: BlockKey, group: int) -> BlockKey:
            index = keys.index(key) if key in keys else 0
            return of_group(keys[index - 1] if group in windows and index else key, group)

        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(prefix_keys, "of_group", before)
            return bring(self, seq, keys)

    patch.setattr(SequenceBlocks, "_bring", shifted)


def left_out_of_what_a_prefix_needs(patch: pytest.MonkeyPatch) -> None:
    first = PrefixNeeds.first

    def fewer(self: PrefixNeeds, group: int, size: int) -> int:
        known = first(self, group, size)
        return known + 1 if group < len(self.windows) and 0 < known < size else known

    patch.setattr(PrefixNeeds, "first", fewer)


def group_left_out_of_the_key(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prefix_keys, "of_group", lambda key, group: key)


@pytest.mark.parametrize(
    "plant", [at_the_wrong_index, left_out_of_what_a_prefix_needs, group_left_out_of_the_key]
)
def test_planted_bug_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(Violation):
        for seed in range(100):
            play(seed, windows=True, host=True)


def test_a_prefix_that_is_too_large_to_be_read_at_once_is_read_in_part() -> None:
    """Layers that keep all positions and layers with a window: the whole prefix has more blocks on the disk than one
    tenant may ask for."""
    store = FakeBlockStore(random.Random(0))
    store.p_refused = 0.0
    tier = DiskTier(store, READ_BYTES // 2 // 24, lambda: None, threads=False)
    blocks = SequenceBlocks(64, BlockNeeds((None, 64)), num_host_blocks=8, most_restored=4, disk=tier)
    request = EngineRequest("long", "one", tuple(range(1, 16 * 30 + 2)), SamplingParams(max_tokens=4))
    seq = Sequence(request, 0.0, 0, [*request.prompt_ids])
    keys = prefix_keys.extend_keys(seq)
    for key in keys:
        for group in range(2):
            assert store.write(prefix_keys.of_group(key, group), memoryview(b""))
    assert tier.most_asked == 24

    names, count = blocks.on_disk(seq)
    assert 0 < len(names) <= 24
    assert 8 <= count < 24
    needed = PrefixNeeds((None, 64)).entries(count)
    assert {*names} == {prefix_keys.of_group(keys[index], group) for index, group in needed}
