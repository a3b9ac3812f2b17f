"""Worker threads that tenants share in turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar
from weakref import WeakValueDictionary

import anyio
import anyio.to_thread

T = TypeVar("T")


class TenantThreads:
    """`threads` worker threads. No tenant has more than half of them at a time, or one if there is one alone.

    A tenant's own calls wait for one another before they wait for a thread. So few of them stand among those of other
    tenants, however many it makes. For one event loop.
    """

    def __init__(self, threads: int) -> None:
        self._threads = anyio.CapacityLimiter(threads)
        self._share = max(1, threads // 2)
        self._of_tenant: WeakValueDictionary[str, anyio.CapacityLimiter] = WeakValueDictionary()

    async def run(self, tenant_id: str, function: Callable[..., T], *args: object) -> T:
        """`function(*args)` in a worker thread, in its tenant's turn. Raises what it raises. A caller that is cancelled
        waits for the end of what has begun."""
        limiter = self._of_tenant.get(tenant_id)
        if limiter is None:
            limiter = self._of_tenant[tenant_id] = anyio.CapacityLimiter(self._share)
        async with limiter:
            return await anyio.to_thread.run_sync(function, *args, limiter=self._threads)
