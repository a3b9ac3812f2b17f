"""The bound on unfairness, over seeded histories with an oracle of their own
(see `support.simulator.fair_histories`)."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import pytest

from loraplex.engine.scheduling import preempter
from loraplex.engine.scheduling.charging import SequenceCharges
from loraplex.engine.scheduling.fair_queue import FairQueue
from loraplex.engine.scheduling.scheduler import Scheduler
from support.simulator.fair_histories import Outcome, play, play_all

SEEDS = 40
SOAK_SEEDS = 10_000
CHUNK = 50
MAX_HISTORIES = 250


def check(outcomes: list[Outcome]) -> None:
    """They reach what they are for: a good part of them serves a pair of tenants, in one common backlog, by far more
    than the bound; and what has to happen does."""
    tested = sum(outcome.tested >= 1 for outcome in outcomes)
    print(
        f"{len(outcomes)} histories, {tested} with a pair that was served more than the bound while backlogged; the "
        f"largest drift is {max(outcome.drift for outcome in outcomes):.0%} of the bound"
    )
    assert tested >= 0.35 * len(outcomes)
    assert sum(outcome.preemptions for outcome in outcomes) > 0
    assert sum(outcome.loads for outcome in outcomes) > 0
    assert sum(outcome.aborts for outcome in outcomes) > 0


@pytest.mark.slow
def test_no_two_backlogged_tenants_drift_apart_by_more_than_the_bound() -> None:
    check(play_all(range(SEEDS)))


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_ten_thousand_histories_stay_within_the_bound() -> None:
    chunks = [range(start, start + CHUNK) for start in range(0, SOAK_SEEDS, CHUNK)]
    with ProcessPoolExecutor(
        max_workers=min(2, os.cpu_count() or 1), mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        check([outcome for outcomes in pool.map(play_all, chunks) for outcome in outcomes])


BUGS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {}


def bug(plant: Callable[[pytest.MonkeyPatch], None]) -> Callable[[pytest.MonkeyPatch], None]:
    BUGS[plant.__name__] = plant
    return plant


@bug
def output_not_charged(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "delivered", lambda self, seq, num_tokens: None)


@bug
def newcomers_not_lifted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FairQueue, "_lift", lambda self, tenant: None)


@bug
def credit_kept_while_an_adapter_comes(patch: pytest.MonkeyPatch) -> None:
    lift = FairQueue._lift
    patch.setattr(FairQueue, "_lift", lambda self, tenant: None if tenant.queued else lift(self, tenant))


@bug
def weights_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FairQueue, "set_weight", lambda self, tenant_id, weight: None)


@bug
def one_tenant_keeps_all_places(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(preempter, "choose_victims", lambda *_: [])


@bug
def ranks_not_charged(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SequenceCharges, "work", lambda self, seq, units: self._queue.charge(seq, units))


FIRST_HISTORY = {
    "newcomers_not_lifted": 12,
    "credit_kept_while_an_adapter_comes": 29,
    "ranks_not_charged": 130,
}
"""Where the search begins for a bug that few histories can show; 0 for the others."""


@pytest.mark.slow
@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[name](monkeypatch)
    first = FIRST_HISTORY.get(name, 0)
    for seed in range(first, first + MAX_HISTORIES):
        try:
            play(seed)
        except AssertionError:
            return
    pytest.fail(f"{MAX_HISTORIES} histories did not notice it")
