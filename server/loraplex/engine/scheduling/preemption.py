"""Which requests are preempted for others.

A tenant's share is the larger of its fraction of the places in the batch and of the KV blocks, over its weight: the
dominant share of Ghodsi et al., "Dominant Resource Fairness" (NSDI 2011). A sequence of the tenant with the largest
share is preempted, whether that tenant fills the batch with many sequences or with long ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from loraplex.engine.types import Sequence


@dataclass(slots=True)
class _Holding:
    """Places and blocks of a tenant's running sequences."""

    weight: float
    sequences: int = 0
    blocks: int = 0


class TenantShares:
    """Each tenant's share of `max_running` places and `num_blocks` blocks, over its `weight`. Blocks that several
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
            holding.blocks += seq.num_held

    def of(self, tenant_id: str) -> float:
        """The share of a tenant with a running sequence."""
        holding = self._holdings[tenant_id]
        return self._share(holding.sequences, holding.blocks, holding.weight)

    def with_one_more(self, seq: Sequence, blocks: int) -> float:
        """The share of a waiting sequence's tenant, if that sequence had a place and `blocks` blocks."""
        tenant_id = seq.request.tenant_id
        holding = self._holdings.get(tenant_id) or _Holding(self._weight(tenant_id))
        return self._share(holding.sequences + 1, holding.blocks + blocks, holding.weight)

    def without(self, seq: Sequence) -> float:
        """The share of a running sequence's tenant without that sequence."""
        holding = self._holdings[seq.request.tenant_id]
        return self._share(holding.sequences - 1, holding.blocks - seq.num_held, holding.weight)

    def remove_sequence(self, seq: Sequence) -> None:
        """Subtract a sequence that is preempted."""
        holding = self._holdings[seq.request.tenant_id]
        holding.sequences -= 1
        holding.blocks -= seq.num_held

    def _share(self, sequences: int, blocks: int, weight: float) -> float:
        return max(sequences / self._max_running, blocks / self._num_blocks) / weight


def preemption_order(seqs: Iterable[Sequence], shares: TenantShares) -> list[Sequence]:
    """The order of preemption: sequences of the tenant with the largest share first, within a tenant the least urgent
    first, then the latest."""
    return sorted(
        seqs,
        key=lambda seq: (shares.of(seq.request.tenant_id), -seq.request.priority, seq.order),
        reverse=True,
    )


def choose_victims(
    head: Sequence,
    blocks: int,
    victims: Iterable[Sequence],
    shares: TenantShares,
    is_enough: Callable[[Sequence], bool],
) -> list[Sequence]:
    """The sequences of `victims` to preempt so that `head`, which needs this number of `blocks`, can start. `is_enough`
    is called for each that is chosen, and returns whether those chosen so far free enough. If all that may be chosen
    are not enough, none is preempted.

    Each victim is of the tenant with the largest share, and leaves this tenant with at least the share that the head's
    tenant then has. Shares only become more equal, so that no two tenants can preempt each other in turn. A head that
    was preempted itself needs victims whose tenants keep at least twice its share; else tenants would take a place from
    each other in a circle.
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
        shares.remove_sequence(victim)
        chosen.append(victim)
        if is_enough(victim):
            return chosen
