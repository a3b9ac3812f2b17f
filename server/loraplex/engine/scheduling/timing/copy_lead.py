"""How much of an adapter's copy to the device the first step that reads it covers."""

from __future__ import annotations

from dataclasses import dataclass

from loraplex.engine.kv.sequence_blocks import SequenceBlocks
from loraplex.engine.scheduling.timing.row_turns import rank_of
from loraplex.engine.scheduling.timing.step_bound import StepBound
from loraplex.engine.scheduling.timing.step_times import StepLoad
from loraplex.engine.types import Sequence


@dataclass(frozen=True, slots=True)
class CopyLead:
    """Predicts first steps by the times of `bound`. `max_tokens`: of a step. Only for devices whose copies take nothing
    from the step beside them (ADR 0073)."""

    bound: StepBound
    max_tokens: int

    def seconds(self, blocks: SequenceBlocks, seq: Sequence) -> float:
        """Predict the first step of a waiting sequence, alone; 0 of one that cannot wait for layers, since it is
        recorded, and of one whose adapter does not act from its first position on. Others' rows make it longer only."""
        start = blocks.num_found(seq)
        count = min(len(seq.token_ids) - start, self.max_tokens)
        sizes = self.bound.times.measured.sizes
        recorded = sizes[-1] if sizes else 0
        if count <= recorded or start < seq.request.adapter_from or seq.measured is not None:
            return 0.0
        load = StepLoad().with_prompt(start, count, rank=rank_of(seq))
        return min(self.bound.times.seconds(load), self.bound.max_s)
