"""One rate limit as one number, with charges that can be taken back in part."""

from __future__ import annotations

import math
from dataclasses import dataclass

PERIOD_S = 60.0
_TOLERANCE_S = PERIOD_S * 1e-9
"""Sums of floats: a billionth of the period is not worth a refusal."""


@dataclass(slots=True)
class _Step:
    """The effect of a charge on an arrival time x: max(x + seconds, least). `held`: it may still be given back; several
    that may not, and follow each other, are one step."""

    seconds: float
    least: float
    held: bool

    def then(self, later: _Step) -> None:
        self.seconds += later.seconds
        self.least = max(self.least + later.seconds, later.least)


class RateWindow:
    """GCRA in its "virtual scheduling" form (ITU-T I.371): the theoretical arrival time (TAT) lies as far ahead of
    now as the limit is spent, in seconds of the period. A whole period's worth may come at once; what is spent
    flows back evenly.

    A charge c at time t makes TAT = max(TAT, t) + c. Those that may still be given back are kept in order, and what
    lies between two of them as one step, as such functions are closed under composition. Giving back changes a step and
    goes through those after it, so it is exact: TAT is then what it would be if the charge had been the smaller one
    from its beginning. Taking it off TAT itself would pay out for a second time what has flowed back already. Time: a
    charge takes the same however many are held; giving back is in proportion to them.
    """

    __slots__ = ("_before", "_held", "_steps", "_tat")

    def __init__(self) -> None:
        self._before = -math.inf  # the TAT before all steps
        self._tat = -math.inf
        self._steps: list[_Step] = []
        self._held: dict[str, _Step] = {}

    def spent(self, now: float) -> float:
        """Seconds of the period that are spent: 0 to PERIOD_S."""
        return min(max(0.0, self._tat - now), PERIOD_S)

    def wait(self, seconds: float, now: float) -> float:
        """Seconds until a charge would fit; 0 if it fits now. `seconds` is at most PERIOD_S."""
        over = max(self._tat, now) + seconds - PERIOD_S - now
        return over if over > _TOLERANCE_S else 0.0

    def charge(self, seconds: float, now: float, held_as: str | None = None) -> None:
        """`held_as` names the charge for `give_back`, which then has to be called."""
        self._tat = max(self._tat, now) + seconds
        step = _Step(seconds, now + seconds, held_as is not None)
        if held_as is not None:
            self._held[held_as] = step
            self._steps.append(step)
        elif not self._steps:
            self._before = self._tat
        elif self._steps[-1].held:
            self._steps.append(step)
        else:
            self._steps[-1].then(step)

    def give_back(self, held_as: str, seconds: float) -> None:
        """End a held charge and undo `seconds` of it, which may be 0."""
        ended = self._held.pop(held_as)
        ended.seconds -= seconds
        ended.least -= seconds
        ended.held = False
        kept: list[_Step] = []
        tat = self._before
        for step in self._steps:
            tat = max(tat + step.seconds, step.least)
            if step.held:
                kept.append(step)
            elif not kept:
                self._before = tat
            elif kept[-1].held:
                kept.append(step)
            else:
                kept[-1].then(step)
        self._steps, self._tat = kept, tat

    def is_idle(self, now: float) -> bool:
        """Nothing is spent or held: a fresh window would say the same."""
        return self._tat <= now and not self._held
