"""Times at which something is due for a request."""

from __future__ import annotations

import heapq

from loraplex.engine.types import Sequence, SequenceState


class SequenceTimers:
    """One time for each of some sequences, by the engine's clock. Those of ended sequences are dropped unseen."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []

    def add(self, at: float, seq: Sequence) -> None:
        heapq.heappush(self._heap, (at, seq.order, seq))

    def take_due(self, now: float, num_live: int) -> list[Sequence]:
        """The live sequences whose time has come. `num_live` requests have not ended."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            _, _, seq = heapq.heappop(self._heap)
            if seq.state is not SequenceState.FINISHED:
                due.append(seq)
        if len(self._heap) > 2 * num_live + 64:
            # Requests with late times end long before them: don't keep every one of them until then.
            self._heap = [timer for timer in self._heap if timer[2].state is not SequenceState.FINISHED]
            heapq.heapify(self._heap)
        return due

    def next_at(self) -> float | None:
        """The time of the first live sequence; None if there is none."""
        while self._heap and self._heap[0][2].state is SequenceState.FINISHED:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None
