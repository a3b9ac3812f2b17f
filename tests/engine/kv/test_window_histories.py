"""Blocks of several groups of layers, some with windows, behind the pool in random histories, and planted bugs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from loraplex.engine.kv import prefix_keys
from loraplex.engine.kv.layers import PrefixNeeds
from loraplex.engine.kv.sequence_blocks import SequenceBlocks
from loraplex.engine.types import BlockKey
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
    """Of a group with a window the first block that comes is that of the index before."""
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
