"""The tokens that a step samples, and the drafts that they confirm.

A row of a slice with drafts assumes the drafted tokens before it. The noise of a draw depends on seed, choice and
output index alone, so the token that a row samples is the one that would have been sampled without drafts wherever all
that it assumes is right. A draft is accepted while the tokens sampled at its places equal it, at any temperature.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future

import torch

from loraplex.engine.execution.riders.logprobs import Logprobs
from loraplex.engine.execution.riders.masks import GrammarMasks
from loraplex.engine.execution.riders.rider import Copy, Forward, Rider
from loraplex.engine.execution.step_results import StepResult
from loraplex.engine.grammar.masks import MaskMaker
from loraplex.engine.host_to_device import HostToDevice
from loraplex.engine.sampling.sampled_row import SampledRow
from loraplex.engine.sampling.sampler import Sampler
from loraplex.engine.types import ScheduledSequence
from loraplex.kernels.sampling.types import SampleRows

Arrival = torch.cuda.Event | None
"""When the copies to the host of a step have arrived; None: they have."""


class Tokens(Rider):
    """The sampled tokens of a step, for the client and, on the device, for the step after it."""

    def __init__(self) -> None:
        self.future: Future[Arrival] | None = None
        """The step's; None where it has no rows."""
        self.rows: list[SampledRow] = []
        """[S], in the order of the logits; those of a slice with drafts are adjacent."""
        self.sampled_rows: torch.Tensor
        """[S] int64: which of the step's rows these are."""
        self.slices: list[int] = []
        """[S]: the index in the plan of each row's slice."""
        self._logits_rows: list[int] = []
        """[S]: the numbers of the rows among the logits' rows; `_which` is the same where that is not all of them."""
        self._which: torch.Tensor | None = None
        self._drafted: dict[int, tuple[int, ...]] = {}
        self._row_of: dict[str, int] = {}
        self._pending: list[tuple[int, str]] = []
        self._sources: tuple[torch.Tensor, torch.Tensor] | None = None
        """Rows of the step, and the rows of the step before that sample their input tokens."""
        self._logprobs: Logprobs | None = None
        self._masks: GrammarMasks | None = None
        self._has_grammar = False
        self._token_ids: torch.Tensor
        self._batch: SampleRows
        self._sampled: torch.Tensor | None = None
        """[S] int64 on the device, 0 for a row that failed; None until the step has run, and for good if it failed."""
        self._on_host: tuple[torch.Tensor, torch.Tensor]
        """The same, and whether each row's token is good."""

    @property
    def riders(self) -> list[Rider]:
        """This one, and those that act on its rows."""
        return [rider for rider in (self, self._logprobs, self._masks) if rider is not None]

    def want_input(self, row: int, request_id: str) -> None:
        """Take the input token of a row of the step from the step before, which samples it."""
        self._pending.append((row, request_id))

    def want(self, index: int, item: ScheduledSequence, logits_row: int, *, failed: bool) -> None:
        """Sample a slice, whose index in the plan this is: from its last row, and from those before its drafted tokens.
        `logits_row`: the number of the first of these among the logits' rows. `failed`: its input is wrong."""
        first, request = len(self.rows), item.request
        self.rows.append(SampledRow(item))
        if item.drafted:
            self.prevents_replay = True
            self._drafted[index] = item.drafted
            self.rows += [SampledRow(item, offset) for offset in range(1, 1 + len(item.drafted))]
        end = len(self.rows)
        self.slices += (index,) * (end - first)
        self._logits_rows += range(logits_row, logits_row + end - first)
        self._row_of[request.request_id] = end - 1
        self._has_grammar = self._has_grammar or request.grammar is not None
        if request.sampling.logprobs is not None:
            self._logprobs = self._logprobs or Logprobs()
            self._logprobs.want(index, range(first, end), request.sampling, failed=failed)

    def place(
        self, inputs: HostToDevice, token_ids: torch.Tensor, rows: list[int], logits_rows: torch.Tensor
    ) -> None:
        """Say where the rows are. `token_ids` are the step's input; `rows` are all whose logits are wanted, and
        `logits_rows` the same on the device."""
        self._token_ids = token_ids
        self.sampled_rows = logits_rows
        if len(self.rows) < len(rows):
            self.sampled_rows = inputs.ints([rows[row] for row in self._logits_rows])
            self._which = inputs.ints(self._logits_rows)
        if self._logprobs is not None:
            self._logprobs.send(inputs)

    def plan(
        self,
        previous: Tokens,
        sampler: Sampler,
        masks: MaskMaker | None,
        eos_ids: frozenset[int],
        inputs: HostToDevice,
    ) -> None:
        """Begin to sample, behind the step before."""
        self._batch = sampler.plan(self.rows, eos_ids=eos_ids, upload=inputs)
        # A request that the step before sampled nothing for has failed there, and its row is not used: it keeps the
        # harmless 0.
        known = previous._row_of
        if found := [(row, known[name]) for row, name in self._pending if name in known]:
            rows, sources = zip(*found, strict=True)
            self._sources = inputs.ints(rows), inputs.ints(sources)
        if self._has_grammar:
            if masks is None:
                raise RuntimeError("a row has a grammar, and this runner takes none")
            self._masks = GrammarMasks(masks, self.rows, self.slices, eos_ids, known, previous.wait, inputs)

    def fill_in(self, previous: Tokens) -> None:
        """Put the tokens that the step before has sampled into this one's input. For the worker."""
        if self._sources is not None and previous._sampled is not None:
            rows, sources = self._sources
            # In place: a recorded step reads its tokens there.
            self._token_ids.index_copy_(0, rows, previous._sampled.index_select(0, sources))

    def compute(self, forward: Forward) -> None:
        logits = forward.logits
        if self._which is not None:
            logits = forward.sampler.take(logits, self._which)
        # The sampler overwrites them, and nothing else needs the others any more.
        forward.logits = logits if self._logprobs is None else self._logprobs.of_these(logits)
        masks = None if self._masks is None else self._masks.wait()
        last_tokens = self._token_ids.index_select(0, self.sampled_rows)
        tokens, ok = forward.sampler.sample(logits, self._batch, last_tokens, masks)
        self._sampled = forward.tokens = tokens
        self._on_host = tokens, ok

    def to_host(self, copy: Copy) -> None:
        tokens, ok = self._on_host
        self._on_host = copy(tokens), copy(ok)

    def wait(self) -> list[int | None] | None:
        """[S] on the host, None for a row that failed; None if the step did."""
        if self.future is None:
            return None
        try:
            wait_for(self.future)
        except Exception:
            return None  # `collect` reports it
        return [token if ok else None for token, ok in self._pairs()]

    def collect(self, result: StepResult) -> None:
        accept(result, self.slices, self._drafted, self._pairs())

    def _pairs(self) -> Iterable[tuple[int, bool]]:
        tokens, ok = self._on_host
        return zip(tokens.tolist(), ok.tolist(), strict=True)


def accept(
    result: StepResult,
    slices: Iterable[int],
    drafted: Mapping[int, tuple[int, ...]],
    tokens: Iterable[tuple[int, bool]],
) -> None:
    """Enter the tokens of slices: of one with drafts those that were sampled as drafted, and the one behind them.
    `slices` are those of the rows, adjacent for each, and `tokens` the rows' tokens with whether these are good. A
    slice fails if a row is not whose token it needs."""
    offset, last = 0, -1
    for index, (token, ok) in zip(slices, tokens, strict=True):
        offset = offset + 1 if index == last else 0
        last = index
        row = result.rows[index]
        if row.failed is not None or (offset and row.token_ids != drafted[index][:offset]):
            continue
        if ok:
            row.token_ids += (token,)
            row.num_accepted = offset
        else:
            row.fail("the logits of this row are not finite, or its options left no token to draw")
            row.token_ids = ()
            row.num_accepted = 0


def wait_for(future: Future[Arrival]) -> None:
    """Until a step has run and its copies are on the host. Raises what it raised."""
    arrived = future.result()
    if arrived is not None:
        arrived.synchronize()
