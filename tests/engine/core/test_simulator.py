"""Seeded histories of the whole engine core against its oracles (see `support.simulator.histories`)."""

from __future__ import annotations

import functools
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from support.simulator.histories import MIN_EVENTS, Summary, Violation, play, play_many

CHUNK = 50
SOAK_SEEDS = 10_000


@functools.cache
def played(start: int) -> Summary:
    return play_many(range(start, start + CHUNK))


def test_histories_keep_every_promise() -> None:
    total = played(0)
    print(total)
    assert total.histories == CHUNK
    assert total.events >= CHUNK * MIN_EVENTS


def test_the_histories_reach_what_they_are_for() -> None:
    total = played(0)
    wanted = {"stop", "length", "abort", "deadline_exceeded", "adapter_unavailable", "internal_error"}
    wanted |= {"server_overloaded", "context_length_exceeded", "too_large", "adapter_not_finite"}
    wanted |= {"grammar_failed", "engine_restarting"}
    assert wanted <= total.endings.keys()
    assert min(total.preemptions, total.prefix_hits, total.loads, total.overlapped) > 0
    assert min(total.out_of_memory, total.poisoned, total.cut_prompts) > 0
    assert min(total.grammar_ends, total.held_for_grammar, total.measured) > 0
    assert min(total.from_copies, total.damaged_copies, total.deletions, total.restarts, total.resumed) > 0


def test_a_seed_is_one_history() -> None:
    assert play(11) == play(11)


def play_on(seeds: range, **kind: Any) -> tuple[Summary, list[str]]:
    """What the histories consisted of, and the violations of those that broke a promise."""
    total, violations = Summary(), []
    for seed in seeds:
        try:
            total.add(play(seed, **kind))
        except Violation as violation:
            violations.append(str(violation))
    return total, violations


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", [{}, {"disk": True}], ids=["on the device", "with host memory and a disk"])
def test_ten_thousand_histories(kind: dict[str, Any]) -> None:
    chunks = [range(start, start + CHUNK) for start in range(0, SOAK_SEEDS, CHUNK)]
    total, violations = Summary(), []
    with ProcessPoolExecutor(
        max_workers=min(2, os.cpu_count() or 1), mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        for summary, found in pool.map(functools.partial(play_on, **kind), chunks):
            total.add(summary)
            violations += found
    print(total)
    assert not violations, "\n\n".join(violations)
    assert total.histories == SOAK_SEEDS
    assert total.events >= SOAK_SEEDS * MIN_EVENTS
