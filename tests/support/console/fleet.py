"""A server with 40 tenants and 500 adapters. The newest version of one of them fails.

with fleet(tmp_path) as server:
    screen.sign_in(f"{server.admin_url}/", ADMIN_TOKEN, "now")
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, timedelta
from pathlib import Path

import msgspec
from sqlalchemy import insert

from loraplex.control.db.tables import Budget, Usage
from loraplex.control.history.history import SLICE_S
from loraplex.control.limits.periods import EVER
from support.control.many_adapters import copy_adapter
from support.control.usage import ended
from support.http.admin_plane import ADMIN_TOKEN
from support.http.whole_server import WholeServer, bearer, whole_server

NAMES = [(f"tenant-{number % 40:02}", f"adapter-{number:03}") for number in range(500)]
TENANTS = sorted({tenant for tenant, _ in NAMES})
HURT = NAMES[217]
"""Its release is on its way: half of its requests get v2, of whose requests three times as many fail."""
NEIGHBOUR = NAMES[257]
"""Another adapter of the same tenant."""
BUDGET, SPENT = 1_000_000, 970_000
"""Tokens of that tenant's budget."""
EVERY = 50
"""The requests of every adapter to each one that fails."""
_MINUTES, _BUSY_SLICES = 20, 10
"""Minutes of the past, and slices of the last five minutes in which requests ended."""


@contextmanager
def fleet(root: Path) -> Iterator[WholeServer]:
    """Requests of different numbers ended in the last 25 minutes; the newest version fails since five."""
    with whole_server(root) as running:
        for tenant in TENANTS:
            running.plane.make_tenant(tenant)
        limits = {"token_budget": BUDGET, "budget_period": "forever"}
        running.plane.services.tenants.update(HURT[0], changes={"limits": limits}, reservable=None)
        running.plane.make_adapter(NAMES[0][1], NAMES[0][0])
        others = [name for name in NAMES[1:] if name != HURT]
        copy_adapter(running.plane.database, NAMES[0], others)
        _release(running)
        _fill_ledger(running)
        running.call(lambda: _fill_history(running))
        yield running
        running.settle()


def _release(running: WholeServer) -> None:
    """Half of the hurt adapter's users are on its new version."""
    tenant, name = HURT
    for seed in (1, 2):
        running.plane.make_adapter(name, tenant, seed=seed)
    body = {
        "targets": [{"version": "v1", "weight": 50}, {"version": "v2", "weight": 50}],
        "sticky": "user",
        "schedule": [{"weight": 50, "for_seconds": 3600}],
    }
    url = f"{running.admin_url}/admin/v1/tenants/{tenant}/adapters/{name}/release"
    answer = running.http.put(url, json=body, headers=bearer(ADMIN_TOKEN))
    assert answer.status_code == 200, answer.text


def _fill_ledger(running: WholeServer) -> None:
    at = datetime.datetime.now(UTC) - timedelta(minutes=2)
    rows = [
        ended(
            at=at,
            tenant_id=tenant,
            adapter=name,
            version=version,
            first_token_s=0.2,
            status="internal_error" if number % every == every - 1 else "stop",
        )
        for tenant, name in NAMES
        for version, every in _versions(tenant, name)
        for number in range(100 if (tenant, name) == HURT else 4)
    ]
    spent = {"owner_kind": "tenant", "owner_id": HURT[0], "period": "forever", "starts_at": EVER}
    with running.plane.database.write() as session:
        session.execute(insert(Usage), [msgspec.structs.asdict(row) for row in rows])
        session.execute(insert(Budget), [spent | {"tenant_id": HURT[0], "spent": SPENT}])


def _versions(tenant: str, name: str) -> list[tuple[int, int]]:
    """The versions that are asked now, and of how many requests of each one fails."""
    return [(1, EVERY), (2, EVERY // 3)] if (tenant, name) == HURT else [(1, EVERY)]


async def _fill_history(running: WholeServer) -> None:
    history = running.apps.shared.history
    began = history.clock() // 60 * 60 + 60
    asked: dict[tuple[str, str, int], int] = {}

    def ask(tenant: str, name: str, version: int, number: int, every: int) -> None:
        before = asked.get((tenant, name, version), 0)
        asked[tenant, name, version] = before + number
        for place in range(before, before + number):
            history.count(
                tenant,
                (name, version),
                failed=place % every == every - 1,
                computed=200,
                cached=100,
                output=50,
                first_token_s=0.05 * (1 + place % 6),
                gap_s=0.012 + 0.001 * (place % 20),
            )

    for minute in range(_MINUTES):
        history.clock = _at(began + 60.0 * minute)
        for tenant, name in NAMES:
            ask(tenant, name, 1, 10, EVERY)
    now = began + 60.0 * _MINUTES
    for busy in range(_BUSY_SLICES):
        history.clock = _at(now + 3 * SLICE_S * busy)
        for number, (tenant, name) in enumerate(NAMES):
            versions = _versions(tenant, name)
            # The one that fails is none of the busiest, and has fewer errors than those.
            share = (10 + 10 * ((number + 5) % 11)) // len(versions)
            for version, every in versions:
                ask(tenant, name, version, share, every)
    history.clock = _at(now + 300.0)


def _at(time_s: float) -> Callable[[], float]:
    return lambda: time_s
