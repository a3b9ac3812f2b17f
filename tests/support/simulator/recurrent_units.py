"""What is wrong with the states and windows of a step."""

from __future__ import annotations

from collections.abc import Callable

from loraplex.engine.types import StepPlan
from loraplex.kernels.attention import BLOCK_SIZE


def wrong_units(
    plan: StepPlan, num_states: int, num_windows: int, is_named: Callable[[int], bool]
) -> list[str]:
    """Sequences of a step have a window each, and nobody else uses a state that one writes."""
    found: list[str] = []
    users: dict[int, set[str]] = {}
    windows: dict[int, set[str]] = {}
    for row in plan.scheduled:
        windows.setdefault(row.window_slot, set()).add(row.request_id)
        for state in (row.state, *row.state_targets):
            users.setdefault(state, set()).add(row.request_id)
        end = row.start + row.num_tokens
        certain = end - len(row.drafted)
        ends = end // BLOCK_SIZE - row.start // BLOCK_SIZE
        if not len(row.state_targets) == ends == certain // BLOCK_SIZE - row.start // BLOCK_SIZE:
            found.append(f"{row.request_id} has {len(row.state_targets)} targets, or drafts")
    written = {state for row in plan.scheduled for state in row.state_targets}
    if any(len(users[state]) > 1 for state in written) or any(len(each) > 1 for each in windows.values()):
        found.append("two sequences of a step share what one of them writes")
    if any(is_named(state) for state in written):
        found.append("a step writes a state that others may find")
    if {*users} - {*range(num_states)} or {*windows} - {*range(num_windows)}:
        found.append("a step has a state or a window that is not there")
    return found
