"""A capacity that owners share fairly: no owner can fill it against the others."""

from __future__ import annotations


class FairShare:
    """How much of a capacity each owner holds. An owner gets one more as long as it holds less than is free.

    So a single owner gets half of the capacity, two get a third each, and a late one finds some left: the dynamic
    thresholds of Choudhury and Hahne ("Dynamic Queue Length Thresholds for Shared-Memory Packet Switches", IEEE/ACM
    Transactions on Networking, 1998) with a factor of 1.
    """

    def __init__(self) -> None:
        self._held: dict[str, int] = {}
        self._total = 0

    def __len__(self) -> int:
        return self._total

    @property
    def owners(self) -> set[str]:
        """Those that hold something."""
        return set(self._held)

    def held(self, owner: str) -> int:
        return self._held.get(owner, 0)

    def share(self, owner: str, capacity: int) -> int:
        """The part of `capacity` for `owner`, and for each holder, if all take as much as they can."""
        holders = len(self._held) + (owner not in self._held)
        return capacity // (holders + 1)

    def is_beyond_share(self, owner: str, capacity: int, amount: int = 1) -> bool:
        """Whether `amount` more for `owner` are beyond its share of `capacity`. If not, and `acquire` refuses it,
        others hold too much."""
        return self.held(owner) + amount > self.share(owner, capacity)

    def acquire(self, owner: str, capacity: int, amount: int = 1) -> bool:
        """Take `amount` more (1 or more) of `capacity` for `owner`, as if taken one by one, or none: False if that is
        more than its share, or than is free."""
        held = self.held(owner)
        if held + 2 * (amount - 1) >= capacity - self._total:
            return False
        self._held[owner] = held + amount
        self._total += amount
        return True

    def release(self, owner: str, amount: int = 1) -> None:
        """Give back `amount` that `owner` has taken."""
        held = self._held[owner] - amount
        if held:
            self._held[owner] = held
        else:
            del self._held[owner]
        self._total -= amount
