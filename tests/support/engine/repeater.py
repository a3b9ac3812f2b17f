"""Recorded steps without a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch


class Repeater:
    """What a CUDA graph is to the engine: the same work over the same memory, however the step came to be. What it
    returned before is overwritten, as in a pool that graphs share. `replays` counts by the rows of a recorded step,
    and by those whose logits it returns."""

    def __init__(self) -> None:
        self.replays: Counter[tuple[int, int]] = Counter()
        self.last: torch.Tensor | None = None

    def record(self, work: Any) -> Callable[[], torch.Tensor]:
        size = work.args[0].token_ids.shape[0], work().shape[0]

        def replay() -> torch.Tensor:
            if self.last is not None:
                self.last.fill_(float("nan"))
            self.replays[size] += 1
            self.last = work()
            return self.last

        return replay

    def forget(self) -> None: ...
