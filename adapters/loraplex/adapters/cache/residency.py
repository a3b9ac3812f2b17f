"""Types that the adapter cache shares with its transport and its callers. No torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, Literal, Protocol, TypeVar

from loraplex.adapters.errors import LoraplexError
from loraplex.adapters.ref import AdapterRef

T = TypeVar("T")

AdapterState = Literal["hot", "warm", "cold"]
"""On the device, in host memory, or on disk only."""


class Residency(Enum):
    """The result of `request`."""

    READY = "ready"  # on the device; `acquire` works until the next `request` of another adapter
    LOADING = "loading"  # on its way; it may be on the device by now, if its copy was quick
    NO_ROOM = "no_room"  # it must wait for room: on the device, in host memory or in the line for the disk
    FAILED = "failed"  # `failure` says why


class LeaseError(RuntimeError):
    """A lease given back twice, or asked for where the adapter is not on the device: a bug of the caller."""


class PinRefused(LoraplexError):
    """This adapter can't be kept on the device beside those that are pinned already."""

    code = "adapter_unavailable"


class Image(Protocol):
    """An adapter laid out in host memory, ready to be copied. `num_bytes` counts whole pages."""

    @property
    def num_bytes(self) -> int: ...
    @property
    def num_pages(self) -> int: ...
    def release(self) -> None:
        """Give its memory back: once, when it is in no list and no copy reads it."""
        ...


ImageT = TypeVar("ImageT", bound=Image)


class Ticket(Generic[T]):
    """The outcome, some day, of work in another thread, which completes it once; the step thread reads it. `discard` is
    called with the value of a ticket that was cancelled, in whichever thread comes last."""

    __slots__ = (
        "_cancelled", "_damaged", "_discard", "_error", "_lock", "_on_cancel", "_outcome", "given_up", "seconds",
        "usable",
    )  # fmt: skip

    def __init__(
        self,
        on_cancel: Callable[[], None] | None = None,
        discard: Callable[[T], None] | None = None,
    ) -> None:
        self._lock = threading.Lock()
        self._cancelled = False
        self._discard = discard
        self._outcome: list[T] | None = (
            None  # a list of one, so that a value of None can be told from no value
        )
        self._error: str | None = None
        self._damaged = False
        self._on_cancel = on_cancel
        self.seconds: dict[str, float] = {}
        """Seconds by part of the work, set before it succeeds."""
        self.usable = False
        """Whether a copy has come so far that steps may read it: they wait for each layer."""
        self.given_up = ""
        """Why a step that did so waits no longer."""

    def ready(self) -> None:
        """The copy is `usable` from now on."""
        self.usable = True

    def give_up(self, message: str) -> None:
        """A step has waited for too long. `message` as of `fail`; the copy may still write."""
        self.given_up = message

    def succeed(self, value: T) -> None:
        with self._lock:
            self._outcome = [value]
            unwanted = self._cancelled
        if unwanted and self._discard is not None:
            self._discard(value)

    def fail(self, message: str, *, damaged: bool = False) -> None:
        """`message` is one line for the client. `damaged` means that the stored bytes are damaged, so that another try
        cannot succeed."""
        self._damaged = damaged
        self._error = message

    def cancel(self) -> None:
        """This ticket is not read again: its result is to be dropped."""
        with self._lock:
            unwanted = () if self._cancelled or self._outcome is None else tuple(self._outcome)
            self._cancelled = True
        if self._discard is not None:
            for value in unwanted:
                self._discard(value)
        if self._on_cancel is not None:
            self._on_cancel()

    @property
    def done(self) -> bool:
        return self._outcome is not None or self._error is not None

    @property
    def error(self) -> str | None:
        return self._error

    @property
    def damaged(self) -> bool:
        return self._damaged

    @property
    def value(self) -> T:
        """Only once `done` without an error."""
        assert self._outcome is not None, "the ticket has no value"
        return self._outcome[0]


class AdapterTransport(Protocol[ImageT]):
    """Moves adapters. Everything returns within milliseconds."""

    def load(self, ref: AdapterRef) -> Ticket[ImageT]:
        """Begin to bring an adapter from disk into host memory."""
        ...

    def copy(self, image: ImageT, slot: int, pages: tuple[int, ...], lead_s: float = 0.0) -> Ticket[None]:
        """Begin to copy an image into these device pages (as many as it has) and to describe it in `slot`. It
        may write to them until the ticket is done; it can't be cancelled. The ticket may be done on return. `lead_s`:
        seconds that the first step to read it takes; its ticket may be usable before it is done then. 0: not before."""
        ...

    def host_shortage(self) -> int:
        """Bytes of host memory that loads wait for, and that only images which are dropped can bring."""
        ...

    def clear(self, slot: int) -> None:
        """Nothing is in `slot` any more, so that a step that still names it fails rather than read the pages'
        next owner."""
        ...


@dataclass(eq=False, slots=True)
class Lease:
    """The right to read an adapter on the device. While one lives, its pages and its slot stay. Given back
    exactly once, to the cache that gave it. `counts`: it is a use, for which the adapter is kept longer."""

    digest: str
    slot: int
    counts: bool = True


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One adapter as the cache reports it. `state` is hot (device), warm (host memory) or cold (disk only); `idle_s` is
    the time since its last use (None: never requested); `load_seconds` holds its last way here by stage ("disk": disk
    to host, "copy": host to device), and of "disk" the parts that the transport reports: "fetch" (until its files were
    there), and "read" (its laid-out image) or "lay_out"; `error` is why its last load failed. `replicas` names the
    engines that have it in memory, where there are several."""

    ref: AdapterRef
    state: AdapterState
    loading: bool = False
    pinned: bool = False
    leases: int = 0
    pages: int = 0
    device_bytes: int = 0
    host_bytes: int = 0
    idle_s: float | None = None
    load_seconds: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    replicas: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CacheUsage:
    """Gauges of this moment, and counters since the cache was made. A field that is added here is a field of the
    engine's statistics too."""

    num_arena_pages: int = 0
    num_arena_pages_used: int = 0
    """Pages that are being copied to count too."""
    num_adapter_slots: int = 0
    num_adapter_slots_used: int = 0
    host_bytes: int = 0
    host_bytes_used: int = 0
    num_leases: int = 0
    adapter_loads: int = 0
    """Adapters read from the disk, and those copied to the device."""
    adapter_copies: int = 0
    adapter_load_failures: int = 0
    adapter_load_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds that all loads ("disk") and copies ("copy") took."""
    device_evictions: int = 0
    """Adapters evicted from the device, and from host memory, to make room for others."""
    host_evictions: int = 0
    cap_evictions: dict[str, int] = field(default_factory=dict)
    """Those of them, by tier ("device", "host"), of a tenant that was at its cap."""
    evictions: dict[str, dict[str, int]] = field(default_factory=dict)
    """Adapters that left a tier ("device", "host"), by reason: "room" for another adapter, "cap" of its tenant,
    "deleted", "failed" (its copy, or it does not fit)."""
    reloads: dict[str, dict[str, int]] = field(default_factory=dict)
    """Loads within the last hour by stage ("disk", "copy") and digest, of the adapters that came most often."""
    num_pins: int = 0
    """Pinned adapters; those of them on the device, and on their way there. The others failed or find no memory."""
    num_pins_held: int = 0
    num_pins_coming: int = 0
    num_warming: int = 0
    """Adapters that are still to be loaded by recorded demand, and what became of the others by outcome."""
    warmed: dict[str, int] = field(default_factory=dict)
