"""The simulator is only worth what it catches: each of these bugs must be caught by it, within few histories."""

from __future__ import annotations

import pytest

from support.simulator.cache_bugs import CACHE_BUGS
from support.simulator.histories import Violation, play
from support.simulator.scheduling_bugs import SCHEDULING_BUGS
from support.simulator.step_bugs import STEP_BUGS

MAX_HISTORIES = 400
MAX_FROM_THE_FIRST = 1000
"""For the table, which begins at the first history for every bug."""
BUGS = {bug.__name__: bug for bug in (*SCHEDULING_BUGS, *STEP_BUGS, *CACHE_BUGS)}
FIRST_HISTORY = {
    "no_lease_for_the_step_in_flight": 130,
    "prefix_registered_for_a_former_life": 38,
    "newcomers_not_lifted": 30,
    "request_that_never_fits_retried_forever": 50,
    "reservation_ignored": 83,
    "reservation_counted_twice": 83,
    "pinned_version_evicted": 112,
    "torn_laid_out_copy_accepted": 93,
    "laid_out_copy_of_another_adapter_accepted": 249,
    "deleted_version_stays": 39,
    "prefix_key_without_the_place": 66,
    "prompt_pooled_again_after_a_preemption": 524,
    "lease_kept_by_a_preempted_sequence": 10,
    "prompt_scored_again_after_a_preemption": 18,
    "cap_on_device_memory_ignored": 14,
    "adapter_above_the_cap_waits_without_end": 14,
    "deadline_ignored_while_running": 13,
    "spoilt_kv_still_found": 11,
    "tokens_lost_when_memory_runs_out": 7,
    "token_of_a_lost_step_still_expected": 6,
    "step_behind_a_lost_one_believed": 38,
    "leases_of_a_lost_step_kept": 7,
    "steps_as_large_as_before_when_memory_runs_out": 30,
    "matcher_waited_for_without_end": 1,
    "slow_load_noticed_on_arrival_alone": 6,
    "prompt_of_a_resumed_answer_scored_again": 181,
    "hung_load_holds_its_place_without_end": 4,
    "pages_of_a_hung_copy_given_away": 6,
    "image_given_back_while_it_is_copied": 6,
    "damage_not_told": 7,
    "damaged_copy_ends_its_load": 10,
    "a_windows_block_given_back_too_early": 5,
    "prefix_found_without_a_windows_blocks": 5,
    "prefix_key_without_the_group": 5,
}
"""Where the search begins for a bug that few histories can show, as the table has it; 0 for the others."""


def histories_until_caught(name: str, first: int, most: int = MAX_HISTORIES) -> tuple[int, str]:
    """How many histories it takes, and what was seen in the last one. Fails for a bug that is not caught."""
    with pytest.MonkeyPatch.context() as patch:
        BUGS[name](patch)
        for seed in range(first, first + most):
            try:
                play(seed)
            except Violation as violation:
                return seed - first + 1, str(violation).partition("\n")[0].partition(": ")[2]
    pytest.fail(f"{most} histories did not catch {name}")


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_is_caught(name: str) -> None:
    histories_until_caught(name, FIRST_HISTORY.get(name, 0))


@pytest.mark.soak
def test_table_of_planted_bugs() -> None:
    rows = {name: histories_until_caught(name, 0, MAX_FROM_THE_FIRST) for name in BUGS}
    for name, (count, seen) in sorted(rows.items(), key=lambda row: row[1][0]):
        print(f"{count:4} histories: {name.replace('_', ' ')}: {seen[:80]}")
