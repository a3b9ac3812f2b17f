"""How many positions lines of batches have in a step, so that other requests hardly notice them.

Every step of other requests counts as 1, whatever it takes. Lines lengthen these steps by `SHARE` on average, and each
by `STEP_SHARE` at most, or by what a single row adds where that is more. Steps with a prompt get none of them, so that
first tokens and the longest gaps stay as they are, until `MOST_SAVED` is saved.
"""

from __future__ import annotations

from dataclasses import replace

from loraplex.engine.scheduling.step_draft import SMALL_STEP, StepDraft
from loraplex.engine.scheduling.timing.row_turns import rank_of
from loraplex.engine.scheduling.timing.step_times import StepLoad, StepTimes
from loraplex.engine.types import Sequence

SHARE = 0.05
"""The part by which lines lengthen the steps of others at most, on average."""
LONGER = 4 * SHARE
"""The least charge of a step that is lengthened by more than `SHARE`. One in four is at most, so that the median stays
where it is, also where a row takes more than predicted."""
STEP_SHARE = 0.1
MOST_SAVED = 0.5
"""Parts of steps that lines have left while they got nothing: then a step with a prompt has some too. What lines take
is subtracted, and goes below 0."""
SAME_TILE = 1.06
"""Kernels compute rows in tiles: where more rows take no more than this multiple of what one takes, lines get them."""
ROWS_SHARE = 8
"""Where it is not known what steps take, a step has a line's position for this number of slices, and one at least."""
REST_S = 0.25
"""Seconds after another request in which lines do not run alone: a client that answers at once meets no step of
theirs."""
LINES_ALONE = 8
"""Positions of lines in a step of their own soon after that: the next request waits for it."""


class LineShare:
    """`others_at`: when another request was here last. Without times of steps, lines get positions by number alone."""

    def __init__(self) -> None:
        self.others_at = float("-inf")
        self._saved = 0.0
        self._before: StepLoad | None = None  # the step without lines; None: its time is not looked at
        self._times: StepTimes | None = None
        self._most = 0.0

    def begin(self, draft: StepDraft, *, alone: bool) -> int:
        """The positions that lines may have in a step in which all others have theirs. `alone`: no other request has
        any."""
        self._before, time = None, draft.prompt_time
        if alone:
            return LINES_ALONE if draft.now - self.others_at >= REST_S else 0
        if time is None:
            return max(1, draft.num_slices // ROWS_SHARE)
        self._saved = min(self._saved + SHARE, MOST_SAVED)
        has_prompt = any(part.start < len(part.request.prompt_ids) for part in draft.scheduled.values())
        if self._saved < (MOST_SAVED if has_prompt else SHARE / 2):
            return 0
        time.load.rows = draft.num_tokens  # drafts too
        self._times, self._before = time.times, replace(time.load)
        rows, cost = time.load.rows, time.times.measured.costs.cost
        self._most = max(1 + STEP_SHARE, SAME_TILE * cost(rows + 1) / cost(rows))
        return next(
            n
            for n in range(1, SMALL_STEP + 1)
            if n == SMALL_STEP or cost(rows + n + 1) > self._most * cost(rows)
        )

    def of_line(self, draft: StepDraft, seq: Sequence) -> int:
        """The positions that the next line may have; 0: the step has no more. Behind a long context they take longer
        than their number says. The step's first line has one at least."""
        count, time = draft.budget, draft.prompt_time
        if self._before is None or time is None or not count:
            return count
        start, rank = seq.num_computed, rank_of(seq)
        while count and self._added(time.load.with_prompt(start, count, rank=rank)) > self._most - 1:
            count //= 2
        return max(count, time.load.rows == self._before.rows)

    def end(self, draft: StepDraft) -> None:
        """The step has its lines."""
        if draft.prompt_time is not None and self._before is not None:
            added = self._added(draft.prompt_time.load)
            if draft.prompt_time.load.rows > self._before.rows:
                self._saved = min(self._saved, SHARE) - (added if added <= SHARE else max(added, LONGER))

    def _added(self, load: StepLoad) -> float:
        assert self._times is not None
        assert self._before is not None
        return self._times.lengthened(self._before, load)
