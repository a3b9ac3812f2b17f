"""A disk behind host memory in random histories: it loses, delays, damages and refuses blocks, and outlives engines."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from loraplex.engine.kv import prefix_keys
from loraplex.engine.kv.disk_tier import DiskTier
from loraplex.engine.types import BlockKey, Namespace
from support.fake_block_disk import FakeBlockStore
from support.simulator.histories import Summary, Violation, play

HISTORIES = range(40)


@functools.cache
def played() -> Summary:
    total = Summary()
    for seed in HISTORIES:
        total.add(play(seed, disk=True))
    return total


def test_histories_with_a_disk_keep_every_promise() -> None:
    """Nothing comes back for another owner or behind an erasure, and every request ends."""
    total = played()
    assert min(total.from_disk, total.late_reads, total.restarts, total.deletions, total.poisoned) > 0
    assert total.restored > 0


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_two_thousand_histories_with_a_disk() -> None:
    for seed in range(2_000):
        play(seed, disk=True)


def deleted_version_stays_on_the_disk(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FakeBlockStore, "erase_version", lambda self, tenant_id, digest: None)


def key_without_digest(patch: pytest.MonkeyPatch) -> None:
    root = prefix_keys.root_link

    def of_tenant(space: Namespace) -> bytes:
        return root((space[0], None))

    def name(key: BlockKey) -> object:
        return key[0][0], key[1]

    patch.setattr(prefix_keys, "root_link", of_tenant)
    patch.setattr(FakeBlockStore, "name", staticmethod(name))


def spoilt_block_stays_on_the_disk(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DiskTier, "remove", lambda self, keys: None)


BUGS: list[tuple[Callable[[pytest.MonkeyPatch], None], int, str]] = [
    (deleted_version_stays_on_the_disk, 200, "comes back after its version was deleted"),
    (key_without_digest, 0, "wrong (tokens|embedding|log prob)|instead of|reads KV that"),
    (spoilt_block_stays_on_the_disk, 230, "known to be spoilt|without a cause|failed|internal_error"),
]
"""Where their search begins, and what is complained of. An owner that is erased between read and fill is in
test_disk_tier: a history takes too long to come to it."""


@pytest.mark.parametrize(("plant", "first", "complaint"), BUGS)
def test_planted_bug_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None], first: int, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(Violation, match=complaint):
        for seed in range(first, first + 100):
            play(seed, disk=True)
