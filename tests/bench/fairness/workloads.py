"""Who sends what, and when: the published workloads of VTC, and ours.

VTC: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, section 5.2, with the rates and lengths of
its artifact. Rates are in requests a second, lengths in tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, order=True)
class Arrival:
    """One request. `adapter` is the number of one of its tenant's adapters, -1 the base model."""

    at: float
    tenant: str
    prompt: int
    output: int
    adapter: int = -1


@dataclass(frozen=True, slots=True)
class Workload:
    """`seconds` long. `make` draws the arrivals, in any order, from a seed. `adapter_room` adapters fit into the
    device's memory, and at most `max_running` sequences run. `window` is the time for which shares are told: all
    tenants are backlogged in it."""

    name: str
    title: str
    seconds: float
    make: Callable[[random.Random], Iterator[Arrival]]
    weights: dict[str, float] = field(default_factory=dict)
    adapter_room: int = 1
    max_running: int = 64
    window: tuple[float, float] | None = None

    def arrivals(self, seed: int = 0) -> list[Arrival]:
        """Those within `seconds`, in order."""
        return sorted(a for a in self.make(random.Random(seed)) if a.at < self.seconds)

    @property
    def one_shape(self) -> bool:
        """All requests are as long: only then policies can be compared by their tokens per second."""
        return len({(arrival.prompt, arrival.output) for arrival in self.arrivals()}) == 1

    def weight(self, tenant: str) -> float:
        return self.weights.get(tenant, 1.0)


def _steady(
    rng: random.Random,
    tenant: str,
    rate: float,
    start: float,
    end: float,
    *,
    prompt: int = 256,
    output: int = 256,
    on_off: float = 0.0,
    adapters: int = 0,
) -> Iterator[Arrival]:
    """Evenly, from `start` to `end`; with `on_off`, nothing in every second stretch of so many seconds. `adapters` are
    taken in turn."""
    at, turn = start + rng.random() / rate, 0
    while at < end:
        if not (on_off and int(at // on_off) & 1):
            yield Arrival(at, tenant, prompt, output, turn % adapters if adapters else -1)
            turn += 1
        at += 1 / rate


def _poisson(
    rng: random.Random, tenant: str, rate: float, end: float, prompt: int, output: int
) -> Iterator[Arrival]:
    at = rng.expovariate(rate)
    while at < end:
        yield Arrival(at, tenant, prompt, output)
        at += rng.expovariate(rate)


def _overload(rng: random.Random) -> Iterator[Arrival]:
    yield from _steady(rng, "slower", 1.5, 0, 360)
    yield from _steady(rng, "faster", 3.0, 0, 360)


def _burst(rng: random.Random) -> Iterator[Arrival]:
    for tenant in ("slower", "faster"):
        yield from (Arrival(0.0, tenant, 256, 256) for _ in range(60))
    yield from _overload(rng)


def _proportional(rng: random.Random) -> Iterator[Arrival]:
    for tenant, rate in (("a", 0.25), ("b", 0.5), ("c", 1.5)):
        yield from _steady(rng, tenant, rate, 0, 600)


def _on_off(rng: random.Random) -> Iterator[Arrival]:
    yield from _steady(rng, "on-off", 0.5, 0, 600, on_off=60)
    yield from _steady(rng, "always", 2.0, 0, 600)


def _on_off_overload(rng: random.Random) -> Iterator[Arrival]:
    yield from _steady(rng, "on-off", 2.0, 0, 600, on_off=60)
    yield from _steady(rng, "always", 3.0, 0, 600)


def _poisson_short_long(rng: random.Random) -> Iterator[Arrival]:
    yield from _poisson(rng, "short", 8.0, 600, 64, 64)
    yield from _poisson(rng, "long", 1.5, 600, 256, 256)


def _poisson_in_out(rng: random.Random) -> Iterator[Arrival]:
    yield from _poisson(rng, "long in", 8.0, 600, 512, 32)
    yield from _poisson(rng, "long out", 1.5, 600, 32, 512)


def _increasing(rng: random.Random) -> Iterator[Arrival]:
    yield from _steady(rng, "steady", 0.5, 0, 600)
    at = 0.0
    while at < 600:
        at += 1 / (0.2 + 1.8 * at / 600)
        yield Arrival(at, "rising", 256, 256)


def _shift(rng: random.Random) -> Iterator[Arrival]:
    yield from _steady(rng, "a", 0.5, 0, 300, on_off=60)
    yield from _steady(rng, "b", 2.0, 0, 300)
    yield from _steady(rng, "a", 1.0, 300, 600)
    yield from _steady(rng, "b", 1.0, 300, 600)
    yield from _steady(rng, "a", 0.5, 600, 900)
    yield from _steady(rng, "b", 1.5, 600, 900)


def _eight(rng: random.Random) -> Iterator[Arrival]:
    for number in range(8):
        yield from _steady(rng, f"t{number}", 0.4 if number < 3 else 0.6, 0, 360)


def _weighted(rng: random.Random) -> Iterator[Arrival]:
    for number in range(1, 5):
        yield from _steady(rng, f"w{number}", 1.5, 0, 360)


def _fifty_adapters(rng: random.Random) -> Iterator[Arrival]:
    yield from _steady(rng, "fifty", 6.0, 0, 360, adapters=50)
    yield from _steady(rng, "one", 1.5, 0, 360, adapters=1)


def _fifty_keys(rng: random.Random) -> Iterator[Arrival]:
    for _ in range(50):
        yield from _steady(rng, "fifty", 0.2, 0, 360)
    yield from _steady(rng, "one", 1.5, 0, 360)


def _returning(rng: random.Random) -> Iterator[Arrival]:
    yield from _steady(rng, "busy", 3.0, 0, 360)
    yield from _steady(rng, "returning", 1.5, 0, 30)
    yield from _steady(rng, "returning", 3.0, 180, 360)


def _many_adapters(rng: random.Random) -> Iterator[Arrival]:
    yield from _steady(rng, "many", 3.0, 0, 360, prompt=128, output=128, adapters=64)
    for number in range(3):
        yield from _steady(rng, f"other {number}", 0.1, 0, 360, prompt=128, output=64, adapters=1)
    yield from _steady(rng, "base", 0.1, 0, 360, prompt=128, output=64)


WORKLOADS = (
    Workload("overload", "Two tenants at 1.5 and 3 requests/s, 256 tokens in and out", 360, _overload),
    Workload(
        "waves",
        "The same with 60 requests of each at the start, and a batch of 19 as if whole requests were reserved",
        360,
        _burst,
        max_running=19,
    ),
    Workload(
        "proportional", "Three tenants at 0.25, 0.5 and 1.5 requests/s, 256 in and out", 600, _proportional
    ),
    Workload(
        "on-off",
        "One tenant at 0.5 requests/s every other minute, one at 2 always, 256 in and out",
        600,
        _on_off,
    ),
    Workload("on-off-overload", "The same at 2 and 3 requests/s", 600, _on_off_overload),
    Workload(
        "short-long",
        "Poisson: 8 requests/s of 64 in and out, 1.5 of 256 in and out",
        600,
        _poisson_short_long,
    ),
    Workload(
        "in-out",
        "Poisson: 8 requests/s of 512 in and 32 out, 1.5 of 32 in and 512 out",
        600,
        _poisson_in_out,
    ),
    Workload(
        "increasing",
        "One tenant at 0.5 requests/s, one that rises from 0.2 to 2, 256 in and out",
        600,
        _increasing,
    ),
    Workload("shift", "On/off for 5 minutes, then 1 and 1 requests/s, then 0.5 and 1.5", 900, _shift),
    Workload("eight", "Eight tenants, three at 0.4 and five at 0.6 requests/s, 256 in and out", 360, _eight),
    Workload(
        "weights",
        "Four tenants of weights 1, 2, 3 and 4 at 1.5 requests/s each, 256 in and out",
        360,
        _weighted,
        weights={f"w{number}": float(number) for number in range(1, 5)},
        window=(60, 360),
    ),
    Workload(
        "fifty-adapters",
        "50 adapters at 6 requests/s against one at 1.5, all of them resident",
        360,
        _fifty_adapters,
        adapter_room=51,
        window=(60, 360),
    ),
    Workload(
        "fifty-keys",
        "50 keys at 0.2 requests/s each against one at 1.5",
        360,
        _fifty_keys,
        window=(60, 360),
    ),
    Workload(
        "returning",
        "One tenant at 3 requests/s; another comes back to the same rate after 150 s",
        360,
        _returning,
        window=(180, 240),
    ),
    Workload(
        "many-adapters",
        "64 adapters of one tenant on the memory of 4, and four tenants with a request every 10 s",
        360,
        _many_adapters,
        adapter_room=4,
    ),
)
