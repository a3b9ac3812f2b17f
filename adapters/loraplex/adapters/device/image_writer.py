"""The thread that writes laid-out adapters to the disk, behind the loads."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable

from loraplex.adapters.device.host_image import HostImage
from loraplex.adapters.device.image_files import ImageFiles

_log = logging.getLogger(__name__)

MAX_WAITING = 16
"""Images that wait to be written. More are not written before they are loaded again."""
GIVE_WAY_S = 0.02
"""How long each half MiB waits for the loads that run. A server that always loads still gets its images written."""
CLOSE_TIMEOUT_S = 1.0
_LOOK_AGAIN_S = 0.002
_MAX_REMEMBERED = 16_384
_NICE = 19


class ImageWriter:
    """Writes the image of an adapter that was loaded for the second time in this process, so that adapters which are
    loaded once cost no write. No load waits for a write.

    `is_loading` says whether some load runs: then the writer waits. `is_stored` says whether an adapter's upload is
    still in the store. It is asked after the image appeared: a deletion removes the upload first and then its images,
    so one of the two sees the other. An image whose memory is given back meanwhile is not written.
    """

    def __init__(
        self, files: ImageFiles, *, is_stored: Callable[[str], bool], is_loading: Callable[[], bool]
    ) -> None:
        self._files = files
        self._is_stored = is_stored
        self._is_loading = is_loading
        self._changed = threading.Condition()
        self._loaded: OrderedDict[str, None] = OrderedDict()
        self._waiting: deque[HostImage] = deque()
        self._writing = False
        self._closed = False
        self._thread: threading.Thread | None = None

    def loaded(self, image: HostImage) -> None:
        """An adapter was laid out from its upload. Returns at once."""
        with self._changed:
            again = image.digest in self._loaded
            self._loaded[image.digest] = None
            self._loaded.move_to_end(image.digest)
            if len(self._loaded) > _MAX_REMEMBERED:
                self._loaded.popitem(last=False)
            if not again or self._closed or len(self._waiting) >= MAX_WAITING:
                return
            self._waiting.append(image)
            self._changed.notify_all()
            if self._thread is None:
                # A daemon: one that hangs in a dead disk must not keep the process from ending.
                self._thread = threading.Thread(target=self._run, name="adapter-image", daemon=True)
                self._thread.start()

    def wait_idle(self, timeout_s: float) -> bool:
        """Whether everything was written, or given up, within the time."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._waiting or self._writing), timeout_s)

    def close(self) -> None:
        """Give up what is not written, and end the thread. Waits a little for it."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        # On Linux the priority is this thread's alone.
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while (image := self._next()) is not None:
            try:
                self._write(image)
            except Exception as error:
                unexpected = not isinstance(error, OSError)
                _log.warning(
                    "the laid-out adapter %s is not kept: %s", image.digest[:12], error, exc_info=unexpected
                )
            finally:
                with self._changed:
                    self._writing = False
                    self._changed.notify_all()

    def _next(self) -> HostImage | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if self._closed:
                return None
            self._writing = True
            return self._waiting.popleft()

    def _write(self, image: HostImage) -> None:
        if self._files.write(image, self._goes_on) and not self._is_stored(image.digest):
            self._files.remove(image.digest)

    def _goes_on(self) -> bool:
        until = time.monotonic() + GIVE_WAY_S
        while self._is_loading() and not self._closed and time.monotonic() < until:
            time.sleep(_LOOK_AGAIN_S)
        return not self._closed
