"""Traffic to two arms of a release, simulated: sticky users, a few of them heavy, and versions with planted faults."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from loraplex.control.usage.outcome import Outcome, key_hash
from loraplex.lifecycle.release_guard.window import MAX_OLDEST, RunningArm

CONTROL, CANDIDATE = 1, 2
MAX_TOKENS = 1000


@dataclass(frozen=True)
class Fault:
    """What is wrong with the candidate. `errors` is added to the share of errors; the others multiply."""

    errors: float = 0.0
    ttft: float = 1.0
    itl: float = 1.0
    tokens: float = 1.0
    cut: float = 0.0
    """Share of answers that run on to their limit of tokens."""
    never_stops: bool = False


@dataclass(frozen=True)
class Traffic:
    """Requests a second to both arms, and the candidate's share of the users. With `zipf` 0 all users are alike; with
    1.1 the heaviest of 2,000 sends one request in six. Users differ: a heavy one may have long answers, or errors, all
    of the time."""

    rate: float = 10.0
    share: float = 0.1
    num_users: int = 2000
    zipf: float = 1.1
    base_errors: float = 0.005
    load_swing: float = 0.3
    """First tokens of both arms become slower and faster by so much, in waves of five minutes."""


@dataclass(frozen=True)
class Look:
    """What a guard is given at a look. `num_started`: requests of the candidate so far."""

    now: float
    outcomes: list[Outcome]
    running: list[RunningArm]
    num_started: int
    users_met: int


def looks(
    traffic: Traffic, seed: int, *, seconds: int, fault: Fault | None = None, every_s: int = 1
) -> Iterator[Look]:
    """A run with a look every `every_s` seconds. The same seed has the same control."""
    requests = _requests(traffic, seed, seconds, fault or Fault())
    running: dict[int, list[tuple[float, int]]] = {CONTROL: [], CANDIDATE: []}
    ending: list[tuple[float, int, Outcome]] = []
    met: set[int] = set()
    at = started = 0
    for now in range(every_s, seconds + 1, every_s):
        while at < len(requests) and requests[at].started_at <= now:
            request = requests[at]
            heapq.heappush(ending, (request.ended_at, at, request))
            if request.version == CANDIDATE:
                started += 1
                met.add(request.key_hash)
            at += 1
        outcomes = []
        while ending and ending[0][0] <= now:
            outcomes.append(heapq.heappop(ending)[2])
        for version in running:
            of_arm = [(r.started_at, r.key_hash) for _, _, r in ending if r.version == version]
            running[version] = of_arm
        rows = [
            RunningArm(version, len(arm), tuple((k, s) for s, k in heapq.nsmallest(MAX_OLDEST, arm)))
            for version, arm in running.items()
        ]
        yield Look(float(now), outcomes, rows, started, len(met))


def _requests(traffic: Traffic, seed: int, seconds: int, fault: Fault) -> Sequence[Outcome]:
    """All requests of a run by their start; those of the candidate as the fault makes them."""
    rng = np.random.default_rng(seed)
    users = traffic.num_users
    weights = np.arange(1, users + 1) ** -traffic.zipf
    on_candidate = rng.random(users) < traffic.share
    error_prone = rng.gamma(0.5, 2.0, users)  # mean 1: some users have most of the errors
    long_winded = rng.normal(0.0, 0.5, users)
    count = rng.poisson(traffic.rate * seconds)
    start = np.sort(rng.random(count) * seconds)
    user = rng.choice(users, count, p=weights / weights.sum())
    bad = on_candidate[user]
    ttft = (
        0.3
        * np.exp(rng.normal(0.0, 0.5, count))
        * (1 + traffic.load_swing * np.sin(start * (2 * np.pi / 300)))
    )
    itl = 0.02 * np.exp(rng.normal(0.0, 0.2, count))
    tokens = 150 * np.exp(rng.normal(0.0, 0.7, count) + long_winded[user])
    ttft[bad] *= fault.ttft
    itl[bad] *= fault.itl
    tokens[bad] *= fault.tokens
    tokens[bad & (rng.random(count) < fault.cut)] = MAX_TOKENS
    cut = tokens >= MAX_TOKENS
    tokens = np.clip(np.ceil(tokens), 2, MAX_TOKENS)
    error_rate = np.minimum(1.0, traffic.base_errors * error_prone[user] + fault.errors * bad)
    failed = rng.random(count) < error_rate
    end = start + ttft + itl * (tokens - 1)
    if fault.never_stops:
        end[bad & ~failed] = np.inf
    end[failed] = start[failed] + ttft[failed]
    hashes = {index: key_hash(f"user-{seed}-{index}") for index in np.unique(user)}
    return [
        Outcome(
            tenant_id="acme",
            adapter="support",
            version=CANDIDATE if bad[i] else CONTROL,
            key_hash=hashes[user[i]],
            started_at=float(start[i]),
            ended_at=float(end[i]),
            status="internal_error" if failed[i] else "length" if cut[i] else "stop",
            first_token_s=None if failed[i] else float(ttft[i]),
            inter_token_s=None if failed[i] else float(itl[i]),
            output_tokens=0.0 if failed[i] else float(tokens[i]),
        )
        for i in range(count)
    ]


def ended(*, version: int, key: str, status: str = "stop", started_at: float = 1.0) -> Outcome:
    """A request of two seconds and 50 tokens."""
    has_text = status in ("stop", "length", "cancelled")
    return Outcome(
        tenant_id="acme",
        adapter="support",
        version=version,
        key_hash=key_hash(key),
        started_at=started_at,
        ended_at=started_at + 2.0,
        status=status,
        first_token_s=0.2 if has_text else None,
        inter_token_s=0.036 if has_text else None,
        output_tokens=50.0 if has_text else 0.0,
    )
