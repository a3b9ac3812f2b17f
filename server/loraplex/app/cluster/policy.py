"""How many engines there should be, from what each of them says of its load.

An engine reports three pressures, each what is wanted of something over what it has of it: places in the batch, KV
blocks, memory for adapters. Their sums over the engines say how many engines the load would fill. The count rises where
it would fill more than `FULL` of each, and falls where one engine fewer would stay below `EMPTY`: the gap between the
two keeps a steady load from ever moving it. Either must hold for a time; the count then becomes the one that was enough
all that time (the stabilisation window of Kubernetes' HorizontalPodAutoscaler). Pure: times come from the caller.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from loraplex.engine.reports import EngineStats

QUEUE: Final = "queue_pressure"
KV: Final = "kv_pressure"
ADAPTERS: Final = "adapter_pressure"
PRESSURES: Final = (QUEUE, KV, ADAPTERS)
"""Keys of `engine_pressure`."""
FULL: Final = 0.8
"""Mean pressure above which there are too few engines."""
EMPTY: Final = 0.5
"""Mean pressure that must not be reached after an engine is given up."""
STARTING_S: Final = 300.0
"""Longest time after a rise in which the count waits for the engines that start, before it rises again."""
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class ScaleBounds:
    """Engines at least and at most, and the seconds for which more, or fewer, must have been enough.

    Raises ValueError where these do not fit together.
    """

    minimum: int
    maximum: int
    up_delay_s: float
    down_delay_s: float

    def __post_init__(self) -> None:
        if not 1 <= self.minimum <= self.maximum:
            raise ValueError(
                f"engines at least {self.minimum} and at most {self.maximum}: needs 1 <= least <= most"
            )
        if not (0 <= self.up_delay_s < math.inf and 0 <= self.down_delay_s < math.inf):
            raise ValueError("the delays must be seconds, 0 or more")

    def clamp(self, count: int) -> int:
        return min(max(count, self.minimum), self.maximum)


class Scaling(NamedTuple):
    """A decision, and what the next one needs of it: when the count last rose; since when, without a pause, more or
    fewer engines are wanted (None: they are not), and the count that was enough all that time."""

    number: int
    rose_at: float = -math.inf
    above_since: float | None = None
    above: int = 0
    below_since: float | None = None
    below: int = 0


def engine_pressure(stats: EngineStats, places: int) -> dict[str, float]:
    """An engine's pressures by the names in `PRESSURES`, each 0 or more: 1 is full. `places`: its sequences at once.

    Sequences that wait count as those that run do, and are expected to need as many KV blocks. Adapters are wanted that
    a sequence runs or waits with, and as many as are pinned; the size of one that is not there is the mean of those
    that are.
    """
    alive = stats.num_running + stats.num_waiting
    kv = _ratio(stats.num_kv_blocks_used, stats.num_kv_blocks)
    if stats.num_running:
        kv *= alive / stats.num_running
    adapters = max(len({*stats.running_adapters, *stats.waiting_adapters}), stats.num_pins)
    pages = adapters * _ratio(stats.num_arena_pages_used, stats.num_adapter_slots_used)
    return {
        QUEUE: _ratio(alive, places),
        KV: kv,
        ADAPTERS: max(_ratio(adapters, stats.num_adapter_slots), _ratio(pages, stats.num_arena_pages)),
    }


def wanted_replicas(
    stats: Collection[Mapping[str, float]], bounds: ScaleBounds, before: Scaling, now: float
) -> Scaling:
    """The decision at `now`, in seconds of a clock that may be set back.

    `stats`: `engine_pressure` of each engine that serves. While fewer report than there should be, none is given up,
    since what the silent ones do is not known; and after a rise none is added until those have started, for at most
    `STARTING_S`. The count doubles at most. It obeys new bounds at once.
    """
    count = bounds.clamp(before.number)
    rose_at = min(before.rose_at, now)
    if count != before.number:
        return Scaling(count, now if count > before.number else rose_at)
    is_whole = len(stats) >= count
    if (above := bounds.clamp(min(_filled(stats, FULL), 2 * count))) > count:
        since, above = _going_on(before.above_since, now, min(before.above, above), above)
        is_starting = not is_whole and now - rose_at < STARTING_S
        if now - since >= bounds.up_delay_s and not is_starting:
            return Scaling(above, now)
        return Scaling(count, rose_at, above_since=since, above=above)
    if is_whole and (below := bounds.clamp(_filled(stats, EMPTY))) < count:
        since, below = _going_on(before.below_since, now, max(before.below, below), below)
        if now - since >= bounds.down_delay_s:
            return Scaling(below, rose_at)
        return Scaling(count, rose_at, below_since=since, below=below)
    return Scaling(count, rose_at)


def _going_on(since: float | None, now: float, enough: int, first: int) -> tuple[float, int]:
    """Since when, and which count has been enough: both begin at `now` where nothing has begun before."""
    return (now, first) if since is None else (min(since, now), enough)


def _filled(stats: Collection[Mapping[str, float]], share: float) -> int:
    """The number of engines that all of `stats` together fill up to `share` of each pressure."""
    load = max(sum(_sound(each.get(name, 0.0)) for each in stats) for name in PRESSURES)
    return math.ceil(load / share - _ROUNDING)


def _sound(pressure: float) -> float:
    return max(pressure, 0.0) if math.isfinite(pressure) else 0.0


def _ratio(wanted: float, there: float) -> float:
    return wanted / there if there else 0.0
