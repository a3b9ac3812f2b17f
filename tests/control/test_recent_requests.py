"""Requests that failed or were slow: bounded, and no tenant's flood takes the others' away."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from loraplex.control.recent_requests import (
    KEPT,
    SLOWEST,
    SLOWEST_OF_TENANT,
    EndedRequest,
    RecentRequests,
)
from support.control.requests import ended_request as request

MAX_BYTES = 4 << 20


def failed(number: int, tenant: str = "acme", status: int = 500) -> EndedRequest:
    return request(number, tenant_id=tenant, status=status, code="internal_error", first_token_s=None)


def labels(recent: RecentRequests, **wanted: Any) -> list[str]:
    return [found.label for found in recent.find(**wanted)]


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (200, None, "slow"),
        (200, "adapter_not_finite", "failed"),
        (200, "gone", "refused"),
        (None, "gone", "refused"),
        (None, None, "failed"),
        (429, "rate_limit_exceeded", "refused"),
        (401, "invalid_api_key", "refused"),
        (503, "adapter_unavailable", "failed"),
        (504, "deadline_exceeded", "failed"),
    ],
)
def test_who_failed(status: int | None, code: str | None, kind: str) -> None:
    assert request(status=status, code=code).kind == kind


def test_a_flood_leaves_others_theirs() -> None:
    recent = RecentRequests()
    for number in range(20):
        recent.note(failed(number, "quiet"))
    for number in range(20, 20 + 4 * KEPT):
        recent.note(failed(number, "loud"))
    assert len(labels(recent)) == KEPT
    assert labels(recent, tenant="quiet") == [f"req-{number}" for number in reversed(range(20))]
    assert labels(recent, tenant="loud")[0] == f"req-{19 + 4 * KEPT}"
    # What callers caused does not take the place of what the server did, nor the other way round.
    for number in range(10_000, 10_000 + 4 * KEPT):
        recent.note(failed(number, "quiet", status=429))
    assert len(labels(recent, kind="failed")) == len(labels(recent, kind="refused")) == KEPT
    assert len(labels(recent, tenant="quiet", kind="failed")) == 20


def test_many_tenants_have_equal_parts() -> None:
    recent = RecentRequests()
    for number in range(8 * KEPT):
        recent.note(failed(number, f"t{number % 8}"))
    assert [len(labels(recent, tenant=f"t{one}")) for one in range(8)] == [KEPT // 8] * 8


def test_a_tenant_more_than_there_are_places_is_kept() -> None:
    """The new tenant's request replaces the oldest of all."""
    recent = RecentRequests()
    for number in range(KEPT):
        recent.note(failed(number, f"t{number}"))
    recent.note(failed(KEPT, "late"))
    assert labels(recent, tenant="late") == [f"req-{KEPT}"]
    assert labels(recent, tenant="t0") == []
    assert len(labels(recent)) == KEPT


def test_a_deleted_tenant_is_forgotten_and_leaves_its_room() -> None:
    recent = RecentRequests()
    for number in range(KEPT):
        recent.note(failed(number, "gone" if number % 2 else "acme"))
    recent.note(request(KEPT, tenant_id="gone"))
    recent.forget("gone")
    recent.forget("nobody")
    assert labels(recent, tenant="gone") == []
    assert len(labels(recent)) == KEPT // 2
    for number in range(KEPT, 2 * KEPT):
        recent.note(failed(number, "acme"))
    assert len(labels(recent)) == KEPT


def test_the_slowest_of_each_minute_stay() -> None:
    recent = RecentRequests()
    for number in range(200):
        recent.note(request(number, first_token_s=number % 100 / 100))
    assert sorted(found.first_token_s or 0 for found in recent.find(kind="slow")) == sorted(
        [0.99, 0.98, 0.97, 0.96] * 2
    )
    recent.note(request(300, first_token_s=0.01, tenant_id="quick"))
    assert labels(recent, tenant="quick") == ["req-300"]
    # The next minute begins with none, and those of this one stay.
    recent.note(request(400, at=1_000_060.0, first_token_s=0.02))
    assert len(labels(recent, kind="slow")) == SLOWEST_OF_TENANT + 2
    assert labels(recent)[0] == "req-400"


def test_a_slow_tenant_leaves_others_their_part_of_a_minute() -> None:
    recent = RecentRequests()
    for number in range(1000):
        recent.note(request(number, tenant_id="loud", first_token_s=60.0))
    for number in range(1000, 1100):
        recent.note(request(number, tenant_id=f"t{number % 3}", first_token_s=0.1 + number / 1e4))
    assert len(labels(recent)) == SLOWEST == 4 * SLOWEST_OF_TENANT
    for tenant in ("loud", "t0", "t1", "t2"):
        assert len(labels(recent, tenant=tenant)) == SLOWEST_OF_TENANT
    for number in range(2000, 2100):
        recent.note(request(number, tenant_id="quick", first_token_s=0.01))
    assert labels(recent, tenant="quick") == []
    # A request without a token has no wait for it.
    recent.note(request(3000, first_token_s=None, tenant_id="vectors"))
    assert labels(recent, tenant="vectors") == []


def test_filters() -> None:
    recent = RecentRequests()
    recent.note(failed(1, status=503))
    recent.note(request(2, adapter="other", status=404, code="model_not_found"))
    recent.note(request(3, tenant_id="rival", adapter="support", version=4))
    recent.note(
        request(
            4, label="mine-1-2", adapter=None, version=0, status=401, code="invalid_api_key", tenant_id=""
        )
    )
    assert labels(recent) == ["mine-1-2", "req-3", "req-2", "req-1"]
    assert labels(recent, adapter="support") == ["req-3", "req-1"]
    assert labels(recent, adapter="support@v4") == ["req-3"]
    assert labels(recent, adapter="support@v") == labels(recent, adapter="support")
    assert labels(recent, adapter="supp") == []
    assert labels(recent, status=503) == ["req-1"]
    assert labels(recent, tenant="rival", kind="failed") == []
    assert labels(recent, request_id="mine-1-2") == ["mine-1-2"]
    for asked in ("req-1", f"{1:032x}", f"chatcmpl-{1:032x}"):
        assert labels(recent, request_id=asked) == ["req-1"]
    assert labels(recent, request_id="req") == []
    place = recent.find()[1].place
    assert labels(recent, before=place) == ["req-2", "req-1"]


def test_memory_is_bounded() -> None:
    """With the longest texts that an edge lets in, of as many tenants as there is room for."""
    recent = RecentRequests()
    tracemalloc.start()
    try:
        for number in range(3 * KEPT):
            for status, code in ((200, None), (500, "internal_error"), (429, "rate_limit_exceeded")):
                own = f"{number:0128d}"
                recent.note(
                    request(
                        number,
                        label=own,
                        id=own[-32:],
                        at=60.0 * number / 8,
                        tenant_id=own[-63:],
                        key_id=own[-16:],
                        route="/é" * 32 + own[-4:],
                        model="\U0001f600" * 80 + own[-4:],
                        adapter=own[-63:],
                        status=status,
                        code=code,
                        first_token_s=0.5 + number,
                        total_s=1.5 + number,
                        queue_s=0.25 + number,
                        load_s=0.125 + number,
                        trace_id=own[-32:],
                    )
                )
        assert len(recent.find()) >= 3 * KEPT
        assert tracemalloc.get_traced_memory()[0] < MAX_BYTES
    finally:
        tracemalloc.stop()
