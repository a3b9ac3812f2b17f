"""The limiter interface: in this process, or shared by all servers."""

from __future__ import annotations

from typing import Literal, Protocol

from loraplex.control.limits.plan import LimitPlan
from loraplex.control.types import Decision


class Limiter(Protocol):
    """`tests/control/limits/test_limiters.py` says what each of them holds. `name` distinguishes them in metrics."""

    name: str

    async def start(self) -> None:
        """Before the first decision. Raises LimitsNotShared where it cannot decide."""
        ...

    async def reserve(self, request_id: str, plan: LimitPlan) -> Decision:
        """Take all that the plan charges, in one step, or nothing. `request_id` is the server's own and unique; the
        same one again, while it is not settled, takes nothing more.

        Raises RateLimited with the time after which the same plan passes if nothing else comes; for places, where
        it cannot be known, `PLACE_RETRY_S`. Of several limits that are reached the longest time.
        """
        ...

    async def settle(self, *request_ids: str, used_tokens: int | None) -> None:
        """Give back what was reserved under these ids and not used, and the places, in one step. None: nothing came of
        them, and all is given back, as if it had never been. What is settled already, or was never reserved, changes
        nothing.

        What has flowed back by itself is not given back again: each rate is then as it would be had only what was used
        been charged at the time of the reservation.
        """
        ...

    def warning(self) -> str | None:
        """Why limits that servers should share are not shared now; None where nothing is wrong."""
        ...

    async def close(self) -> None:
        """Settle what is reserved, and end."""
        ...


PLACE_RETRY_S = 1.0
"""When a running request ends cannot be known."""
WhenApart = Literal["strict", "share", "open"]
"""The mode of a server that cannot reach the Redis of the limits: `strict` refuses limited requests, `share` spends its
own share of each limit, `open` spends each whole limit."""
