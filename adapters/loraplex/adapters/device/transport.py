"""Moves adapters from disk to host memory and on to the device, in threads of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from loraplex.adapters.admission.base_model import BaseWeights
from loraplex.adapters.admission.inspection_cache import InspectionCache
from loraplex.adapters.cache.residency import Ticket
from loraplex.adapters.device.arena import AdapterArena
from loraplex.adapters.device.arrival import MOST_WAIT_S, Arrival, may_begin, pages_by_layer
from loraplex.adapters.device.host_image import HostImage, build_image
from loraplex.adapters.device.host_slab import HostPages, HostSlab
from loraplex.adapters.device.image_files import ImageFiles
from loraplex.adapters.device.image_writer import ImageWriter
from loraplex.adapters.errors import ArtifactCorrupt, ArtifactMissing, LoadAbandoned, LoraplexError
from loraplex.adapters.ref import AdapterRef
from loraplex.adapters.spec import BaseSpec
from loraplex.adapters.store.artifact_store import check_digest
from loraplex.adapters.store.files import CONFIG_NAME, TENSORS_NAME, begin_digest
from loraplex.adapters.store.interface import Store
from loraplex.kernels.lora.dispatch import CHUNK

_log = logging.getLogger(__name__)

MAX_LOST_THREADS = 8
"""Threads that may hang in a dead disk before no new ones are started for them."""
CLOSE_TIMEOUT_S = 5.0
QUICK_COPY_BYTES = 16 << 20
"""A CPU copies as much in some 3 ms."""


class ThreadedTransport:
    """The real `AdapterTransport`: `threads` loaders, and one thread that copies.

    A load reads the laid-out image of `images`, if there is one. Else it parses the stored bytes as an upload is
    parsed, lays them out, and hashes them again as it reads them. Whatever is wrong becomes the ticket's error. Images
    lie in `host`; a load waits where it is full. A copy runs on a stream of its own where the device is a GPU, and its
    ticket is done when the stream is. On a CPU a copy of up to QUICK_COPY_BYTES is done when `copy` returns, unless its
    pages are written to for the first time or the thread that copies is at work. With a lead its ticket is usable as
    soon as a step of that time finds each layer's pages in time (`arrival.may_begin`). `wake` is called from those
    threads after each ticket that is done or usable. A load that is cancelled stops at its next matrix; while a thread
    hangs in it, that thread has a replacement.
    """

    def __init__(
        self,
        store: Store,
        base: BaseSpec,
        arena: AdapterArena,
        host: HostSlab,
        *,
        wake: Callable[[], None],
        threads: int = 2,
        images: ImageFiles | None = None,
    ) -> None:
        self._store = store
        self._images = images
        self._inspections = InspectionCache(base, arena.layout.max_chunks * CHUNK)
        self._base_weights = BaseWeights(base)
        self._arena = arena
        self._host = host
        self._wake = wake
        self._loaders = _Workers("adapter-load", threads)
        self._copiers = _Workers("adapter-copy", 1)
        self.image_writer = (
            None
            if images is None
            else ImageWriter(images, is_stored=self._is_stored, is_loading=lambda: self._loaders.is_working)
        )
        self._stream: torch.cuda.Stream | None = None
        if arena.device.type == "cuda":
            self._stream = torch.cuda.Stream(arena.device)  # type: ignore[no-untyped-call]

    def load(self, ref: AdapterRef) -> Ticket[HostImage]:
        def work() -> None:
            try:
                ticket.succeed(self._load(ref, lambda: not job.abandoned, ticket.seconds))
            except Exception as error:
                damaged = isinstance(error, ArtifactCorrupt | ArtifactMissing)
                ticket.fail(_reason(error, f"loading adapter {ref.digest[:12]}"), damaged=damaged)
            self._wake()

        def cancel() -> None:
            if self._loaders.abandon(job):
                ticket.fail("its load was cancelled")

        job = _Job(work)
        ticket: Ticket[HostImage] = Ticket(on_cancel=cancel, discard=HostImage.release)
        if not self._loaders.submit(job):
            ticket.fail("the threads that load adapters all hang; is the disk there?")
            self._wake()
        return ticket

    def copy(self, image: HostImage, slot: int, pages: tuple[int, ...], lead_s: float = 0.0) -> Ticket[None]:
        ticket: Ticket[None] = Ticket()
        early = None if lead_s <= 0.0 else self._early(image, ticket, lead_s)

        def copy() -> None:
            try:
                self._copy(image, slot, pages, early)
                ticket.succeed(None)
            except Exception as error:
                ticket.fail(_reason(error, f"copying adapter {image.digest[:12]} to the device"))
                if early is not None:
                    early.arrival.fail()

        def work() -> None:
            copy()
            self._wake()

        if early is None and self._is_quick(image, pages):
            copy()
        else:
            self._copiers.submit(_Job(work))
        return ticket

    def _is_quick(self, image: HostImage, pages: tuple[int, ...]) -> bool:
        """The end of a thread's copy would be seen between two steps; that is a step later."""
        return (
            self._stream is None
            and image.num_bytes <= QUICK_COPY_BYTES
            and self._arena.were_written(pages)
            and not self._copiers.is_working  # the arena is written to by one thread at a time
        )

    def host_shortage(self) -> int:
        return self._host.shortage

    def clear(self, slot: int) -> None:
        self._arena.clear_slot(slot)

    def close(self) -> None:
        """Stop the threads; what they have not begun is never done. Waits a little for what they have."""
        self._loaders.close()
        self._copiers.close()
        if self.image_writer is not None:
            self.image_writer.close()

    def _is_stored(self, digest: str) -> bool:
        """Also where the store does not say."""
        try:
            return self._store.holds(digest)
        except LoraplexError:
            return True

    def _load(self, ref: AdapterRef, wanted: Callable[[], bool], seconds: dict[str, float]) -> HostImage:
        """`seconds` gets the time of each part."""
        try:
            return self._load_once(ref, wanted, seconds)
        except (ArtifactCorrupt, ArtifactMissing):
            if not self._store.drop_damaged_copy(ref.digest):
                raise
        return self._load_once(ref, wanted, seconds)

    def _load_once(self, ref: AdapterRef, wanted: Callable[[], bool], seconds: dict[str, float]) -> HostImage:
        began = time.monotonic()
        folder = self._store.path(ref.digest)
        fetched = time.monotonic()
        seconds["fetch"] = fetched - began
        kept = self._read_image(ref.digest, folder, wanted)
        if kept is not None:
            seconds["read"] = time.monotonic() - fetched
            return kept
        try:
            image, found = self._lay_out(ref.digest, folder / CONFIG_NAME, folder / TENSORS_NAME, wanted)
        except LoadAbandoned:
            raise
        except Exception:
            # Damaged bytes may lead to whatever: say so if that is what they are.
            self._store.verify(ref.digest)
            raise
        try:
            check_digest(ref.digest, found)
        except ArtifactCorrupt:
            image.release()
            raise
        seconds["lay_out"] = time.monotonic() - fetched
        if self.image_writer is not None:
            self.image_writer.loaded(image)
        return image

    def _read_image(self, digest: str, folder: Path, wanted: Callable[[], bool]) -> HostImage | None:
        """None where there is none, and where the upload itself is lost: that is for the caller to find."""
        if self._images is None or not all((folder / name).is_file() for name in (CONFIG_NAME, TENSORS_NAME)):
            return None
        return self._images.read_image(digest, lambda num_pages: self._take(num_pages, wanted), wanted)

    def _take(self, num_pages: int, wanted: Callable[[], bool]) -> HostPages:
        return self._host.take(num_pages, wanted=wanted, on_shortage=self._wake)

    def _lay_out(
        self, digest: str, config: Path, tensors: Path, wanted: Callable[[], bool]
    ) -> tuple[HostImage, str]:
        """An image, and the hash of the bytes that it was made from. The caller must check that it is the digest.

        The file is read once for both, so the bytes are not verified while they are parsed: the parser must accept any
        upload."""
        spec = self._inspections.inspect(config, tensors, digest)
        sha = begin_digest(config, tensors)
        image = build_image(
            spec,
            tensors,
            self._arena.layout,
            base=self._base_weights,
            memory=lambda num_pages: self._take(num_pages, wanted),
            wanted=wanted,
            feed=sha.update,
        )
        return image, sha.hexdigest()

    def _early(self, image: HostImage, ticket: Ticket[None], lead_s: float) -> _EarlyStart | None:
        """Return the start of a step before the copy's end; None for an image that is copied whole."""
        layout = self._arena.layout
        needed = pages_by_layer(image, layout.num_layers, layout.granules_per_page)
        if needed is None:
            return None
        late = f"a layer of it did not come to the device within {MOST_WAIT_S:g} s"
        arrival = Arrival(needed, lambda: ticket.give_up(late))
        return _EarlyStart(arrival, ticket, lead_s, self._wake)

    def _copy(
        self, image: HostImage, slot: int, pages: tuple[int, ...], early: _EarlyStart | None = None
    ) -> None:
        watched = () if early is None else (early.begin(), early.arrived)
        if self._stream is None:
            self._arena.write(image, slot, pages, *watched)
            return
        with torch.cuda.stream(self._stream):
            self._arena.write(image, slot, pages, *watched)
        self._stream.synchronize()  # the adapter's tables as well


def _reason(error: Exception, what: str) -> str:
    """One line for the client."""
    if isinstance(error, LoraplexError):
        return error.message
    _log.error("%s failed", what, exc_info=error)
    if isinstance(error, OSError):
        return f"its files cannot be read: {error.strerror or type(error).__name__}"
    return f"{what} failed: {type(error).__name__}"


@dataclass(slots=True)
class _EarlyStart:
    """Makes the ticket of a copy usable once a step of `lead_s` that begins then waits for no layer."""

    arrival: Arrival
    ticket: Ticket[None]
    lead_s: float
    wake: Callable[[], None]
    began: float = 0.0

    def begin(self) -> Arrival:
        self.began = time.monotonic()
        return self.arrival

    def arrived(self, num_pages: int) -> None:
        """The device has these pages too, and the tables of the slot."""
        arrival = self.arrival
        arrival.arrived(num_pages)
        seconds = time.monotonic() - self.began
        if not self.ticket.usable and may_begin(arrival.needed, arrival.num_arrived, seconds, self.lead_s):
            self.ticket.ready()
            self.wake()


@dataclass(eq=False, slots=True)
class _Job:
    work: Callable[[], None]
    begun: bool = False
    ended: bool = False
    abandoned: bool = False


class _Workers:
    """A few threads that take jobs in order. One that hangs in an abandoned job counts as lost, and is replaced;
    it ends if ever it comes back."""

    def __init__(self, name: str, threads: int) -> None:
        self._name = name
        self._condition = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._closed = False
        self._lost = 0
        self._wanted = threads
        self._num_running = 0
        self._threads: set[threading.Thread] = set()
        for _ in range(threads):
            self._start()

    @property
    def is_working(self) -> bool:
        """Whether a job runs that was not abandoned, or waits for a thread."""
        with self._condition:
            return bool(self._jobs) or self._num_running > self._lost

    def submit(self, job: _Job) -> bool:
        """False if every thread hangs, or after `close`: the job is not taken."""
        with self._condition:
            if self._closed or len(self._threads) <= self._lost:
                return False
            self._jobs.append(job)
            self._condition.notify()
            return True

    def abandon(self, job: _Job) -> bool:
        """Its outcome is not wanted any more. Whether it had not begun, and never will."""
        with self._condition:
            if job.abandoned or job.ended:
                return False
            job.abandoned = True
            if not job.begun:
                self._jobs = deque(other for other in self._jobs if other is not job)
                return True
            self._lost += 1
            if self._lost <= MAX_LOST_THREADS and not self._closed:
                self._start()
            return False

    def close(self) -> None:
        with self._condition:
            self._closed = True
            self._jobs.clear()
            self._condition.notify_all()
            threads = list(self._threads)
        until = time.monotonic() + CLOSE_TIMEOUT_S
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _start(self) -> None:
        # Daemons: one that hangs in a dead disk must not keep the process from ending.
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._threads.add(thread)
        thread.start()

    def _run(self) -> None:
        try:
            while (job := self._next()) is not None:
                try:
                    job.work()
                except Exception:  # not reported by the job itself; the thread goes on with the next
                    _log.exception("a job of %s failed", self._name)
                with self._condition:
                    job.ended = True
                    self._num_running -= 1
                    if job.abandoned:
                        self._lost -= 1
                        if len(self._threads) - self._lost > self._wanted:
                            return
        finally:
            with self._condition:
                self._threads.discard(threading.current_thread())

    def _next(self) -> _Job | None:
        with self._condition:
            while not self._jobs and not self._closed:
                self._condition.wait()
            if self._closed:
                return None
            job = self._jobs.popleft()
            job.begun = True
            self._num_running += 1
            return job
