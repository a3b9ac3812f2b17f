"""Evidence that a candidate's numbers are larger than a control's by more than a margin, valid at every look.

Numbers are in [0, 1]. With a and b for the means of control and candidate, the null hypothesis is b <= a + margin. Both
may change with time, and together: an outage that meets both arms is no evidence. Numbers come in blocks of n_a and
n_b, and each block multiplies the evidence by

    factor = PROD (1 + u (y_b - b0)) * PROD (1 - u n_b / n_a (y_a - a0)),    b0 = a0 + margin,  u >= 0

where a0 and u were chosen before the block. Its expectation for independent numbers is the same product over their
means. The logarithm of that is concave in the means; at (a0, b0) its gradient is u n_b (-1, 1), which is zero along
b = a + margin and falls into the null hypothesis. So no point of the null hypothesis has an expectation above 1, and
the product over blocks is an e-process: the probability that it ever reaches c is at most 1 / c (Ville).

The bets are those of the likelihood ratio of two Bernoulli arms against its projection: with a' for the estimate of a,
and D for how far the candidate lies above the margin,

    a0 = a' + n_b D / (n_a + n_b),    u = (b' - b0) / (b0 (1 - b0)),    b' = a' + margin + D

The evidence is the weighted mean over `EFFECTS` of D, so that the effect need not be known before.

Sources: Turner, Ly, Grünwald, Generic E-variables for exact sequential k-sample tests, arXiv 2106.02693 (two Bernoulli
arms); Waudby-Smith, Ramdas, Estimating means of bounded random variables by betting, arXiv 2010.09686 (numbers in
[0, 1]); Lindon, Sanden, Shirikian, Rapid regression detection in software deployments through sequential testing,
arXiv 2205.14762, and Howard, Ramdas, Sequential estimation of quantiles, arXiv 1906.09712 (this use of such tests).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

EFFECTS = (0.04, 0.12, 0.3, 0.6, 0.95)
"""Distances above the margin, in parts of the room between it and 1."""
WEIGHTS = tuple(1 / rank / sum(1 / other for other in range(1, 6)) for rank in range(1, 6))
"""Parts of the evidence that are bet on each effect; they add up to 1. Small effects need most of it: a large one is
found within a few numbers, whatever is bet on it."""
MAX_BLOCK = 8
"""Most numbers of one arm in a block: more of the control would add less than a tenth to the evidence."""
_PRIOR_WEIGHT = 4.0
_MAX_STAKE = 0.99
"""Largest part of the evidence that one number may take away."""


def block_sizes(control_weight: float, candidate_weight: float) -> tuple[int, int]:
    """Numbers (n_a, n_b) of a block for arms with these weights. No number of the smaller arm is left over, up to
    `MAX_BLOCK` times its weight."""
    ratio = control_weight / candidate_weight
    if ratio >= 1:
        return min(MAX_BLOCK, math.floor(ratio)), 1
    return 1, min(MAX_BLOCK, math.ceil(1 / ratio))


def _start() -> list[float]:
    return [math.log(weight) for weight in WEIGHTS]


class Evidence(msgspec.Struct, forbid_unknown_fields=True):
    """The e-process of one metric. `prior` is the control's mean where nothing is known yet; it costs evidence where it
    is wrong, and never validity. `log_wealth` is by effect; sums and counts are of the blocks so far."""

    margin: float
    prior: float
    log_wealth: list[float] = msgspec.field(default_factory=_start)
    control_sum: float = 0.0
    control_count: int = 0
    candidate_sum: float = 0.0
    candidate_count: int = 0

    def add(self, control: Sequence[float], candidate: Sequence[float]) -> None:
        """Take a block of numbers in [0, 1], at least one of each arm."""
        num_a, num_b = len(control), len(candidate)
        mean = (self.control_sum + self.prior * _PRIOR_WEIGHT) / (self.control_count + _PRIOR_WEIGHT)
        room = 1.0 - mean - self.margin
        if room > 0.0:  # else nothing can lie above the margin
            for index, effect in enumerate(EFFECTS):
                above = effect * room
                a0 = mean + num_b * above / (num_a + num_b)
                b0 = a0 + self.margin
                u = (mean + self.margin + above - b0) / (b0 * (1.0 - b0))
                u = min(u, _MAX_STAKE / b0, _MAX_STAKE * num_a / (num_b * (1.0 - a0)))
                v = u * num_b / num_a
                growth = sum(math.log1p(u * (number - b0)) for number in candidate)
                growth += sum(math.log1p(v * (a0 - number)) for number in control)
                self.log_wealth[index] += growth
        self.control_sum += sum(control)
        self.control_count += num_a
        self.candidate_sum += sum(candidate)
        self.candidate_count += num_b

    @property
    def log_e_value(self) -> float:
        """The natural logarithm of the evidence; 0 before the first block."""
        largest = max(self.log_wealth)
        total = math.fsum(math.exp(wealth - largest) for wealth in self.log_wealth)
        return largest + math.log(total)


def fewest_numbers(control: float, candidate: float, margin: float, log_threshold: float) -> float:
    """The bound on a test that knows the control's mean: how many Bernoulli numbers of the candidate it needs in the
    mean until its evidence reaches the threshold, log(threshold) / KL (Wald). Infinite within the margin."""
    null = control + margin
    if candidate <= null:
        return math.inf
    kl = candidate * math.log(candidate / null)
    if candidate < 1:
        kl += (1 - candidate) * math.log((1 - candidate) / (1 - null))
    return log_threshold / kl
