"""Keys: shown once, kept as keyed hashes, checked from memory, gone when they must be."""

from __future__ import annotations

import asyncio
import base64
import functools
import logging
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select, update

from loraplex.control.db.tables import ApiKey, Base
from loraplex.control.errors import (
    ControlError,
    DatabaseUnavailable,
    InvalidKey,
    InvalidValue,
    KeyNotFound,
    TenantNotFound,
)
from loraplex.control.rules import InvalidCursor
from loraplex.control.tenancy.key_cache import KeyCache
from loraplex.control.tenancy.keys import Keys
from loraplex.control.types import Limits, Principal
from support.control.plane import ADMIN_TOKEN, PEPPER, ControlPlane


def who(cache: KeyCache, secret: str) -> Principal:
    return asyncio.run(cache.authenticate(secret))


def refused(cache: KeyCache, secret: str) -> str:
    with pytest.raises(InvalidKey) as caught:
        who(cache, secret)
    assert caught.value.code == "invalid_api_key"
    return caught.value.message


def dump(plane: ControlPlane) -> bytes:
    """All that the database keeps: the files of SQLite with their logs, every row of PostgreSQL."""
    files = b"".join(path.read_bytes() for path in plane.root.rglob("control.db*"))
    with plane.database.read() as session:
        tables = [session.execute(table.select()).all() for table in Base.metadata.sorted_tables]
    return files + repr(tables).encode()


def test_a_key_stands_for_its_tenant_with_all_that_was_set(plane: ControlPlane) -> None:
    plane.tenants.update("acme", {"weight": 2.5, "limits": {"max_concurrency": 7}})
    info, secret = plane.keys.create(
        "acme",
        name="ci",
        scopes=["adapters:write", "inference"],
        models=["pirate"],
        limits={"requests_per_minute": 3},
    )
    prefix, key_id, random = secret.split("_", 2)
    assert (prefix, key_id) == ("lpx", info.id)
    assert len(random) >= 43  # 256 bits in base64
    assert who(plane.key_cache(), secret) == Principal(
        tenant_id="acme",
        key_id=info.id,
        scopes=frozenset({"adapters:write", "inference"}),
        models=frozenset({"pirate"}),
        weight=2.5,
        key_limits=Limits(requests_per_minute=3),
        tenant_limits=Limits(max_concurrency=7),
    )
    assert plane.keys.get("acme", info.id) == info
    assert plane.keys.create("acme")[0].scopes == ("inference",)


def test_secrets_are_in_no_file_and_no_log(plane: ControlPlane, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    cache = plane.key_cache()
    info, first = plane.keys.create("acme")
    _, second = plane.keys.rotate("acme", info.id, grace_seconds=60)
    for secret in (first, second, ADMIN_TOKEN):
        who(cache, secret)
    refused(cache, second + "x")
    kept = dump(plane)
    assert info.id.encode() in kept
    for secret in (first, second, ADMIN_TOKEN):
        proof = secret.split("_", 2)[-1]
        assert proof.encode() not in kept
        assert proof not in caplog.text
        assert secret not in repr(plane.keys.list("acme"))
    assert PEPPER not in kept
    assert PEPPER.hex().encode() not in kept


def test_a_stolen_database_is_no_use_without_the_pepper(plane: ControlPlane) -> None:
    _, secret = plane.keys.create("acme")
    other = KeyCache(plane.database, b"another pepper, of another place", ADMIN_TOKEN)
    refused(other, secret)


def test_every_wrong_key_gets_the_same_answer(plane: ControlPlane) -> None:
    cache = plane.key_cache()
    revoked, revoked_secret = plane.keys.create("acme")
    plane.keys.revoke("acme", revoked.id)
    expired, expired_secret = plane.keys.create("acme", expires_at=datetime.now(UTC) + timedelta(hours=1))
    with plane.database.write() as session:
        session.get_one(ApiKey, expired.id).expires_at = datetime.now(UTC) - timedelta(milliseconds=2)
    live, live_secret = plane.keys.create("acme")
    wrong = [
        revoked_secret,
        expired_secret,
        live_secret[:-1],
        live_secret + "A",
        live_secret.upper(),
        f"lpx_{live.id}_",
        f"lpx_{live.id}",
        f"lpx_{'0' * 16}_{'A' * 43}",
        f"lpx_{live.id}\x00_{'A' * 43}",
        ADMIN_TOKEN + "x",
        "",
        "lpx_\ud800_x",
        "x" * 10_000,
    ]
    assert len({refused(cache, secret) for secret in wrong}) == 1
    assert who(cache, live_secret).key_id == live.id


def test_the_admin_token_is_nobodys_tenant(plane: ControlPlane) -> None:
    admin = who(plane.key_cache(), ADMIN_TOKEN)
    assert admin == Principal(None, None, frozenset(), is_admin=True)


def test_a_key_expires_on_time_though_it_is_remembered(plane: ControlPlane) -> None:
    _, secret = plane.keys.create("acme", expires_at=datetime.now(UTC) + timedelta(seconds=1000))
    cache = plane.key_cache(ttl_s=10_000)
    who(cache, secret)
    plane.clock.advance(900)
    who(cache, secret)
    plane.clock.advance(100)
    refused(cache, secret)


def test_the_old_secret_works_for_the_grace_time_and_not_beyond_the_keys_own_end(plane: ControlPlane) -> None:
    info, first = plane.keys.create("acme")
    cache = plane.key_cache(ttl_s=10_000)
    who(cache, first)
    rotated, second = plane.keys.rotate("acme", info.id, grace_seconds=300)
    assert rotated.previous_valid_until is not None
    assert who(cache, first) == who(cache, second)
    plane.clock.advance(301)
    refused(cache, first)
    who(cache, second)
    _, third = plane.keys.rotate("acme", info.id)
    refused(cache, second)
    who(cache, third)

    ending, old = plane.keys.create("acme", expires_at=datetime.now(UTC) + timedelta(hours=1))
    plane.keys.rotate("acme", ending.id, grace_seconds=86400)
    who(cache, old)
    plane.clock.advance(3700)
    refused(cache, old)


def test_revoking_is_at_once_here_and_soon_in_other_processes(plane: ControlPlane) -> None:
    info, secret = plane.keys.create("acme")
    other = ControlPlane(plane.root, clock=plane.clock)
    here, there = plane.key_cache(), other.key_cache()
    who(here, secret)
    who(there, secret)
    revoked = plane.keys.revoke("acme", info.id)
    assert revoked.revoked_at is not None
    assert plane.keys.revoke("acme", info.id) == revoked
    refused(here, secret)
    who(there, secret)  # as remembered
    plane.clock.advance(5)
    refused(there, secret)
    other.close()


def test_a_key_made_after_it_was_guessed_works_at_once(plane: ControlPlane) -> None:
    """Another process knows of it after its time of staleness; here the change itself is noticed."""
    other = ControlPlane(plane.root, clock=plane.clock)
    cache = plane.key_cache()
    refused(cache, "lpx_00_x")
    _, secret = plane.keys.create("acme")
    who(cache, secret)
    info, _ = other.keys.create("acme")
    _, rotated = other.keys.rotate("acme", info.id)
    who(cache, rotated)
    other.close()


def test_changes_of_the_tenant_reach_its_keys(plane: ControlPlane) -> None:
    cache = plane.key_cache()
    _, secret = plane.keys.create("acme")
    who(cache, secret)
    plane.tenants.update("acme", {"weight": 9, "limits": {"requests_per_minute": 5}})
    assert who(cache, secret).weight == 9
    assert who(cache, secret).tenant_limits.requests_per_minute == 5
    plane.tenants.delete("acme")
    refused(cache, secret)


def test_guesses_take_bounded_memory_and_push_out_no_real_key(plane: ControlPlane) -> None:
    info, secret = plane.keys.create("acme")
    cache = plane.key_cache(capacity=50)
    who(cache, secret)

    async def guess() -> None:
        for number in range(300):
            with pytest.raises(InvalidKey):
                await cache.authenticate(f"lpx_{number:016x}_guess")

    asyncio.run(guess())
    assert len(cache._known) <= 51
    other = ControlPlane(plane.root)
    other.keys.revoke("acme", info.id)  # would be seen if the key had to be read again
    other.close()
    assert who(cache, secret).key_id == info.id


def test_many_that_ask_at_once_share_one_reading(plane: ControlPlane, statements: list[str]) -> None:
    _, secret = plane.keys.create("acme")
    cache = plane.key_cache()

    async def storm() -> None:
        hurried = asyncio.create_task(cache.authenticate(secret))
        patient = [asyncio.create_task(cache.authenticate(secret)) for _ in range(100)]
        await asyncio.sleep(0)
        hurried.cancel()
        found = await asyncio.gather(*patient)
        assert {principal.tenant_id for principal in found} == {"acme"}

    asyncio.run(storm())
    readings = [statement for statement in statements if "FROM api_keys" in statement]
    assert 1 <= len(readings) <= 2  # the first reader was cancelled; one of the others reads for all


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"scopes": []}, "scopes"),
        ({"scopes": ["inference", "root"]}, "scopes"),
        ({"models": []}, "models"),
        ({"models": [""]}, "models"),
        ({"models": ["m"] * 1001}, "models"),
        ({"name": "x" * 201}, "name"),
        ({"name": "two\nlines"}, "name"),
        ({"limits": {"requests_per_minute": 0}}, "limits.requests_per_minute"),
        ({"limits": {"max_adapters": 1}}, "limits"),
        ({"limits": {"token_budget": 5}}, "limits.budget_period"),
        ({"expires_at": datetime(2000, 1, 1, tzinfo=UTC)}, "expires_at"),
        ({"expires_at": datetime(2999, 1, 1)}, "expires_at"),
    ],
)
def test_invalid_keys_are_refused(plane: ControlPlane, options: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        plane.keys.create("acme", **options)
    assert caught.value.param == param
    assert plane.keys.list("acme").items == ()
    made, _ = plane.keys.create("acme")
    with pytest.raises(InvalidValue) as caught:
        plane.keys.update("acme", made.id, options)
    assert caught.value.param == param
    assert plane.keys.get("acme", made.id) == made


def test_a_change_is_in_force_at_once_here_and_soon_in_other_processes(plane: ControlPlane) -> None:
    info, secret = plane.keys.create("acme", limits={"requests_per_minute": 3})
    other = ControlPlane(plane.root, clock=plane.clock)
    here, there = plane.key_cache(), other.key_cache()
    before = who(here, secret)
    assert who(there, secret) == before
    end = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=1000)
    changed = plane.keys.update(
        "acme",
        info.id,
        {"limits": {"max_concurrency": 2}, "models": ["pirate"], "scopes": ["usage:read"], "expires_at": end},
    )
    assert changed.limits == Limits(requests_per_minute=3, max_concurrency=2)
    assert changed == plane.keys.get("acme", info.id)
    now = who(here, secret)
    assert (now.key_limits, now.models, now.scopes) == (changed.limits, {"pirate"}, {"usage:read"})
    assert who(there, secret) == before  # as remembered
    plane.clock.advance(5)
    assert who(there, secret) == now
    other.close()


def test_revoked_rights_are_not_served_from_the_cache_in_an_outage(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrowed, secret = plane.keys.create("acme")
    renamed, other = plane.keys.create("acme")
    cache = plane.key_cache()
    for known in (secret, other):
        who(cache, known)
    plane.keys.update("acme", narrowed.id, {"models": ["pirate"]})
    plane.keys.update("acme", renamed.id, {"name": "ci"})

    async def away(*_: Any) -> Any:
        raise DatabaseUnavailable()

    monkeypatch.setattr(plane.database, "look_up", away)
    assert who(cache, other).key_id == renamed.id
    with pytest.raises(DatabaseUnavailable):
        who(cache, secret)


def test_keys_belong_to_their_tenant(plane: ControlPlane) -> None:
    info, secret = plane.keys.create("acme")
    change = functools.partial(plane.keys.update, changes={"name": "x"})
    calls: list[Any] = [plane.keys.get, plane.keys.rotate, plane.keys.revoke, change]
    for call in calls:
        with pytest.raises(KeyNotFound):
            call("rival", info.id)
        with pytest.raises(TenantNotFound):
            call("nobody", info.id)
    with pytest.raises(TenantNotFound):
        plane.keys.create("nobody")
    assert who(plane.key_cache(), secret).tenant_id == "acme"
    assert plane.keys.list("rival").items == ()


def test_a_revoked_key_does_not_come_back(plane: ControlPlane) -> None:
    info, _ = plane.keys.create("acme")
    plane.keys.revoke("acme", info.id)
    with pytest.raises(InvalidValue, match="revoked"):
        plane.keys.update("acme", info.id, {"expires_at": None})
    with pytest.raises(ControlError):
        plane.keys.rotate("acme", info.id)
    for grace in (-1, 31 * 86400):
        with pytest.raises(InvalidValue):
            plane.keys.rotate("acme", info.id, grace_seconds=grace)


@pytest.mark.parametrize("newest_first", [False, True])
def test_keys_are_listed_by_pages_without_gaps(plane: ControlPlane, newest_first: bool) -> None:
    made = [plane.keys.create("acme")[0].id for _ in range(7)]
    with plane.database.write() as session:  # two of one moment
        at = session.scalars(select(ApiKey.created_at).where(ApiKey.id == made[3])).one()
        session.execute(update(ApiKey).where(ApiKey.id == made[4]).values(created_at=at))
    made[3:5] = sorted(made[3:5])
    made = made[::-1] if newest_first else sorted(made)
    plane.keys.create("rival")
    seen: list[str] = []
    cursor = None
    while True:
        page = plane.keys.list("acme", limit=3, cursor=cursor, newest_first=newest_first)
        assert len(page.items) <= 3
        seen += [info.id for info in page.items]
        cursor = page.next_cursor
        if cursor is None:
            break
    assert seen == made


@pytest.mark.parametrize("after", ["\x00", "a\x00", "\ud800", "a\n"])
def test_a_cursor_that_no_list_gave_is_refused_whatever_the_database_takes(
    plane: ControlPlane, after: str
) -> None:
    cursor = base64.urlsafe_b64encode(after.encode("utf-8", "surrogatepass")).decode()
    keys = functools.partial(plane.keys.list, "acme")
    calls: list[Any] = [plane.tenants.list, keys, functools.partial(keys, newest_first=True)]
    for call in calls:
        with pytest.raises(InvalidCursor):
            call(cursor=cursor)


def test_a_cursor_of_another_tenants_key_is_refused(plane: ControlPlane) -> None:
    for key_id in ("nobodys", plane.keys.create("rival")[0].id):
        cursor = base64.urlsafe_b64encode(key_id.encode()).decode()
        with pytest.raises(InvalidCursor):
            plane.keys.list("acme", cursor=cursor, newest_first=True)


def test_two_keys_are_never_alike(plane: ControlPlane) -> None:
    keys = Keys(plane.database, PEPPER)
    assert len({keys.create("acme")[1] for _ in range(50)}) == 50
