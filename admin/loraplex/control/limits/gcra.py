"""One rate limit as one number, with charges that can be taken back in part."""

from __future__ import annotations

import math
from dataclasses import dataclass

PERIOD_S = 60.0
_TOLERANCE_S = PERIOD_S * 1e-9
"""Sums of floats: a billionth of the period is not worth a refusal."""


@dataclass(slots=True)
class _Held:
    """What the arrival time would be now but for idle moments since this charge (`open`), and the least that the
    charges after it alone make it (`floor`)."""

    open: float
    floor: float


class RateWindow:
    """GCRA in its "virtual scheduling" form (ITU-T I.371): the theoretical arrival time (TAT) lies as far ahead of
    now as the limit is spent, in seconds of the period. A whole period's worth may come at once; what is spent
    flows back evenly.

    A charge c at time t makes TAT = max(TAT, t) + c. Seen from an earlier charge that left it at x, all later ones
    together make it max(x + C, D), as such functions are closed under composition. With C and D kept for each charge
    that may still be given back, giving back is exact: TAT is then what it would be if the charge had been the
    smaller one from its beginning. Taking it off TAT itself would pay out for a second time what has flowed back
    already. Time: in proportion to the charges held.
    """

    __slots__ = ("_held", "_tat")

    def __init__(self) -> None:
        self._tat = -math.inf
        self._held: dict[str, _Held] = {}

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
        for held in self._held.values():
            held.open += seconds
            held.floor = max(held.floor, now) + seconds
        if held_as is not None:
            self._held[held_as] = _Held(self._tat, -math.inf)

    def give_back(self, held_as: str, seconds: float) -> None:
        """End a held charge and undo `seconds` of it, which may be 0."""
        charge = self._held[held_as]
        reached = max(charge.open - seconds, charge.floor)
        is_later = False
        for name, held in self._held.items():
            if name == held_as:
                is_later = True
            elif is_later:
                held.open = min(held.open, reached)
            else:
                held.open -= seconds
                if held.floor > charge.floor:  # so this charge is part of it
                    held.floor = max(held.floor - seconds, charge.floor)
        del self._held[held_as]
        self._tat = reached

    def is_idle(self, now: float) -> bool:
        """Nothing is spent or held: a fresh window would say the same."""
        return self._tat <= now and not self._held
