"""How much of a step prompts may take while more than one tenant is served: a time, not a number of positions.

256 positions behind a long context take many times what 256 first ones take, and every other tenant waits for them: for
its next token, and for its first. So while another tenant is here, or was a moment ago, a step is planned up to
`max_s`. Decoding rows are in it up to a share of that, and take turns beyond it; prompts get what they leave, and a
share of `max_s` at least. How a prompt is cut, and which rows a step has, changes no bit of what is computed
(ADR 0071).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from loraplex.engine.scheduling.fair_queue import FairQueue
from loraplex.engine.scheduling.timing.row_turns import RowTurns, rank_of
from loraplex.engine.scheduling.timing.step_times import StepLoad, StepTimes
from loraplex.engine.types import Sequence

RECENT_S = 10.0
"""Seconds for which a tenant that has left still counts as here: its next request would wait for a whole step."""
ROWS_SHARE = 0.75
"""The share of `max_s` beyond which the decoding rows of a tenant take turns."""
PROMPTS_SHARE = 0.5
"""The least share of `max_s` that prompts get. Beside decoding rows that take longer they get as long as these, up to
all of `max_s`: a short prompt would else take several of such steps."""
OTHERS_SHARE = 0.75
"""The most of the prompts' time that goes to tenants behind the first one in order."""
MOST_SHARING = 8
"""The most of those tenants in one step."""
LEAD = 256.0
"""Units of service over the weight by which such a tenant may be ahead of the first one."""
AHEAD_CHUNK = 16
"""Most positions that one tenant gets in a step which is further ahead."""
LEAST_CHUNK = 8
"""Positions of a prompt that a step takes at least, if it takes any and there are as many: fewer read all keys and
values before them for little."""
AUTO_STEPS = 4.5
"""The bound, where no setting says it, as a multiple of a step of one row. Measured on a CPU: with 5 a chat's longest
gap beside long prompts was 5.4 times that alone, with 4.5 it is 4.5 times (docs/fairness.md)."""
LINES_S = 0.1
"""Seconds of prompts in a step of lines of batches alone, or `max_s` where that is more: the next request waits for it.
Shorter ones compute fewer positions for each reading of the weights."""
MOST_SLOWED = 2.0
"""The most by which that bound grows on a machine that has become slower."""


@dataclass(slots=True)
class PromptTime:
    """The time of a step in the making. `until`: predicted seconds that the step may take; `limit`: those that the
    slices which are added now may fill it to."""

    times: StepTimes
    load: StepLoad
    until: float
    limit: float
    began: int
    """Rows of the step before the first prompt in order."""
    max_s: float
    """Seconds of a step where decoding rows leave prompts enough; `until` is longer where they do not."""
    resting: frozenset[Sequence] = frozenset()
    """Decoding sequences whose turn is not in this step."""

    def in_turn(self, decoding: list[Sequence]) -> list[Sequence]:
        """Those of these sequences that have a row in the step."""
        return [seq for seq in decoding if seq not in self.resting] if self.resting else decoding

    def share(self, part: float) -> None:
        """Give this part of the time that is left to what is added from now on."""
        now = self.times.seconds(self.load)
        self.limit = now + part * max(0.0, self.until - now)
        self.began = -1  # what comes now is no first prompt

    def share_forced(self, part: float) -> None:
        """Give this part to forced tokens: nothing of what prompts get beyond `max_s`."""
        self.share(part)
        self.limit = min(self.limit, max(self.max_s, self.times.seconds(self.load)))

    def take_row(self, seq: Sequence) -> None:
        """The row that `begin` has counted for a sequence is about to be planned, with forced tokens behind it."""
        self.load.add(seq.num_computed + 1, -1, sampled=-1, rank=rank_of(seq))

    def begin_prompts(self) -> None:
        """The first prompt in order comes now. It gets the beginning of a chunk, whatever others took."""
        self.share(1.0)
        self.began = self.load.rows

    def fits(self, count: int) -> bool:
        """Whether `count` positions without a context fit."""
        return self.times.most(self.load, 0, count, self.limit) == count

    @property
    def is_full(self) -> bool:
        """Whether the step takes its whole time already."""
        return self.times.seconds(self.load) >= self.until

    @property
    def has_room(self) -> bool:
        """Whether the beginning of another prompt fits."""
        return self.load.rows == self.began or self.fits(LEAST_CHUNK)

    def most(self, seq: Sequence, start: int, count: int, *, least: int, scores: bool) -> int:
        """How many of `count` positions of a sequence behind `start` others fit; `least` in any case, and some where no
        prompt has any yet."""
        rank = rank_of(seq) if start >= seq.request.adapter_from else 0
        fits = self.times.most(self.load, start, count, self.limit, rank=rank, scores=scores)
        if fits == count:
            return count
        if self.load.rows == self.began:
            least = LEAST_CHUNK
        return max(min(count, least), fits if fits >= LEAST_CHUNK else 0)


class StepBound:
    """Knows which tenants are here, and bounds the steps' times by it. No clock of its own: `begin` is told the time.

    `times` predict a step. One may take `max_s`; None: `AUTO_STEPS` times what a step of one row takes now, so that a
    machine that has become slower still computes prompts."""

    def __init__(self, times: StepTimes, max_s: float | None) -> None:
        self.times = times
        self._max_s = max_s
        self._here: Counter[str] = Counter()  # requests by tenant
        self._left: dict[str, float] = {}  # when a tenant's last request ended, the earliest first
        self._now = 0.0
        self._turns = RowTurns()

    @property
    def max_s(self) -> float:
        """Seconds that a step may take."""
        if self._max_s is not None:
            return self._max_s
        return AUTO_STEPS * min(self.times.seconds(StepLoad(1, 0.0, 1)), MOST_SLOWED * self.times.one_row)

    def joined(self, tenant_id: str) -> None:
        """A request has come."""
        self._here[tenant_id] += 1
        self._left.pop(tenant_id, None)

    def left(self, tenant_id: str) -> None:
        """A request has ended."""
        self._here[tenant_id] -= 1
        if not self._here[tenant_id]:
            del self._here[tenant_id]
            self._left[tenant_id] = self._now

    def begin(
        self, now: float, decoding: list[Sequence], weight: Callable[[str], float], *, lines: bool = False
    ) -> PromptTime | None:
        """The time of a step in which each of `decoding` has a row, except those that are `resting`; None where nobody
        else would wait for it. `weight` is that of a tenant. `lines`: of batches, which have the step alone."""
        self._now = now
        if lines:
            load, resting = self._turns.take(decoding, weight, lambda load: True)
            until = self.times.seconds(load) + max(LINES_S, self.max_s)
            return PromptTime(self.times, load, until, until, load.rows, until, resting)
        for tenant_id in [tenant_id for tenant_id, at in self._left.items() if at < now - RECENT_S]:
            del self._left[tenant_id]
        if len(self._here) + len(self._left) < 2:
            return None
        most = ROWS_SHARE * self.max_s
        load, resting = self._turns.take(decoding, weight, lambda load: self.times.seconds(load) <= most)
        return self.open(load, resting)

    def open(self, load: StepLoad, resting: frozenset[Sequence] = frozenset()) -> PromptTime:
        """The time of a step of this load, to which prompts are added, however many tenants are here."""
        most = self.max_s
        rows_s = self.times.seconds(load)
        until = max(most, rows_s + min(max(rows_s, PROMPTS_SHARE * most), most))
        return PromptTime(self.times, load, until, until, load.rows, most, resting)


def make_bound(max_step_ms: float, times: StepTimes | None) -> StepBound | None:
    """The bound of the setting `max_step_ms`; negative: by what a step of one row takes. None where it is 0, or where
    it is not known what steps take."""
    if times is None or not max_step_ms:
        return None
    return StepBound(times, max_step_ms / 1000 if max_step_ms > 0 else None)


def prompts_behind(
    queue: FairQueue, prefilling: list[Sequence], *, claimed: bool
) -> list[tuple[Sequence, float, int]]:
    """The prompts that get a share: of each tenant behind the first one in the order of prompts, the one that it has
    under way (`prefilling`), or its next request, if it got little more than the first one, so that the order holds in
    the long run. The head of the queue is among them if others yielded to it (`claimed`). Each with the part that it
    may take of what is left of the step then, and its most positions.

    And of the tenants that got more than that, the prompt with the fewest positions left. It gets a few: else a
    newcomer, which begins at the level of a tenant that has used what was idle, would wait for whole prompts of
    another. A tenant gets them again where it is no further ahead than it was before them: a small step may have room
    for little else, and its weight may be less than the first one's."""

    def counter(seq: Sequence) -> float:
        return queue.counter(seq.request.tenant_id)

    head = queue.head()
    busy = {seq.request.tenant_id: seq for seq in reversed(prefilling)}
    heads = [] if head is None else queue.heads(MOST_SHARING, busy)
    if claimed and head is not None and head not in heads:
        heads.append(head)
    in_order = sorted([*busy.values(), *heads], key=counter)
    least = counter(in_order[0]) if in_order else 0.0
    near = [seq for seq in in_order if counter(seq) <= least + LEAD]
    for seq in near:
        queue.passed(seq.request.tenant_id, inf)
    shares = [(seq, seq.num_tokens) for seq in near[1 : 1 + MOST_SHARING]]
    ahead = [
        seq for seq in in_order[len(near) :] if counter(seq) - least <= queue.lead_of(seq.request.tenant_id)
    ]
    if ahead:
        short = min(ahead, key=lambda seq: (seq.num_tokens - seq.num_computed, seq.order))
        queue.passed(short.request.tenant_id, counter(short) - least)
        shares.insert(0, (short, AHEAD_CHUNK))  # what it leaves of its part goes to the others
    # Parts of what is left, so that they are equal.
    return [
        (seq, OTHERS_SHARE / (len(shares) - OTHERS_SHARE * number), positions)
        for number, (seq, positions) in enumerate(shares)
    ]
