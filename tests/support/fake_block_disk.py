"""The disk behind the host memory of a random history: it loses, delays, damages and refuses blocks.

It outlives the engine. Threads there are none: the history reads and writes when it likes.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable

from loraplex.engine.kv.disk_store import DiskCounts
from loraplex.engine.kv.disk_tier import DiskTier
from loraplex.engine.types import BlockKey
from support.fake_host_memory import BLOCK_BYTES, FakeHostMemory


class FakeBlockStore:
    """Blocks in a dictionary, by what `name` leaves of their keys. `generations` counts the erasures of each version: a
    block that was copied before one may not come back behind it."""

    def __init__(self, rng: random.Random) -> None:
        self.counts = DiskCounts(capacity=1 << 30)
        self.generations: Counter[str | None] = Counter()
        self._rng = rng
        self.p_lost, self.p_refused = rng.choice((0.0, 0.05, 0.3)), rng.choice((0.0, 0.1))
        self._blocks: dict[object, tuple[BlockKey, bytes]] = {}

    @staticmethod
    def name(key: BlockKey) -> object:
        return key

    def __contains__(self, key: BlockKey) -> bool:
        return self.name(key) in self._blocks

    def write(self, key: BlockKey, payload: memoryview) -> bool:
        if self._rng.random() < self.p_refused:
            return False
        self._blocks[self.name(key)] = key, bytes(payload)
        self.counts.written += 1
        return True

    def read(self, key: BlockKey) -> bytes | None:
        """A damaged block is found to be one, as a checksum would."""
        if self._rng.random() < self.p_lost:
            self.counts.damaged += self._blocks.pop(self.name(key), None) is not None
        _, payload = self._blocks.get(self.name(key), (None, None))
        self.counts.read += payload is not None
        return payload

    def remove(self, keys: Iterable[BlockKey]) -> None:
        for key in keys:
            self._blocks.pop(self.name(key), None)

    def erase_version(self, tenant_id: str | None, digest: str) -> None:
        self._erase(lambda key: key[0][1] == digest and tenant_id in (None, key[0][0]))

    def erase_tenant(self, tenant_id: str) -> None:
        self._erase(lambda key: key[0][0] == tenant_id)

    def _erase(self, is_gone: Callable[[BlockKey], bool]) -> None:
        self.remove([key for key, _ in self._blocks.values() if is_gone(key)])

    def sweep(self) -> None:
        pass

    def owners(self) -> set[tuple[str, str | None]]:
        return {key[0] for key, _ in self._blocks.values()}

    def close(self) -> None:
        pass


class BlockDisk:
    """The store, and the tier of the engine that lives now. It `hangs` for a while now and then."""

    def __init__(self, rng: random.Random) -> None:
        self.store = FakeBlockStore(rng)
        self._rng = rng
        self._hangs = False

    def open(self, host: FakeHostMemory, clock: Callable[[], float]) -> DiskTier:
        """The tier of a new engine, whose blocks in host memory go on to it."""
        self.tier = DiskTier(
            self.store, BLOCK_BYTES, lambda: None, clock=clock, least_blocks=1, threads=False
        )
        host.disk, host.keep = self.store.generations, self.tier.put
        return self.tier

    def turn(self) -> int:
        """Let the threads do a little, or nothing. Returns the blocks that were read."""
        if self._rng.random() < (0.2 if self._hangs else 0.005):
            self._hangs = not self._hangs
        if self._hangs:
            return 0
        for _ in range(self._rng.choice((0, 1, 3, 9))):
            self.tier.write_one()
        return sum(self.tier.read_one() for _ in range(self._rng.choice((0, 1, 1, 3, 9))))

    def settle(self) -> None:
        """Read and write all that waits."""
        while self.tier.read_one() or self.tier.write_one():
            pass
