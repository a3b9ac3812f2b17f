"""The prices of sequences' work, charged to their tenants."""

from __future__ import annotations

from dataclasses import dataclass

from loraplex.engine.config import Charges
from loraplex.engine.kv import prefix_keys
from loraplex.engine.scheduling.background_turns import BackgroundTurns
from loraplex.engine.scheduling.fair_queue import FairQueue
from loraplex.engine.types import Sequence
from loraplex.kernels.attention import BLOCK_SIZE


@dataclass(slots=True)
class PrefixUse:
    """Tokens of the prompts that started, and those of them that were found in the prefix cache."""

    queries: int = 0
    hits: int = 0


class SequenceCharges:
    """Charges work in units of a prompt token on the base model, times the price of the sequence's adapter where the
    adapter acts. Shadows are charged to nobody, and lines of batches to their tenants' `turns` in the background."""

    def __init__(self, queue: FairQueue, turns: BackgroundTurns, charges: Charges) -> None:
        self._queue = queue
        self._turns = turns
        self.prices = charges
        self.prefix_use = PrefixUse()

    def begun(self, seq: Sequence) -> None:
        """A sequence starts behind what it found in the prefix cache."""
        if seq.epoch == 0:
            self.prefix_use.queries += seq.num_prompt
            if seq.pooled is not None and seq.num_prompt < BLOCK_SIZE:
                # However short, it takes a place, a block and a vector.
                self.work(seq, (BLOCK_SIZE - seq.num_prompt) * self.prices.prefill)
        self.found(seq)

    def found(self, seq: Sequence) -> None:
        """A sequence, before anything of it is computed, has found its positions up to `num_computed`."""
        if seq.epoch == 0:
            before, seq.num_cached = seq.num_cached, prefix_keys.cached_prompt_tokens(seq)
            self.prefix_use.hits += seq.num_cached - before
        self.prompt(seq, seq.num_computed, self.prices.cached)

    def work(self, seq: Sequence, units: float) -> None:
        """Charge `units` of work at which its adapter acts."""
        adapter = seq.request.adapter
        self._charge(seq, units if adapter is None else units * self.prices.price(adapter.rank))

    def prompt(self, seq: Sequence, end: int, cost: float) -> None:
        """Charge the prompt's positions up to `end` that were not charged yet."""
        end = min(end, seq.num_prompt)
        start = seq.num_charged
        if end <= start:
            return
        seq.num_charged = end
        if (of_base := min(end, seq.request.adapter_from) - start) > 0:
            self._charge(seq, of_base * cost)
            start += of_base
        if end > start:
            self.work(seq, (end - start) * cost)

    def _charge(self, seq: Sequence, units: float) -> None:
        if seq.request.batch:
            self._turns.charge(seq.request.tenant_id, units)
        if not seq.aside:
            self._queue.charge(seq, units)
