"""Room that many share, so that nobody can fill it against the others."""

from __future__ import annotations


class Shares:
    """Who holds how much of some room. An owner gets one more as long as it holds less than is free.

    So one alone gets half of the room, two get a third each, and whoever comes late finds some: the dynamic
    thresholds of Choudhury and Hahne ("Dynamic Queue Length Thresholds for Shared-Memory Packet Switches", IEEE/ACM
    Transactions on Networking, 1998) with a factor of 1.
    """

    def __init__(self) -> None:
        self._held: dict[str, int] = {}
        self._total = 0

    def __len__(self) -> int:
        return self._total

    def held(self, owner: str) -> int:
        return self._held.get(owner, 0)

    def take(self, owner: str, capacity: int) -> bool:
        """One more for `owner` of a room for `capacity`; False where it has its share already, or nothing is free."""
        held = self.held(owner)
        if held >= capacity - self._total:
            return False
        self._held[owner] = held + 1
        self._total += 1
        return True

    def give_back(self, owner: str) -> None:
        """One that `owner` has taken."""
        held = self._held[owner] - 1
        if held:
            self._held[owner] = held
        else:
            del self._held[owner]
        self._total -= 1
