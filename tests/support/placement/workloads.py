"""Requests to simulate: workloads of the four kinds of Dynamo's `lora_simulation`, for adapters whose popularity
follows Zipf's law. Its flash crowd asks for all adapters alike; ours for one, which is harder to place."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ADAPTERS = 256
ZIPF = 1.1
DIGESTS = tuple(hashlib.sha256(str(number).encode()).hexdigest() for number in range(ADAPTERS))


@dataclass(frozen=True)
class Arrival:
    """A request at `at` seconds that runs for `service_s`."""

    at: float
    digest: str
    service_s: float


def _times(
    rng: np.random.Generator, rate: Callable[[float], float], most: float, until: float
) -> list[float]:
    """A Poisson process of a rate that changes, by thinning (Lewis and Shedler, 1979)."""
    found, now = [], 0.0
    while (now := now + float(rng.exponential(1 / most))) < until:
        if rng.random() * most < rate(now):
            found.append(now)
    return found


def _popularity(rng: np.random.Generator) -> NDArray[np.float64]:
    weights = 1 / np.arange(1, ADAPTERS + 1) ** ZIPF
    return rng.permutation(weights / weights.sum())


def arrivals(kind: str, *, rate: float, mean_s: float, until: float, seed: int) -> list[Arrival]:
    """`kind` is one of KINDS; `rate` requests a second in the mean, which run for `mean_s` seconds in the mean."""
    rng = np.random.default_rng(seed)
    shares = _popularity(rng)
    crowd = int(rng.integers(ADAPTERS))
    phase = [0.0, 1.0]

    def of_mmpp(now: float) -> float:
        while now >= phase[0]:
            phase[0] += float(rng.exponential(30.0))
            phase[1] = 2.0 - phase[1] if phase[1] != 1.0 else 1.5
        return rate * phase[1]

    rates: dict[str, Callable[[float], float]] = {
        "zipf": lambda now: rate,
        "diurnal": lambda now: rate * (1 + 0.5 * np.sin(2 * np.pi * now / (until / 2))),
        "flash crowd": lambda now: rate,
        "mmpp": of_mmpp,
    }
    found = []
    cumulated = np.cumsum(shares)
    for at in _times(rng, rates[kind], 1.5 * rate, until):
        number = min(int(np.searchsorted(cumulated, rng.random(), side="right")), ADAPTERS - 1)
        # Three tenths of all requests ask for one adapter that few have asked for before.
        if kind == "flash crowd" and until / 3 < at < until / 2 and rng.random() < 0.3:
            number = crowd
        found.append(Arrival(at, DIGESTS[number], float(rng.exponential(mean_s))))
    return found


KINDS = ("zipf", "diurnal", "flash crowd", "mmpp")
