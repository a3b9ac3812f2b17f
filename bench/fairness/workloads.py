"""What tenants send, and when: the published workloads of VTC, and ours.

VTC: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, section 5.2, with the rates and lengths of
its artifact. Rates are in requests a second, lengths in tokens. Those whose name ends in "-1024" are the same with a
`max_tokens` of 1,024, which no answer reaches.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from loraplex.kernels.attention import BLOCK_SIZE

HOG_SECONDS = 90.0
LIGHT_RATE = 1 / 6
"""Of the tenant beside a hog, in requests a second: less than a third of what the smallest pool lets be computed."""


@dataclass(frozen=True, slots=True, order=True)
class Arrival:
    """One request. Its answer has `output` tokens and might have had `max_tokens` (0: as many as it has). `adapter` is
    the number of one of its tenant's adapters, -1 the base model. With `again` it is sent once more whenever it has
    ended."""

    at: float
    tenant: str
    prompt: int
    output: int
    adapter: int = -1
    max_tokens: int = 0
    again: bool = False

    @property
    def most(self) -> int:
        return self.max_tokens or self.output


Make = Callable[[random.Random], Iterator[Arrival]]


@dataclass(frozen=True, slots=True)
class Workload:
    """`seconds` long. `make` draws the arrivals, in any order, from a seed. `adapter_room` adapters fit into the
    device's memory, and at most `max_running` sequences run. `window` is the time for which shares are told: all
    tenants are backlogged in it. `num_blocks` of KV memory, where the workload is for another size than the device's.
    """

    name: str
    title: str
    seconds: float
    make: Make
    weights: dict[str, float] = field(default_factory=dict)
    adapter_room: int = 1
    max_running: int = 64
    window: tuple[float, float] | None = None
    num_blocks: int = 0

    def arrivals(self, seed: int = 0) -> list[Arrival]:
        """Those within `seconds`, in order."""
        return sorted(a for a in self.make(random.Random(seed)) if a.at < self.seconds)

    @property
    def one_shape(self) -> bool:
        """All requests are as long: only then policies can be compared by their tokens per second."""
        return len({(arrival.prompt, arrival.output) for arrival in self.arrivals()}) == 1

    @property
    def swaps(self) -> bool:
        """There are more adapters than fit."""
        used = {(arrival.tenant, arrival.adapter) for arrival in self.arrivals() if arrival.adapter >= 0}
        return len(used) > self.adapter_room

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
    """Evenly, from `start` to `end`; with `on_off`, nothing in every second stretch of that length in seconds.
    `adapters` are taken in turn."""
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


def _lengths(rng: random.Random) -> tuple[int, int]:
    return rng.randrange(16, 512), rng.randrange(16, 512)


def _poisson_on_off(rng: random.Random) -> Iterator[Arrival]:
    for tenant, rate in (("on-off", 0.5), ("always", 2.0)):
        for arrival in _poisson(rng, tenant, rate, 600, 0, 0):
            prompt, output = _lengths(rng)
            if tenant == "always" or not int(arrival.at // 60) & 1:
                yield replace(arrival, prompt=prompt, output=output)


def _random_lengths(rng: random.Random) -> Iterator[Arrival]:
    for arrival in _overload(rng):
        prompt, output = _lengths(rng)
        yield replace(arrival, prompt=prompt, output=output)


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


def _overload_weighted(rng: random.Random) -> Iterator[Arrival]:
    for number, rate in enumerate((0.8, 0.8, 1.2, 1.6), 1):
        yield from _steady(rng, f"w{number}", rate, 0, 360)


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


def _with_max_tokens(make: Make, max_tokens: int) -> Make:
    return lambda rng: (replace(arrival, max_tokens=max_tokens) for arrival in make(rng))


def _hogs(tenants: int, num_blocks: int) -> Make:
    """Tenants that keep 64 requests of 64 in and 1,000 to 1,200 out going each, beside one with a short request every
    six seconds. None takes more than half of the memory."""

    def make(rng: random.Random) -> Iterator[Arrival]:
        for tenant in range(tenants):
            for _ in range(64):
                output = min(rng.randint(1000, 1200), num_blocks * BLOCK_SIZE // 2 - 64)
                yield Arrival(0.0, f"hog {tenant}", 64, output, again=True)
        yield from _steady(rng, "light", LIGHT_RATE, 0, HOG_SECONDS, prompt=64, output=64)

    return make


def _hog_prompts(num_blocks: int) -> Make:
    """One that keeps 64 requests of 2,000 in and 64 out going, beside the same."""
    prompt = min(2000, num_blocks * BLOCK_SIZE // 2 - 64)

    def make(rng: random.Random) -> Iterator[Arrival]:
        yield from (Arrival(0.0, "hog 0", prompt, 64, again=True) for _ in range(64))
        yield from _steady(rng, "light", LIGHT_RATE, 0, HOG_SECONDS, prompt=64, output=64)

    return make


def _long_prompts(rng: random.Random) -> Iterator[Arrival]:
    """One that keeps 4 requests of 6,000 in and 16 out going, beside one with a short chat every two seconds."""
    yield from (Arrival(0.0, "hog 0", 6000, 16, again=True) for _ in range(4))
    yield from _steady(rng, "light", 0.5, 0, HOG_SECONDS, prompt=64, output=64)


def _hog_workloads(num_blocks: int) -> tuple[Workload, ...]:
    made = (
        ("hog-64", "64 requests of 64 in and 1000 to 1200 out of one tenant", _hogs(1, num_blocks)),
        ("hog-two", "The same of two tenants each", _hogs(2, num_blocks)),
        ("hog-prompts", "64 requests of 2000 in and 64 out of one tenant", _hog_prompts(num_blocks)),
    )
    return tuple(
        Workload(
            f"{name}@{num_blocks}",
            f"{title}, again whenever one ends; another sends one of 64 in and out every 6 s; {num_blocks} blocks, "
            "and a request takes at most half of them",
            HOG_SECONDS,
            make,
            num_blocks=num_blocks,
        )
        for name, title, make in made
    )


POOLS = (40, 100, 625, 2500)
"""KV blocks that the hogs' workloads are run with."""
HOGS = tuple(workload for num_blocks in POOLS for workload in _hog_workloads(num_blocks))

LONG_PROMPTS = Workload(
    "long-prompts",
    "4 requests of 6,000 in and 16 out of one tenant, again whenever one ends; another sends a chat every 2 s",
    HOG_SECONDS,
    _long_prompts,
    num_blocks=2500,
)

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
        "poisson-on-off",
        "Poisson, 16 to 511 in and out: 0.5 requests/s every other minute, 2 always",
        600,
        _poisson_on_off,
    ),
    Workload(
        "random-lengths", "1.5 and 3 requests/s as in overload, 16 to 511 in and out", 360, _random_lengths
    ),
    Workload("overload-1024", "overload with a larger max_tokens", 360, _with_max_tokens(_overload, 1024)),
    Workload("in-out-1024", "in-out with a larger max_tokens", 600, _with_max_tokens(_poisson_in_out, 1024)),
    Workload(
        "poisson-on-off-1024",
        "poisson-on-off with a larger max_tokens",
        600,
        _with_max_tokens(_poisson_on_off, 1024),
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
        "overload-weighted",
        "Four tenants of weights 1, 2, 3 and 4 at 0.8, 0.8, 1.2 and 1.6 requests/s, 256 in and out",
        360,
        _overload_weighted,
        weights={f"w{number}": float(number) for number in range(1, 5)},
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
    *HOGS,
)
