"""The progress of a copy to the device whose first pages a step may read before the last ones are there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from loraplex.adapters.device.host_image import HostImage

MOST_WAIT_S = 1.0
"""Steps that wait longer for one copy, all their layers together, give it up. Where the copy keeps its rate, and the
step is that of the request that asked for it, no layer is waited for, by the rule of `may_begin`."""
_LEAD_SHARE = 0.75
"""The part of a step's predicted time that a copy may fill: its rate falls while the step reads memory too."""


def pages_by_layer(image: HostImage, num_layers: int, granules_per_page: int) -> NDArray[np.int64] | None:
    """[num_layers]: pages, from the first one of the image on, that hold every tile of the layers up to each, and of
    the head. None for an image that is read by token, by label or by expert too: that one is copied whole."""
    if len(image.rows) or len(image.experts):
        return None
    ends = np.zeros(num_layers, np.int64)
    for table, tiles in ((image.sites, (3, 4)), (image.vectors, (2,))):
        layers = np.maximum(table[:, 0], 0)  # the head stands before the first layer
        for column in tiles:
            np.maximum.at(ends, layers, table[:, column] // granules_per_page + 1)
    return np.maximum.accumulate(ends)


def may_begin(needed: NDArray[np.int64], arrived: int, seconds: float, lead_s: float) -> bool:
    """Whether a step that takes `lead_s`, begun now, would find the pages of each layer as it comes to it. `arrived`
    pages took `seconds`; the others are expected at the same rate. `needed` as of `pages_by_layer`."""
    if arrived < needed[0]:
        return False
    left = np.maximum(needed - arrived, 0) * (seconds / max(arrived, 1))
    return bool((left <= _LEAD_SHARE * lead_s * np.arange(len(needed)) / len(needed)).all())


class Arrival:
    """The pages of one image on their way to the device. One thread copies, in order, and reports; others wait.

    `needed` as of `pages_by_layer`. `on_late` is called, in a thread that waits, when it gives the copy up.
    """

    def __init__(self, needed: NDArray[np.int64], on_late: Callable[[], None]) -> None:
        self.needed = needed
        self.num_arrived = 0
        self._on_late = on_late
        self._failed = False
        self._patience_s = MOST_WAIT_S
        self._changed = threading.Condition()

    def arrived(self, num_pages: int) -> None:
        """The device has `num_pages` pages more."""
        with self._changed:
            self.num_arrived += num_pages
            self._changed.notify_all()

    def fail(self) -> None:
        """No page arrives any more."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()

    def wait_for(self, layer: int) -> bool:
        """Wait until the device has the pages of the layers up to this one. False if they do not come."""
        pages = int(self.needed[layer])
        with self._changed:
            began = time.monotonic()
            came = self._changed.wait_for(lambda: self._failed or self.num_arrived >= pages, self._patience_s)
            self._patience_s = max(0.0, self._patience_s - (time.monotonic() - began))
            if came:
                return self.num_arrived >= pages
            self._failed = True
        self._on_late()
        return False
