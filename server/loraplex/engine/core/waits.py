"""Waits of new requests outside of the queue: for the matcher of their grammar, and for their prefix on a disk.

Such a request holds nobody else back. Belongs to the step thread. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from loraplex.engine.kv.disk_tier import MOST_WAIT_S, DiskTier
from loraplex.engine.kv.sequence_blocks import SequenceBlocks
from loraplex.engine.scheduling.timing.row_turns import rank_of
from loraplex.engine.scheduling.timing.step_bound import StepBound
from loraplex.engine.scheduling.timing.step_times import StepLoad
from loraplex.engine.types import Sequence
from loraplex.kernels.attention import BLOCK_SIZE

if TYPE_CHECKING:  # an engine without a tokenizer has no grammars
    from loraplex.engine.grammar.matchers import GrammarMatchers


class Waits:
    """The requests that are held, by what each waits for. Without `grammars` or `disk` nobody waits for these.
    `bound`, where there is one, predicts what computing takes: nobody waits longer for the disk. `max_tokens`: of a
    step."""

    def __init__(
        self,
        grammars: GrammarMatchers | None,
        disk: DiskTier | None,
        blocks: SequenceBlocks,
        bound: StepBound | None,
        max_tokens: int,
    ) -> None:
        self._grammars = grammars
        self._disk = disk
        self._blocks = blocks
        self._bound = bound
        self._max_tokens = max_tokens
        self._of: dict[str, set[str]] = {}

    def num_for_grammars(self, held: Iterable[Sequence]) -> int:
        """How many of these wait for their grammar."""
        return sum("grammar" in self._of.get(seq.request_id, ()) for seq in held)

    def begin(self, seq: Sequence) -> bool:
        """A request has come. Returns whether it is to be held until `take_ended` names it."""
        request, waits = seq.request, set[str]()
        if (
            request.grammar is not None
            and self._grammars is not None
            and not self._grammars.open(request.request_id, request.tenant_id, request.grammar)
        ):
            waits.add("grammar")
        if self._disk is not None:
            keys, num_blocks = self._blocks.on_disk(seq)
            most_s = self._seconds(seq, num_blocks * BLOCK_SIZE) if keys else 0.0
            whole = not self._blocks.prefix_needs.is_plain  # some come to nothing without the others
            if keys and self._disk.ask(request.request_id, keys, most_s, whole=whole):
                waits.add("disk")
        if waits:
            self._of[request.request_id] = waits
        return bool(waits)

    def take_ended(self) -> list[tuple[str, str | None]]:
        """The requests that wait for nothing any more, and those whose grammar fails, with the reason."""
        ended = [] if self._grammars is None else [("grammar", *each) for each in self._grammars.take_built()]
        if self._disk is not None:
            ended += [("disk", request_id, None) for request_id in self._disk.take_ended()]
        found: list[tuple[str, str | None]] = []
        for what, request_id, error in ended:
            waits = self._of.get(request_id)
            if waits is None:  # its grammar has failed, in this very call
                continue
            waits.discard(what)
            if error is not None or not waits:
                self._of.pop(request_id, None)
                found.append((request_id, error))
        return found

    def next_timeout_s(self) -> float | None:
        """Seconds until `take_ended` may have news by time alone."""
        times = [part.next_timeout_s() for part in (self._grammars, self._disk) if part is not None]
        return min((time for time in times if time is not None), default=None)

    def close_request(self, request_id: str) -> None:
        """A request has ended, whatever it waited for."""
        self._of.pop(request_id, None)
        for part in (self._grammars, self._disk):
            if part is not None:
                part.close_request(request_id)

    def _seconds(self, seq: Sequence, count: int) -> float:
        """Predict what computing `count` positions of a sequence takes, in steps of its own."""
        if self._bound is None:
            return MOST_WAIT_S
        size = min(count, self._max_tokens)
        load = StepLoad().with_prompt(0, size, rank=rank_of(seq))
        return self._bound.times.seconds(load) * count / size
