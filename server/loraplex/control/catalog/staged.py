"""How much of their quotas tenants have on its way into the store, so that it bounds what is staged, too."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from loraplex.adapters.errors import AdapterRefused, LoraplexError
from loraplex.control.errors import QuotaTaken


@dataclass(frozen=True, slots=True)
class UploadRoom:
    """The rest of a tenant's quota as an upload begins, in bytes: `limit` is max_adapter_bytes, `left` is what is
    free of it. `known` is the largest living version of the upload's name: the same bytes again are that version, and
    take nothing of what is left."""

    limit: int
    left: int
    known: int


class StagedUpload:
    """One upload on its way, as far as the quota sees it. For any thread."""

    def __init__(self, staged: StagedBytes, tenant_id: str, name: str, room: UploadRoom | None) -> None:
        self._staged = staged
        self.tenant_id = tenant_id
        self.name = name
        self.room = room
        self.free = 0
        """Bytes that the quota is not asked for: those of a version that may be uploaded again."""
        self.admitted_meanwhile = 0
        self.size = 0
        self._unpacked = 0

    @property
    def charge(self) -> int:
        return max(0, self.size - self.free)

    def expect(self, num_bytes: int) -> None:
        """`num_bytes` have come in all, or will come. Raises AdapterRefused (quota_exceeded) or
        QuotaTaken, as `unpack` does."""
        self._staged.grow(self, num_bytes)

    def unpack(self, num_bytes: int) -> None:
        """`num_bytes` more will be unpacked. An archive and what it unpacks to count once: the larger of the two."""
        self._unpacked += num_bytes
        self._staged.grow(self, self._unpacked)

    def admitted(self, num_bytes: int) -> None:
        """The bytes are a new version now, which the quota counts from the database; uploads that began before it do
        not."""
        self._staged.settle(self, num_bytes)


class StagedBytes:
    """Staged bytes of one server, over both ports: another server's staging is another disk's, or at most one quota
    more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._uploads: dict[str, set[StagedUpload]] = {}

    @contextlib.contextmanager
    def upload(self, tenant_id: str, name: str, room: UploadRoom | None) -> Iterator[StagedUpload]:
        """Around the whole of an upload; afterwards nothing of it is counted. `room` has just been read, None where the
        tenant has no quota for it."""
        one = StagedUpload(self, tenant_id, name, room)
        with self._lock:
            others = self._uploads.setdefault(tenant_id, set())
            if room is not None and not any(other.free for other in others if other.name == name):
                one.free = room.known
            others.add(one)
        try:
            yield one
        finally:
            with self._lock:
                others.discard(one)
                if not others:
                    self._uploads.pop(tenant_id, None)

    def num_bytes(self, tenant_id: str) -> int:
        """The uploads of a tenant in progress."""
        with self._lock:
            return sum(one.size for one in self._uploads.get(tenant_id, ()))

    def grow(self, one: StagedUpload, size: int) -> None:
        """To `size` bytes at least. Raises AdapterRefused, or QuotaTaken where it would fit without the tenant's other
        uploads; then it stays as it was."""
        with self._lock:
            if size <= one.size:
                return
            room = one.room
            if room is not None:
                others = sum(other.charge for other in self._uploads[one.tenant_id] if other is not one)
                left = max(0, room.left - one.admitted_meanwhile)
                if max(0, size - one.free) > left - others:
                    raise _exceeded(room, left, others, size)
            one.size = size

    def settle(self, one: StagedUpload, num_bytes: int) -> None:
        with self._lock:
            one.size = 0
            for other in self._uploads[one.tenant_id]:
                other.admitted_meanwhile += num_bytes


def _exceeded(room: UploadRoom, left: int, others: int, size: int) -> LoraplexError:
    in_progress = f"; other uploads in progress take {others} of them" if others else ""
    why = (
        f"The tenant may keep {room.limit} bytes of adapters; {left} are left{in_progress}, and this upload has "
        f"{size} or more."
    )
    if size - room.known <= left:
        return QuotaTaken(f"{why} Try again when they have ended.")
    return AdapterRefused("quota_exceeded", f"{why} Delete versions first.")
