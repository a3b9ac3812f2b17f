"""A row of a step that a token is sampled from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from loraplex.engine.types import EngineRequest, ScheduledSequence


@dataclass(slots=True, eq=False)
class SampledRow:
    """One of the rows that a slice samples from: number `offset` of them, 0 for the first. It stands behind `offset`
    drafted tokens, and what it samples is of use only if all of these are accepted. Nobody changes it; a frozen one
    takes three times as long to make."""

    scheduled: ScheduledSequence
    offset: int = 0

    @property
    def request(self) -> EngineRequest:
        return self.scheduled.request

    @property
    def request_id(self) -> str:
        return self.scheduled.request.request_id

    @property
    def sequence(self) -> tuple[str, int]:
        """A name that no other sequence has: a request's id may come again."""
        return self.scheduled.request.request_id, self.scheduled.order

    @property
    def num_prompt(self) -> int:
        return len(self.scheduled.request.prompt_ids)

    @property
    def output_index(self) -> int:
        """The number of the output token that it samples, from 0."""
        return self.scheduled.output_index + self.offset

    @property
    def outputs(self) -> tuple[int, ...]:
        """The collected tokens of the answer, where the slice tells them."""
        return self.scheduled.outputs

    @property
    def drafted(self) -> tuple[int, ...]:
        """The tokens that the row assumes behind the collected ones."""
        return self.scheduled.drafted[: self.offset]

    @property
    def pending_input(self) -> bool:
        return self.scheduled.pending_input


def sampled_rows(slices: Iterable[ScheduledSequence]) -> list[SampledRow]:
    """The rows of slices that sample, in their order."""
    return [SampledRow(part, offset) for part in slices for offset in range(1 + len(part.drafted))]
