"""Statistics of the agreement of two lists of log probabilities."""

from __future__ import annotations

import math

import numpy as np
import pytest

from loraplex.control.agreement import compare

TRAINER = [[-1.0, -2.0, -0.5], [-3.0]]
SERVER = [[-1.5, -1.75, -0.5], [-2.0]]


def test_statistics_equal_hand_values() -> None:
    found = compare(TRAINER, SERVER)
    assert [one.differences for one in found.sequences] == [(0.5, -0.25, 0.0), (-1.0,)]
    assert [(one.mean, one.max, one.max_at) for one in found.sequences] == [(0.25, 0.5, 1), (1.0, 1.0, 1)]
    k3 = (math.exp(0.5) - 1.5) + (math.exp(-0.25) - 0.75) + 0.0 + math.exp(-1.0)
    expected = {"mean": 0.4375, "max": 1.0, "bias": -0.1875, "kl": pytest.approx(k3 / 4), "tokens": 4}
    assert found.figures() == expected


def test_the_estimate_is_the_divergence_of_many_samples() -> None:
    random = np.random.default_rng(0)
    server, trainer = random.dirichlet(np.ones(16)), random.dirichlet(np.ones(16))
    server, trainer = (0.9 * server + 0.1 / 16), (0.9 * trainer + 0.1 / 16)
    drawn = random.choice(16, size=100_000, p=server)
    found = compare([np.log(trainer)[drawn].tolist()], [np.log(server)[drawn].tolist()])
    exact = float((server * np.log(server / trainer)).sum())
    assert found.kl == pytest.approx(exact, rel=0.03)
    assert -found.bias == pytest.approx(exact, rel=0.05)


def test_equal_log_probabilities_agree_and_far_ones_stay_finite() -> None:
    assert set(compare(SERVER, SERVER).figures().values()) == {0.0, 4}
    far = compare([[0.0]], [[-1e6]])
    assert math.isfinite(far.kl)
    assert far.kl > 1e30
    assert compare([[-1e6]], [[0.0]]).kl == pytest.approx(1e6, rel=1e-5)


def test_lengths_must_be_the_same() -> None:
    for other in ([[-1.0, -1.0, -1.0]], [[-1.0], [-1.0]]):
        with pytest.raises(ValueError, match="argument"):
            compare(TRAINER, other)
