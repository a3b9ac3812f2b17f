"""The evidence of `loraplex.lifecycle.release_guard.evidence`, over many runs at a time, by its formula alone."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

EFFECTS = np.array([0.05, 0.15, 0.35, 0.65, 0.98])
WEIGHTS = np.array([42, 12, 6, 6, 34]) / 100


def log_evidence(
    numbers: NDArray[np.float64], arms: NDArray[np.bool_], *, margin: float, prior: float
) -> NDArray[np.float64]:
    """The logarithm after each group, of a rate. Numbers, and whether they are the candidate's: [runs, groups, units of
    a group]; evidence: [runs, groups]."""
    runs, num_groups, num_units = numbers.shape
    wealth = np.zeros((runs, len(EFFECTS)))
    total, count = np.full(runs, 4 * prior), np.full(runs, 4.0)
    found = np.empty((runs, num_groups))
    for group in range(num_groups):
        left = arms[:, group].sum(axis=1)
        for unit in range(num_units):
            number, own = numbers[:, group, unit, None], arms[:, group, unit]
            chance = (left / (num_units - unit))[:, None]
            a = (total / count)[:, None]
            b = a + margin + EFFECTS * np.maximum(0, 1 - a - margin)
            a0 = chance * (b - margin) + (1 - chance) * a
            b0 = a0 + margin
            with np.errstate(divide="ignore", invalid="ignore"):
                odds = chance / (1 - chance)
                bet = (1 - chance) * (b - a - margin) / (b0 * (1 - b0))
                bet = np.minimum(bet, np.minimum(0.99 / b0, 0.99 / (odds * (1 - a0))))
                gain = np.where(own[:, None], bet * (number - b0), bet * odds * (a0 - number))
            wealth += np.log1p(np.where((chance > 0) & (chance < 1), gain, 0.0))
            total += np.where(own, 0.0, number[:, 0])
            count += ~own
            left = left - own
        found[:, group] = np.log((WEIGHTS * np.exp(np.minimum(wealth, 600))).sum(axis=1))
    return found


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
