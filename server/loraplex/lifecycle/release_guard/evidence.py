"""Evidence that a candidate's numbers are larger than a control's by more than a margin, valid at every look.

Numbers are in [0, 1], one of each user. The arm of a user was drawn by chance, whatever the user asks for: a hash of
the key. That draw is all that the test relies on: users may differ as they like, and what meets both arms, such as an
outage, is no evidence. With x0 and x1 for a user's number under control and candidate, the null hypothesis is
x1 <= x0 + margin in expectation, of each user. This holds where both versions' answers end at about the same time: of a
version whose answers take several times as long, failures arrive before its other answers, and `error_rate` alone may
call it worse more often.

Users come in groups. How many of a group are the candidate's tells nothing, since a slow version's numbers come later.
Given those counts each order of the arms is as likely as another. So the group's users are taken one by one, in an
order that knows nothing of the arms, and the next one is the candidate's with probability p, its part of those that are
left. Each user multiplies the evidence by

    candidate: 1 + u (x - b0)        control: 1 - u p / (1 - p) (x - a0)        b0 = a0 + margin,  u >= 0

where a0 and u were chosen before. The expectation is 1 + p u (x1 - x0 - margin), so at most 1 under the null
hypothesis, and the product is an e-process: the probability that it ever reaches c is at most 1 / c (Ville).

The bets are those of the likelihood ratio of two Bernoulli arms, of means a and b, against their common mean:

    a0 = p b + (1 - p) a - p margin,    u = (1 - p) (b - a - margin) / (b0 (1 - b0))

For a rate, a is estimated by the control's numbers before, and b lies above the margin by D, in parts of the room.
Ranks of a group have the mean 1/2, so a and b lie about it, D of the largest distance apart. The evidence is the
weighted mean over `EFFECTS` of D, so that the effect need not be known before.

Sources: Shekhar, Ramdas, Nonparametric two-sample testing by betting, arXiv 2112.09162, and Podkopaev, Ramdas,
Sequential predictive two-sample and independence testing, arXiv 2305.00143 (bets on the arm); Turner, Ly, Grünwald,
Generic E-variables for exact sequential k-sample tests, arXiv 2106.02693 (two Bernoulli arms); Waudby-Smith, Ramdas,
Estimating means of bounded random variables by betting, arXiv 2010.09686 (numbers in [0, 1]); Lindon, Sanden,
Shirikian, Rapid regression detection in software deployments through sequential testing, arXiv 2205.14762 (this use).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

EFFECTS = (0.05, 0.15, 0.35, 0.65, 0.98)
"""Distances between the arms, in parts of the largest there can be."""
WEIGHTS = (0.42, 0.12, 0.06, 0.06, 0.34)
"""Parts of the evidence that are bet on each effect; they add up to 1. Of few users only a large one can be found."""
_PRIOR_WEIGHT = 4.0
_MAX_STAKE = 0.99
"""Largest part of the evidence that one number may take away."""


def _start() -> list[float]:
    return [math.log(weight) for weight in WEIGHTS]


class Evidence(msgspec.Struct, forbid_unknown_fields=True):
    """The e-process of one metric. `prior` is the control's mean where nothing is known yet; it costs evidence where it
    is wrong, and never validity. None: the numbers are ranks within their group. `log_wealth` is by effect; sums and
    counts are of the control's numbers so far."""

    margin: float
    prior: float | None
    log_wealth: list[float] = msgspec.field(default_factory=_start)
    control_sum: float = 0.0
    control_count: int = 0

    def add(self, group: Sequence[tuple[float, bool]]) -> None:
        """Take the numbers of a group, in [0, 1], and whether each is the candidate's. Their order must not depend on
        the arms."""
        left, candidates = len(group), sum(is_candidate for _, is_candidate in group)
        share = candidates / max(1, left)
        for number, is_candidate in group:
            if 0 < candidates < left:  # else the next arm is known
                self._bet(number, is_candidate, candidates / left, share)
            left -= 1
            candidates -= is_candidate
            if not is_candidate:
                self.control_sum += number
                self.control_count += 1

    def _bet(self, number: float, is_candidate: bool, chance: float, share: float) -> None:
        odds = chance / (1.0 - chance)
        for index, effect in enumerate(EFFECTS):
            a, b = self._means(effect, share)
            a0 = chance * (b - self.margin) + (1.0 - chance) * a
            b0 = a0 + self.margin
            if not 0.0 < a0 <= b0 < 1.0:
                continue  # nothing can lie above the margin
            u = (1.0 - chance) * (b - a - self.margin) / (b0 * (1.0 - b0))
            u = min(u, _MAX_STAKE / b0, _MAX_STAKE / (odds * (1.0 - a0)))
            self.log_wealth[index] += math.log1p(
                u * (number - b0) if is_candidate else u * odds * (a0 - number)
            )

    def _means(self, effect: float, share: float) -> tuple[float, float]:
        """Means of control and candidate that the effect would bring."""
        if self.prior is None:
            distance = effect * 0.5 / max(share, 1.0 - share)
            return 0.5 - share * distance, 0.5 + (1.0 - share) * distance
        control = (self.control_sum + self.prior * _PRIOR_WEIGHT) / (self.control_count + _PRIOR_WEIGHT)
        return control, control + self.margin + effect * max(0.0, 1.0 - control - self.margin)

    @property
    def log_e_value(self) -> float:
        """The natural logarithm of the evidence; 0 before the first group."""
        largest = max(self.log_wealth)
        total = math.fsum(math.exp(wealth - largest) for wealth in self.log_wealth)
        return largest + math.log(total)
