"""How many units a guard needs until it would have found a gross fault, in four of five runs.

What it looks for: of a rate, `EFFECT` more than the margin allows; of any other metric, numbers that are
larger than the control's, after the margin, in nine of ten comparisons. Both constants are fitted to simulations
(`bench.release_guard_few --part needs`), over arms of 2 to 50 % and controls that fail in up to 10 %.
"""

from __future__ import annotations

import math

EFFECT = 0.5
"""Part of the answers that are worse. A control that leaves less room cannot become so much worse."""
_OF_RATE, _OF_RANKS, _LOST = 1.25, 2.8, 3.0


def units_of_rate(control: float, candidate: float, chance: float, log_threshold: float) -> int:
    """Units of both arms until a share `candidate` is found beside the share `control`, which has the margin in it:
    the threshold over the information that an answer and its arm have of each other. `chance`: the candidate's part of
    the units."""
    mixed = chance * candidate + (1 - chance) * control
    information = _entropy(mixed) - chance * _entropy(candidate) - (1 - chance) * _entropy(control)
    return math.ceil(_OF_RATE * (log_threshold + _LOST) / information)


def units_of_ranks(chance: float, log_threshold: float) -> int:
    """Units of both arms until larger numbers are found."""
    return math.ceil(_OF_RANKS * (log_threshold + _LOST) / min(chance, 1 - chance))


def _entropy(share: float) -> float:
    return sum(-part * math.log(part) for part in (share, 1 - share) if part > 0)
