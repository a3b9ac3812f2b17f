"""The store of blocks that the tier on a disk is made of, as its two threads and the core's use it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from loraplex.engine.kv.disk_store import DiskCounts
from loraplex.engine.types import BlockKey


class BlockStore(Protocol):
    """Blocks on a disk, with an index in memory. The calls that say so are made by other threads than the core's."""

    counts: DiskCounts

    def __contains__(self, key: BlockKey) -> bool:
        """Look into the index alone."""
        ...

    def write(self, key: BlockKey, payload: memoryview) -> bool:
        """The writer's thread: keep a block whole, or not at all. False: refused, and counted."""
        ...

    def read(self, key: BlockKey) -> bytes | None:
        """The reader's thread: None where the block is missing, damaged or another one; it is removed then."""
        ...

    def remove(self, keys: Iterable[BlockKey]) -> None:
        """Find none of these any more, at once; `sweep` removes the files."""
        ...

    def erase_version(self, tenant_id: str | None, digest: str) -> None:
        """Also none of an adapter version, of one tenant or of all."""
        ...

    def erase_tenant(self, tenant_id: str) -> None: ...

    def sweep(self) -> None:
        """The writer's thread: remove the files of what was erased."""
        ...

    def owners(self) -> set[tuple[str, str | None]]:
        """The tenants and versions (None: the base) of its blocks."""
        ...

    def close(self) -> None: ...
