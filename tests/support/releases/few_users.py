"""A release under few users, simulated: unlike users, who come again and again in turn, and looks after each round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from loraplex.control.usage.outcome import Outcome, key_hash
from loraplex.lifecycle.release_guard.comparison import Unit
from loraplex.lifecycle.release_guard.groups import Arms
from loraplex.lifecycle.release_guard.guard import Guard, Verdict
from loraplex.lifecycle.release_guard.rules import MetricName, Rules
from support.releases.traffic import CANDIDATE, CONTROL

Kind = Literal["steady", "alike", "unlike", "always or never"]


@dataclass(frozen=True)
class Few:
    """`users` of one release, who send `rounds` requests each; with `heavy`, the first one sends as many as all others.
    `cut`: part of the candidate's answers that run on to their limit. Users are steady (no answer fails or is cut),
    alike (some do), or unlike, with shares and times of their own; or each has all answers cut or none."""

    users: int
    rounds: int = 60
    unit: Unit = "user"
    share: float = 0.5
    kind: Kind = "unlike"
    heavy: bool = False
    cut: float = 0.0


A_A = (
    *(
        Few(users, rounds, kind=kind, heavy=heavy)
        for users, rounds in ((1, 60), (2, 30), (5, 12), (18, 6), (200, 6))
        for kind, heavy in (("alike", False), ("unlike", True), ("always or never", False))
    ),
    *(
        Few(users, 200 // users, "request", kind=kind, heavy=heavy)
        for users in (1, 2, 5, 18, 200)
        for kind, heavy in (("alike", False), ("unlike", True), ("always or never", False))
    ),
)
"""The same version under few and unlike users."""


def verdicts(few: Few, seed: int, *, as_requests: bool = False) -> tuple[Verdict, int]:
    """The last verdict of a run, and the candidate's answers until then. It ends with a breach. With `as_requests` the
    guard takes a sticky user's requests for independent ones, as it must not."""
    rng = np.random.default_rng(seed)
    unit: Unit = "request" if as_requests else few.unit
    guard = Guard(Rules(), Arms(CONTROL, CANDIDATE, 1 - few.share, few.share, unit), since=0.0)
    shares, times = _users(few, rng)
    arms = rng.random(few.users) < few.share
    order = np.arange(few.users)
    if few.heavy:
        order = np.concatenate([order, np.zeros(max(0, few.users - 1), int)])
    verdict, answers = guard.verdict(), 0
    for number in range(few.rounds):
        own = rng.random(len(order)) < few.share if few.unit == "request" else arms[order]
        keys = [
            f"{seed}-{number}-{at}" if unit == "request" else f"{seed}-user-{user}"
            for at, user in enumerate(order)
        ]
        failed, cut = (rng.random((len(order), 2)) < shares[order]).T
        cut = (cut | (own & (rng.random(len(order)) < few.cut))) & ~failed
        sizes = times[order] * np.exp(rng.normal(0.0, (0.3, 0.2, 0.5), (len(order), 3))) * (0.05, 0.002, 20.0)
        sizes[:, 2] = np.where(cut, 64.0, np.clip(np.ceil(sizes[:, 2]), 1, 64))
        ends = ("stop", "length", "internal_error")
        outcomes = [
            _outcome(keys[at], bool(own[at]), number, ends[2 * failed[at] + cut[at]], *sizes[at].tolist())
            for at in range(len(order))
        ]
        outcomes.sort(key=lambda outcome: outcome.ended_at)
        answers += int(own.sum())
        verdict = guard.observe(outcomes, [], number + 1.0)
        if verdict.kind == "breach":
            break
    return verdict, answers


def needed(few: Few, seed: int, metric: MetricName, rules: Rules) -> tuple[int, bool]:
    """Users until the guard of one metric may pass, and whether a gross fault was found by then: half of the answers
    cut, or numbers that are larger in nine of ten comparisons."""
    rng = np.random.default_rng(seed)
    arms = Arms(CONTROL, CANDIDATE, 1 - few.share, few.share)
    equal, worse = Guard(rules, arms, since=0.0), Guard(rules, arms, since=0.0)
    larger = 2**0.5 * 0.5 * 1.2816  # standard deviations of log sizes: nine in ten pairs
    for number in range(100_000):
        own, size = bool(rng.random() < few.share), rng.normal(0.0, 0.5)
        end = "length" if own and rng.random() < 0.55 else "stop"
        tokens = 1000 * np.exp(size + (larger + np.log(1 + rules.margins.get("output_length", 0.0))) * own)
        equal.observe([_outcome(f"{number}", own, number, "stop", 0.1, 0.001, 1000 * np.exp(size))], [], 1.0)
        by_length = metric == "output_length"
        found = _outcome(f"{number}", own, number, "stop" if by_length else end, 0.1, 0.001, float(tokens))
        worse.observe([found], [], 1.0)
        if not max(reading.needs for reading in equal.readings()):
            return number + 1, worse.verdict().kind == "breach"
    raise AssertionError("no number of users is enough")


def _users(few: Few, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Of each user the shares of failed and cut answers, and factors of first token, token time and length."""
    failed, cut = np.full(few.users, 0.01), np.full(few.users, 0.05)
    if few.kind == "steady":
        failed[:] = cut[:] = 0.0
    times = np.ones((few.users, 3))
    if few.kind == "always or never":
        cut = (rng.random(few.users) < 0.5).astype(float)
        failed[:] = 0.0
        times[cut == 1.0] = 5.0
    elif few.kind == "unlike":
        failed, cut = rng.beta(0.1, 2.0, few.users), rng.beta(0.2, 0.6, few.users)
        times = np.exp(rng.normal(0.0, 0.8, (few.users, 3)))
    return np.stack([failed, cut], axis=1), times


def _outcome(
    key: str, is_candidate: bool, at: float, status: str, first: float, gap: float, tokens: float
) -> Outcome:
    failed = status == "internal_error"
    return Outcome(
        tenant_id="acme",
        adapter="support",
        version=CANDIDATE if is_candidate else CONTROL,
        key_hash=key_hash(key),
        started_at=float(at),
        ended_at=at + first + gap * (tokens - 1),
        status=status,
        first_token_s=None if failed else first,
        inter_token_s=None if failed or tokens <= 1 else gap,
        output_tokens=0.0 if failed else tokens,
    )
