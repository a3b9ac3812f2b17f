"""A runner without a model, whose answers give away every mix-up.

It keeps a KV memory of physical blocks. A step writes, for each scheduled position, a hash of the token, of the
digest that lies in the row's adapter slot *at that moment* and of the position before, into the block that the
row's table names, and samples a token as a hash of all that it reads back through that table. It never looks at a
sequence's own tokens. So a block given out twice, a prefix found under a wrong key, a slot overwritten too early or
a token fed out of turn changes what comes out; `reference` says what should have. A rejected draft leaves its KV in
the blocks, which nobody may read. A state is a recurrence over that KV. Log probabilities are hashes of the same:
`reference_scores`. Answers are hashes of integers alone: the same in every process.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import product

from loraplex.adapters.numerics import SiteOutputs, join_outputs
from loraplex.engine.execution.device_errors import DeviceOutOfMemory
from loraplex.engine.execution.step_results import RowFailure, RowResult, StepResult
from loraplex.engine.logprobs import Logprobs, Scores
from loraplex.engine.pooling import PooledPart, Pooling, fraction_bits
from loraplex.engine.types import (
    MEASURE_STEPS,
    BlockCopy,
    MeasuredPart,
    SamplingParams,
    ScheduledSequence,
    StepPlan,
)
from loraplex.kernels.attention import BLOCK_SIZE
from support.engine.logprobs import Row, pack_logprobs
from support.fake_host_memory import FakeHostMemory
from support.simulator.grammars import grammar_of
from support.simulator.recurrent_units import wrong_units

BASE = 0
"""What a base row leaves in place of a digest."""
GARBAGE = 1_000_003
"""A token that no vocabulary holds: what uninitialised or broken memory reads as."""
POISON = -1_000_003
"""KV that is not finite: a row that reads it computes nothing finite."""


def adapter_mark(digest: str | None) -> int:
    """A digest as the integer that goes into the KV memory."""
    return BASE if digest is None else int(digest[:12], 16) + 1


def attend(value_before: int, mark: int, token: int) -> int:
    """The KV of one position: of its token and adapter, and of all positions before it, as in a real model."""
    return hash((value_before, mark, token))


def advance(state: int, value: int) -> int:
    """The state behind a position with this KV, where the one before left `state`."""
    return (31 * state + value) % (1 << 61)


def draw(values: tuple[int, ...], vocab_size: int) -> int:
    """The fake model's next token, from the KV of all positions so far."""
    return hash(values) % vocab_size


def _kv(digest: str | None, tokens: tuple[int, ...], place: int) -> list[int]:
    """0, and the KV of each of these positions; the adapter version acts from position `place` on."""
    mark, values = adapter_mark(digest), [0]
    for position, token in enumerate(tokens):
        values.append(attend(values[-1], mark if position >= place else BASE, token))
    return values


def reference(
    digest: str | None, prompt: tuple[int, ...], count: int, vocab_size: int, place: int = 0
) -> list[int]:
    """The `count` tokens that follow `prompt` on one adapter version, which acts from position `place` on."""
    mark, values, drawn = adapter_mark(digest), _kv(digest, prompt, place), []
    while True:
        drawn.append(draw(tuple(values[1:]), vocab_size))
        if len(drawn) == count:
            return drawn
        values.append(attend(values[-1], mark, drawn[-1]))


def score(values: tuple[int, ...], token: int, num_top: int) -> Row:
    """The fake model's log probability of `token` behind positions with this KV, and of `num_top` others."""

    def value(of: int) -> float:
        return -(hash((values, of)) % 4096) / 8  # a float32 holds it

    others = [hash((values, -2 - rank)) % 1000 for rank in range(num_top)]
    return value(token), [(other, value(other)) for other in others]


def reference_scores(
    digest: str | None,
    prompt: tuple[int, ...],
    outputs: tuple[int, ...],
    sampling: SamplingParams,
    place: int = 0,
) -> Scores:
    """The log probabilities that a request with these outputs asks for, on one adapter version."""
    if sampling.logprobs is None and sampling.prompt_logprobs is None:
        return Scores()
    tokens = (*prompt, *outputs)
    values = _kv(digest, tokens, place)

    def at(positions: range, num_top: int | None) -> Logprobs | None:
        if num_top is None or not positions:
            return None
        rows = [score(tuple(values[1 : place + 1]), tokens[place], num_top) for place in positions]
        return pack_logprobs(rows, num_top)

    return Scores(
        output=at(range(len(prompt), len(tokens)), sampling.logprobs),
        prompt=at(range(1, len(prompt)), sampling.prompt_logprobs),
    )


def hidden(values: tuple[int, ...]) -> tuple[int, int]:
    """The fake model's hidden state behind positions with this KV: two small integers."""
    return hash((values, -3)) % 2001 - 1000, hash((values, -4)) % 2001 - 1000


def reference_pooled(digest: str | None, prompt: tuple[int, ...], pooling: Pooling, place: int = 0) -> bytes:
    """The embedding of a prompt on one adapter version."""
    values = _kv(digest, prompt, place)
    states = [hidden(tuple(values[1 : place + 2])) for place in range(len(prompt))]
    if pooling != "mean":
        return struct.pack("<2f", *states[-1 if pooling == "last" else 0])
    return struct.pack("<2f", *(sum(numbers) / len(prompt) for numbers in zip(*states, strict=True)))


def _measured(mark: int, position: int) -> SiteOutputs:
    return SiteOutputs("float32", ((position, "q_proj"),), struct.pack("<q", mark), b"\x01")


def reference_measured(digest: str | None) -> SiteOutputs:
    """What is measured of one adapter version: at each position its mark."""
    return join_outputs([_measured(adapter_mark(digest), position) for position in range(MEASURE_STEPS)])


class StepFailed(RuntimeError):
    """The fault that a test asked for."""


@dataclass(slots=True)
class Fault:
    """What goes wrong with a step: raise at `submit` or `collect` (its KV is garbage then), for want of memory or for
    no known reason; or single rows. The rows in `poisoned` answer once more, but leave KV that is not finite."""

    at: str = ""  # "submit", "collect" or "" for none
    rows: frozenset[int] = frozenset()
    memory: bool = False
    poisoned: frozenset[int] = frozenset()

    def error(self) -> Exception:
        what = f"{self.at} was told to fail"
        return DeviceOutOfMemory(what) if self.memory else StepFailed(what)


@dataclass(slots=True)
class _Handle:
    plan: StepPlan
    fault: Fault
    copies: tuple[BlockCopy, ...]  # also those of steps before it whose submission failed


@dataclass
class FakeRunner:
    """`mark_in_slot(slot)` reads the arena. Steps run as late as they may, when they are collected: whatever is
    changed too early in what they read shows. `fault(plan)` chooses a step's fault, `tokens_per_row(row)` how many
    tokens (1 and more) a sampling row brings, as speculative decoding would. `has_matcher` says whether the matcher of
    a request with a grammar was built, `is_live` whether the sequence of a row has not ended. `windows`: of each group
    of layers; one sees all. Each group writes to blocks of its own, and those with a window must read theirs,
    as far as they see. With `num_states` a layer keeps a state too: it holds the recurrence over a sequence's own
    positions up to a multiple of 16, and only a row at the end of a window writes one, which no other sequence of the
    step may use, and which is not named (`is_named`). `num_host_blocks` and `most_restored` as of `FakeHostMemory`."""

    num_blocks: int
    mark_in_slot: Callable[[int], int]
    vocab_size: int = 97
    fault: Callable[[StepPlan], Fault] = field(default=lambda plan: Fault())
    tokens_per_row: Callable[[ScheduledSequence], int] = field(default=lambda row: 1)
    max_in_flight: int = 1
    has_matcher: Callable[[str], bool] = field(default=lambda request_id: False)
    is_live: Callable[[ScheduledSequence], bool] = field(default=lambda row: True)
    windows: tuple[int | None, ...] = (None,)
    num_states: int = 0
    num_windows: int = 0
    is_named: Callable[[int], bool] = field(default=lambda state: False)
    num_host_blocks: int = 0
    most_restored: int = 1
    state_slots: int = 0

    def __post_init__(self) -> None:
        self._full = self.windows.index(None)
        positions = self.num_blocks * BLOCK_SIZE
        self._values = [GARBAGE] * positions
        self._tenants = [""] * positions
        self.host = FakeHostMemory(
            self.num_blocks, self.num_host_blocks, self.most_restored, self.num_states, self.state_slots,
            len(self.windows),
        )  # fmt: skip
        self._owed: tuple[BlockCopy, ...] = ()
        self._states = [GARBAGE] * self.num_states
        self._windows = [[GARBAGE] * BLOCK_SIZE for _ in range(self.num_windows)]
        self._queue: deque[_Handle] = deque()
        self._drawn: dict[
            tuple[str, int], int
        ] = {}  # by (request, output index): the last step's, on the device
        self.num_steps = 0
        self.num_tokens = 0
        self.plans: list[StepPlan] = []
        self.keep_plans = False
        self.complaints: list[str] = []  # what no engine may do; the core would take an exception for a fault
        self.faulted: set[str] = set()  # requests that a fault has hit
        self._num_submitted = 0
        self._first_submitted: dict[tuple[str, int], int] = {}  # by request and epoch
        self._noticed: dict[int, int] = {}  # steps submitted when the poison at a place was first read

    @property
    def num_in_flight(self) -> int:
        return len(self._queue)

    def submit(self, plan: StepPlan) -> object:
        if not plan.parts and not plan.copies:
            self.complaints.append("an empty step was submitted")
        if len(self._queue) >= self.max_in_flight:
            self.complaints.append("more steps are in flight than the lookahead allows")
        if self.keep_plans:
            self.plans.append(plan)
        if self.num_states:
            self.complaints += wrong_units(plan, self.num_states, self.num_windows, self.is_named)
        elif any(row.window_slot >= 0 for row in plan.scheduled):
            self.complaints.append("a step has rows in windows of a model that keeps no state")
        self.complaints += self.host.submitted(plan)
        copies, self._owed = self._owed + plan.copies, ()
        handle = _Handle(plan, self.fault(plan), copies)
        hit = plan.parts if handle.fault.at else [plan.parts[index] for index in handle.fault.rows]
        if not handle.fault.memory:
            self.faulted.update(row.request_id for row in hit)
        self._num_submitted += 1
        for row in plan.scheduled:
            self._first_submitted.setdefault((row.request_id, row.epoch), self._num_submitted)
        if handle.fault.at == "submit":
            self._owed = copies
            raise handle.fault.error()
        self._queue.append(handle)
        return handle

    def collect(self, handle: object) -> StepResult:
        assert isinstance(handle, _Handle)
        if self._queue.popleft() is not handle:
            self.complaints.append("a step was collected out of turn")
        self.host.copy(handle.copies, self._values, self._tenants, self._states)
        return self._run(handle.plan, handle.fault)

    def _run(self, plan: StepPlan, fault: Fault) -> StepResult:
        self.num_steps += 1
        drawn: dict[tuple[str, int], int] = {}
        if fault.at == "collect":
            for row in plan.scheduled:
                self._write(row, (GARBAGE,) * row.num_tokens)
            self._drawn = drawn
            raise fault.error()
        result = StepResult(plan.step_id, [RowResult() for _ in plan.scheduled])
        for index, (row, found) in enumerate(zip(plan.scheduled, result.rows, strict=True)):
            request_id = row.request_id
            grammar = grammar_of(row.request)
            if grammar and self.is_live(row) and not self.has_matcher(request_id):
                self.complaints.append(f"{request_id} is computed before its matcher is built")
            tokens = row.token_ids
            if row.pending_input:
                # What the step before drew, if it still drew: a row that ended meanwhile may read anything.
                tokens = (self._drawn.get((request_id, row.output_index - 1), GARBAGE),)
            if index in fault.rows:
                self._write(row, (GARBAGE,) * row.num_tokens)
                found.failed = RowFailure("told to fail")
                continue
            self._write(row, tokens)
            self.num_tokens += row.num_tokens
            seen = self._read(row)
            if POISON in seen:
                self._notice(row, seen)
                found.fail("not finite")
                continue
            if index in fault.poisoned:
                for group in range(len(self.windows)):
                    self._values[self._place(row, row.start + row.num_tokens - 1, group)] = POISON
            sampling = row.request.sampling
            of_prompt = [
                score(seen[:position], target, sampling.prompt_logprobs or 0)
                for position, target in enumerate(row.targets, row.score_start + 1)
            ]
            if of_prompt:
                found.scores = Scores(prompt=pack_logprobs(of_prompt, sampling.prompt_logprobs or 0))
            if row.pool_start is not None:
                found.pooled = _pooled(row, seen)
            if not row.samples:
                continue
            is_scored = sampling.logprobs is not None
            answer, of_output = self._verify(row, seen)
            num_drafts_accepted = len(answer) - 1
            seen = seen[: len(seen) - len(row.drafted) + num_drafts_accepted]
            drawn[request_id, row.output_index] = answer[0]
            mark = self._mark(row)
            for _ in range(self.tokens_per_row(row) - 1):
                seen = (*seen, attend(seen[-1], mark, answer[-1]))
                answer.append(draw(seen, self.vocab_size))
                if is_scored:
                    of_output.append(score(seen, answer[-1], sampling.logprobs or 0))
            if grammar is not None:
                kind, count = grammar
                left = count - row.output_index
                if kind == "breaks" and len(answer) > left:
                    found.failed = RowFailure("no token can go on with it", "grammar")
                elif kind == "ends" and len(answer) >= left > 0:
                    del answer[left:], of_output[left:]
                    found.ended = True
            if row.drafted:
                found.num_accepted = min(num_drafts_accepted, len(answer) - 1)
            found.token_ids = tuple(answer)
            if sampling.logprobs is not None:
                output = pack_logprobs(of_output, sampling.logprobs)
                found.scores = replace(found.scores or Scores(), output=output)
        self._drawn = drawn
        part = plan.measure
        if part is not None and len(plan.scheduled) not in fault.rows:
            result.measured = _measured(self._mark(part), part.start)
        return result

    def _verify(self, row: ScheduledSequence, seen: tuple[int, ...]) -> tuple[list[int], list[Row]]:
        """The drafts of a row that are accepted, the token behind them, and the scores of each."""
        if row.drafted and (row.pending_input or row.token_ids[-len(row.drafted) :] != row.drafted):
            self.complaints.append(f"a slice of {row.request_id} does not hold its drafts")
        known = len(seen) - len(row.drafted)
        answer: list[int] = []
        scores: list[Row] = []
        for place, guess in enumerate((*row.drafted, None)):
            before = seen[: known + place]
            answer.append(draw(before, self.vocab_size))
            if row.request.sampling.logprobs is not None:
                scores.append(score(before, answer[-1], row.request.sampling.logprobs))
            if answer[-1] != guess:
                break
        return answer, scores

    def _notice(self, row: ScheduledSequence, seen: tuple[int, ...]) -> None:
        """A row has read poison. From now on no sequence may begin with it."""
        name = row.request_id
        if not self.is_live(row):
            return
        self.faulted.add(name)
        poisoned = [position for position, value in enumerate(seen) if value == POISON]
        for position, group in product(poisoned, range(len(self.windows))):
            place = self._place(row, position, group)
            if place < 0 or self._values[place] != POISON:
                continue  # of a block that was given back, or of another group
            if self._first_submitted[name, row.epoch] > self._noticed.setdefault(place, self._num_submitted):
                self.complaints.append(f"{name} was given KV that was known to be spoilt")

    def _write(self, row: ScheduledSequence, tokens: tuple[int, ...]) -> None:
        room = len(row.block_ids) // len(self.windows) * BLOCK_SIZE
        if len(tokens) != row.num_tokens or room < row.start + row.num_tokens:
            self.complaints.append(f"a slice of {row.request_id} does not fit its tokens or its blocks")
            return
        mark = self._mark(row)
        tenant = row.request.tenant_id
        value = self._values[self._place(row, row.start - 1)] if row.start else 0
        state, targets = self._boundary(row) if self.num_states else 0, [*row.state_targets]
        for position, token in enumerate(tokens, row.start):
            if value != POISON:
                value = GARBAGE if token == GARBAGE else attend(value, mark, token)
            for group in range(len(self.windows)):
                place = self._place(row, position, group)
                self._values[place] = self._of_group(value, group)
                self._noticed.pop(place, None)
                self._tenants[place] = tenant
            if not self.num_states:
                continue
            window = self._windows[row.window_slot]
            window[position % BLOCK_SIZE] = value
            if position % BLOCK_SIZE == BLOCK_SIZE - 1:
                state = self._states[targets.pop(0)] = reduce(advance, window, state)

    def _boundary(self, row: ScheduledSequence, end: int = 0) -> int:
        """The state behind the last full window before `end`, or before the slice."""
        position = max(row.start, end)
        if position < BLOCK_SIZE:
            return 0
        return self._states[row.state_targets[-1] if end and row.state_targets else row.state]

    def _mark(self, row: ScheduledSequence | MeasuredPart) -> int:
        return BASE if row.slot < 0 else self.mark_in_slot(row.slot)

    def _place(self, row: ScheduledSequence, position: int, group: int | None = None) -> int:
        """`group` None: one that sees all."""
        number = position // BLOCK_SIZE * len(self.windows) + (self._full if group is None else group)
        return row.block_ids[number] * BLOCK_SIZE + position % BLOCK_SIZE

    def _of_group(self, value: int, group: int) -> int:
        """The KV of a position in a group's blocks, where the one that sees all has `value`."""
        return value if group == self._full or value in (GARBAGE, POISON) else hash((value, group))

    def _read(self, row: ScheduledSequence) -> tuple[int, ...]:
        """The KV of positions 0 … the slice's end, through the row's own block table."""
        end = row.start + row.num_tokens
        values: list[int] = []
        tenants: list[str] = []
        for block in row.block_ids[self._full :: len(self.windows)][: -(-end // BLOCK_SIZE)]:
            values += self._values[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE]
            tenants += self._tenants[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE]
        # The row of a sequence that ended while it was in flight reads what it likes: nobody gets its answer.
        owners = set(tenants[:end])
        if owners != {row.request.tenant_id} and self.is_live(row):
            self.complaints.append(f"{row.request_id} reads KV that {sorted(owners)} wrote")
        for group, window in enumerate(self.windows):
            seen = range(0 if window is None else max(0, row.start - window + 1), end)
            own = [self._values[self._place(row, position, group)] for position in seen]
            for position, value in zip(seen, own, strict=True):
                if value == POISON:  # one whose twin in another group is good is read too
                    values[position] = POISON
            pairs = zip(own, values[seen.start : end], strict=True)
            is_wrong = any(one != self._of_group(value, group) for one, value in pairs if value != POISON)
            if is_wrong and self.is_live(row):
                self.complaints.append(f"{row.request_id} reads other KV where it sees {window} positions")
        if self.num_states and self.is_live(row) and POISON not in values[:end]:
            window = self._windows[row.window_slot]
            state = reduce(advance, window[: end % BLOCK_SIZE], self._boundary(row, end))
            if state != reduce(advance, values[:end], 0):
                self.complaints.append(f"{row.request_id} has another state than its own, or drafts")
        return tuple(values[:end])


def _pooled(row: ScheduledSequence, seen: tuple[int, ...]) -> PooledPart:
    """`seen`: the KV of all positions up to the slice's end."""
    assert row.pool_start is not None
    states = [hidden(seen[: place + 1]) for place in range(row.pool_start, len(seen))]
    if not states:
        return PooledPart(0, b"")
    if row.request.pooling != "mean":
        return PooledPart(len(states), struct.pack("<2f", *states[0]))
    scale = 1 << fraction_bits(row.num_prompt)
    sums = [sum(numbers) * scale for numbers in zip(*states, strict=True)]
    return PooledPart(len(states), struct.pack("<2q", *sums))
