"""Where forward passes run: one worker, and the threads that it computes with."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from loraplex.engine.control_groups import ControlGroups

_T = TypeVar("_T")


class Executor:
    """One worker thread that runs what it is given, strictly in that order. An exception belongs to the `Future`
    of the work that raised it; the worker goes on with the next."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="forward")

    def submit(self, work: Callable[[], _T]) -> Future[_T]:
        """Raises RuntimeError after `close`."""
        return self._pool.submit(work)

    def close(self) -> None:
        """Finish what was submitted, and end the thread."""
        self._pool.shutdown(wait=True)


def set_threads(asked: int, groups: ControlGroups | None = None, *, num_sharing: int = 1) -> str:
    """Set torch's threads, and so the kernels' team: `asked`, or where that is 0 torch's own choice, at most as many as
    a CPU quota has whole processors; of these, one part in `num_sharing`. More would use the quota up early in each
    period, and then stand still. Returns the number in words."""
    quota = None if asked else (groups or ControlGroups()).cpus()
    if asked:
        torch.set_num_threads(asked)
    elif quota is not None and quota < torch.get_num_threads():
        torch.set_num_threads(max(1, int(quota)))
    else:
        quota = None
    if not asked and num_sharing > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // num_sharing))
    threads = torch.get_num_threads()
    shown = f"{threads} thread{'s' if threads > 1 else ''}"
    return shown if quota is None else f"{shown} for a CPU quota of {quota:g}"
