"""Who gives up its place in the batch.

A tenant's share is the larger of its parts of the places and of the KV blocks, over its weight: the dominant share of
Ghodsi et al., "Dominant Resource Fairness" (NSDI 2011). Where somebody has to go, it is a sequence of the tenant with
the largest share. So a tenant that fills the batch makes room for others, whatever it fills it with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from loraplex.engine.types import Sequence


@dataclass(slots=True)
class _Holding:
    """What the running sequences of a tenant hold."""

    weight: float
    sequences: int = 0
    blocks: int = 0


class Shares:
    """What each tenant holds of `max_running` places and `num_blocks` blocks, over its `weight`. Blocks that several
    sequences share count for each of them."""

    def __init__(
        self,
        running: Iterable[Sequence],
        max_running: int,
        num_blocks: int,
        weight: Callable[[str], float],
    ) -> None:
        self._max_running = max_running
        self._num_blocks = num_blocks
        self._weight = weight
        self._holdings: dict[str, _Holding] = {}
        for seq in running:
            tenant_id = seq.request.tenant_id
            holding = self._holdings.get(tenant_id)
            if holding is None:
                holding = self._holdings[tenant_id] = _Holding(weight(tenant_id))
            holding.sequences += 1
            holding.blocks += len(seq.block_ids)

    def of(self, tenant_id: str) -> float:
        """The share of a tenant with a running sequence."""
        holding = self._holdings[tenant_id]
        return self._share(holding.sequences, holding.blocks, holding.weight)

    def with_one_more(self, seq: Sequence, blocks: int) -> float:
        """The share of its tenant if a waiting sequence had a place and so many blocks."""
        tenant_id = seq.request.tenant_id
        holding = self._holdings.get(tenant_id) or _Holding(self._weight(tenant_id))
        return self._share(holding.sequences + 1, holding.blocks + blocks, holding.weight)

    def without(self, seq: Sequence) -> float:
        """The share of its tenant if a running sequence had gone."""
        holding = self._holdings[seq.request.tenant_id]
        return self._share(holding.sequences - 1, holding.blocks - len(seq.block_ids), holding.weight)

    def yields(self, seq: Sequence) -> None:
        """A running sequence goes: take it out of the account."""
        holding = self._holdings[seq.request.tenant_id]
        holding.sequences -= 1
        holding.blocks -= len(seq.block_ids)

    def _share(self, sequences: int, blocks: int, weight: float) -> float:
        return max(sequences / self._max_running, blocks / self._num_blocks) / weight


def most_expendable(seqs: Iterable[Sequence], shares: Shares) -> list[Sequence]:
    """In the order in which they are to be preempted: those of the tenant with the largest share first, of a tenant's
    the least urgent, then the latest."""
    return sorted(
        seqs,
        key=lambda seq: (shares.of(seq.request.tenant_id), -seq.request.priority, seq.order),
        reverse=True,
    )


def claim(
    head: Sequence,
    blocks: int,
    victims: Iterable[Sequence],
    shares: Shares,
    is_enough: Callable[[Sequence], bool],
) -> list[Sequence]:
    """Which of these `victims`, of tenants that got no less service than its own, a waiting sequence that needs this
    number of blocks may have preempted to start. `is_enough` is told of each that is chosen, and says whether those
    chosen until then make room for it. If all that may be chosen do not, none are: nobody is preempted in vain.

    One that was preempted itself may have them of tenants that are left with twice as much: else a place that was taken
    is taken back, and goes round.

    Each is of the tenant with the largest share, and leaves it with as much as the waiting one's tenant then has at
    least. What is held only becomes more equal, so that no two tenants can preempt each other in turn.
    """
    tenants: dict[str, list[Sequence]] = {}
    for victim in victims:
        if victim.request.tenant_id != head.request.tenant_id:
            tenants.setdefault(victim.request.tenant_id, []).append(victim)
    for seqs in tenants.values():
        seqs.sort(key=lambda seq: (-seq.request.priority, seq.order))
    least = shares.with_one_more(head, blocks)
    if head.epoch:
        least *= 2
    chosen: list[Sequence] = []
    while True:
        able = [
            tenant_id for tenant_id, seqs in tenants.items() if seqs and shares.without(seqs[-1]) >= least
        ]
        if not able:
            return []
        victim = tenants[max(able, key=shares.of)].pop()
        shares.yields(victim)
        chosen.append(victim)
        if is_enough(victim):
            return chosen
