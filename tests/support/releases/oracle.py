"""The evidence of `loraplex.lifecycle.release_guard.evidence`, over many runs at a time, by its formula alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

EFFECTS = np.array([0.04, 0.12, 0.3, 0.6, 0.95])
WEIGHTS = np.array([60, 30, 20, 15, 12]) / 137


def log_evidence(
    control: NDArray[np.float64], candidate: NDArray[np.float64], *, margin: float, prior: float
) -> NDArray[np.float64]:
    """The logarithm after each block. Numbers: [runs, blocks, numbers of the arm]; evidence: [runs, blocks]."""
    num_a, num_b = control.shape[2], candidate.shape[2]
    before = np.cumsum(control.sum(axis=2), axis=1) - control.sum(axis=2)
    counted = np.arange(control.shape[1]) * num_a
    estimate = ((before + 4 * prior) / (counted + 4))[..., None]
    distance = EFFECTS * np.maximum(0.0, 1 - estimate - margin)
    a0 = estimate + distance * num_b / (num_a + num_b)
    b0 = a0 + margin
    bet = (estimate + margin + distance - b0) / (b0 * (1 - b0))
    bet = np.minimum(bet, np.minimum(0.99 / b0, 0.99 * num_a / (num_b * (1 - a0))))
    of_b = np.log(1 + bet[..., None] * (candidate[:, :, None, :] - b0[..., None])).sum(axis=-1)
    of_a = np.log(1 - (bet * num_b / num_a)[..., None] * (control[:, :, None, :] - a0[..., None])).sum(
        axis=-1
    )
    wealth = np.cumsum(of_a + of_b, axis=1)
    largest = wealth.max(axis=2, keepdims=True)
    return (largest + np.log((WEIGHTS * np.exp(wealth - largest)).sum(axis=2, keepdims=True)))[..., 0]
