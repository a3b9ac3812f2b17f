"""Requests to the data plane that lately failed or were slow, in the server's memory: a bounded number, shared by the
tenants, without any text of a prompt or an answer."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from typing import Literal, get_args

import msgspec

Kind = Literal["failed", "refused", "slow"]
KEPT = 512
"""Requests of each kind that are kept."""
SLOWEST = 32
"""Requests of one minute that count as slow."""
SLOWEST_OF_TENANT = 8
"""Those of one tenant among them."""
LEFT = ("gone", "stalled")
"""Codes of requests whose client went away, or read nothing."""


class EndedRequest(msgspec.Struct, frozen=True, gc=False):
    """One ended request. Times are in seconds from its arrival; None where it did not come so far."""

    label: str
    """The value of `x-request-id`: the client's own id, or one of ours."""
    id: str
    """Our own id, in the answer's `id` and in the usage ledger."""
    at: float
    """When it ended, in seconds since 1970."""
    tenant_id: str
    """Empty where the secret was none."""
    key_id: str
    """Empty where the secret was none."""
    route: str
    model: str | None
    """The model that was asked for, where it was not found or not looked for."""
    adapter: str | None
    """`BASE` for the base model; None where the model is not known."""
    version: int
    """0 for the base model."""
    status: int | None
    """HTTP status; None where no answer began."""
    code: str | None
    """Why it ended early: an error's code, or one of `LEFT`."""
    total_s: float
    queue_s: float | None
    """The longest time in the engine's queue of its sequences."""
    load_s: float | None
    """The part of it that one waited for its adapter."""
    first_token_s: float | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    trace_id: str | None
    """OpenTelemetry's, where the request is recorded."""

    @property
    def place(self) -> tuple[int, str]:
        """The key that the list is sorted by: microseconds since 1970, and the id of the request."""
        return round(self.at * 1e6), self.id

    @property
    def kind(self) -> Kind:
        """`failed`: by the server. `refused`: by what its caller sent, may do, or has left, or given up by the
        caller."""
        if self.code in LEFT or (self.status is not None and 400 <= self.status < 500):
            return "refused"
        return "slow" if self.code is None and self.status is not None and self.status < 400 else "failed"


class _SharedRing:
    """The newest requests. Where it is full, a tenant with more than an equal part replaces its own oldest, and another
    one that of the tenant with the most; of several such, of the one without a new one for longest."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._num_kept = 0
        self._by_tenant: dict[str, deque[EndedRequest]] = {}  # those with the newest last

    def __iter__(self) -> Iterator[EndedRequest]:
        for kept in self._by_tenant.values():
            yield from kept

    def forget(self, tenant: str) -> None:
        """Drop a tenant's requests."""
        self._num_kept -= len(self._by_tenant.pop(tenant, ()))

    def append(self, request: EndedRequest) -> None:
        own = self._by_tenant.pop(request.tenant_id, None) or deque()
        own.append(request)
        self._by_tenant[request.tenant_id] = own
        if self._num_kept < self._capacity:
            self._num_kept += 1
            return
        most = request.tenant_id
        if len(own) == 1 or len(own) * len(self._by_tenant) <= self._capacity:
            longest = max(map(len, self._by_tenant.values()))
            most = next(tenant for tenant, kept in self._by_tenant.items() if len(kept) == longest)
        self._by_tenant[most].popleft()
        if not self._by_tenant[most]:
            del self._by_tenant[most]


class RecentRequests:
    """The last requests, at most `KEPT` of each kind. Slow are those of each minute that waited longest for their first
    token, at most `SLOWEST_OF_TENANT` of a tenant. To be called by one thread."""

    def __init__(self) -> None:
        self._rings = {kind: _SharedRing(KEPT) for kind in get_args(Kind)}
        self._minute = 0
        self._slowest: list[tuple[float, tuple[int, str], EndedRequest]] = []  # of this minute, a heap

    def note(self, request: EndedRequest) -> None:
        """A request has ended."""
        kind = request.kind
        if kind != "slow":
            self._rings[kind].append(request)
        elif request.first_token_s is not None:
            self._note_answered(request, request.first_token_s)

    def forget(self, tenant: str) -> None:
        """Drop the requests of a tenant that was deleted."""
        for ring in self._rings.values():
            ring.forget(tenant)
        self._slowest = [entry for entry in self._slowest if entry[2].tenant_id != tenant]
        heapq.heapify(self._slowest)

    def _note_answered(self, request: EndedRequest, waited_s: float) -> None:
        if (minute := int(request.at // 60)) != self._minute:
            for _, _, slow in sorted(self._slowest, key=lambda entry: entry[1]):
                self._rings["slow"].append(slow)
            self._slowest.clear()
            self._minute = minute
        slowest, is_full = self._slowest, len(self._slowest) == SLOWEST
        if is_full and waited_s <= slowest[0][0]:
            return
        own = [entry for entry in slowest if entry[2].tenant_id == request.tenant_id]
        if len(own) == SLOWEST_OF_TENANT:
            if waited_s <= (fastest := min(own))[0]:
                return
            slowest.remove(fastest)
            heapq.heapify(slowest)
        elif is_full:
            heapq.heappop(slowest)
        heapq.heappush(slowest, (waited_s, request.place, request))

    def find(
        self,
        *,
        tenant: str | None = None,
        adapter: str | None = None,
        status: int | None = None,
        kind: Kind | None = None,
        request_id: str | None = None,
        before: tuple[int, str] | None = None,
    ) -> list[EndedRequest]:
        """Those that fit, the newest first; only those whose place is before `before`. `adapter` is a name, or a name
        with a version as in `support@v3`; `request_id` is either of the two ids, or an answer's."""
        name, _, version = (adapter or "").partition("@v")
        own_id = None if request_id is None else request_id.rpartition("-")[2]

        def fits(request: EndedRequest) -> bool:
            return (
                (before is None or request.place < before)
                and (tenant is None or request.tenant_id == tenant)
                and (adapter is None or request.adapter == name)
                and (not version or str(request.version) == version)
                and (status is None or request.status == status)
                and (request_id is None or request_id == request.label or own_id == request.id)
            )

        found = [request for one in get_args(Kind) if kind in (None, one) for request in self._rings[one]]
        if kind in (None, "slow"):
            found += [request for _, _, request in self._slowest]
        return sorted(filter(fits, found), reverse=True, key=lambda request: request.place)
