"""Which adapters came most often within the last hour: an adapter that comes again and again has too little memory."""

from __future__ import annotations

from collections import Counter, deque

SPAN_S = 3600.0
NUM_SLICES = 6
"""Parts of the hour that are forgotten at a time: loads count for 50 to 60 minutes."""
MOST_COUNTED = 2048
"""Adapters of a stage that are counted in one slice: the first ones to come."""
MOST_TOLD = 32
LEAST_TOLD = 12
"""Loads within the hour, one in five minutes, from which on an adapter is told."""


class RecentLoads:
    """Counts arrivals by stage ("disk": from the disk, "copy": to the device) and digest. Times are monotonic
    seconds. Not for several threads."""

    def __init__(self) -> None:
        self._slices: deque[tuple[int, dict[str, Counter[str]]]] = deque(maxlen=NUM_SLICES)

    def note(self, stage: str, digest: str, now: float) -> None:
        index = _index(now)
        if not self._slices or self._slices[-1][0] < index:
            self._slices.append((index, {}))
        counts = self._slices[-1][1].setdefault(stage, Counter())
        if digest in counts or len(counts) < MOST_COUNTED:
            counts[digest] += 1

    def most(self, now: float) -> dict[str, dict[str, int]]:
        """Arrivals within the last hour by stage and digest: at most `MOST_TOLD` of a stage, the most first, each
        `LEAST_TOLD` or more."""
        index = _index(now)
        sums: dict[str, Counter[str]] = {}
        for at, stages in self._slices:
            if at > index - NUM_SLICES:
                for stage, counts in stages.items():
                    sums.setdefault(stage, Counter()).update(counts)
        told = {
            stage: {digest: count for digest, count in found.most_common(MOST_TOLD) if count >= LEAST_TOLD}
            for stage, found in sums.items()
        }
        return {stage: found for stage, found in told.items() if found}


def _index(now: float) -> int:
    return int(now // (SPAN_S / NUM_SLICES))
