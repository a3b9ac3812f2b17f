"""A key's life by the database's clock, when it was last used, and the pepper that its servers share."""

from __future__ import annotations

import asyncio
import hmac
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import event, text

from loraplex.control.db.database import Database
from loraplex.control.db.tables import ApiKey
from loraplex.control.errors import InvalidKey, InvalidValue, PepperChanged
from loraplex.control.tenancy.key_cache import KeyCache
from loraplex.control.tenancy.key_use import MAX_ROWS, KeyUse
from loraplex.control.tenancy.keys import Keys
from loraplex.control.tenancy.pepper import check_pepper
from loraplex.control.tenancy.secrets import load_pepper
from support.control.plane import ADMIN_TOKEN, PEPPER, ControlPlane


def who(cache: KeyCache, secret: str) -> str | None:
    return asyncio.run(cache.authenticate(secret)).key_id


def refused(cache: KeyCache, secret: str) -> bool:
    try:
        asyncio.run(cache.authenticate(secret))
    except InvalidKey:
        return True
    return False


def with_clock_ahead(plane: ControlPlane, hours: int) -> Database:
    """The same database as seen by a server whose database's clock is `hours` ahead of the machine's."""
    if plane.database.on_postgres:
        # A schema of our own before PostgreSQL's shadows its function.
        with plane.database.write() as session:
            session.execute(text("CREATE SCHEMA IF NOT EXISTS skewed"))
            session.execute(
                text(
                    "CREATE OR REPLACE FUNCTION skewed.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS "
                    f"$$ SELECT pg_catalog.clock_timestamp() + interval '{hours} hours' $$"
                )
            )
        return Database(plane.url + "?options=-csearch_path%3Dskewed,public,pg_catalog")
    database = Database(plane.url)

    def skew(connection: Any, _record: object) -> None:
        def strftime(form: str, _moment: str) -> str:
            shown = datetime.now(UTC) + timedelta(hours=hours)
            return shown.strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]

        connection.create_function("strftime", 2, strftime)

    event.listen(database._engine, "connect", skew)
    return database


@pytest.mark.parametrize("hours", [-3, 3])
def test_the_databases_clock_decides_when_a_key_ends(plane: ControlPlane, hours: int) -> None:
    database = with_clock_ahead(plane, hours)
    keys = Keys(database, PEPPER)
    there = datetime.now(UTC) + timedelta(hours=hours)
    with pytest.raises(InvalidValue, match="past"):
        keys.create("acme", expires_at=there - timedelta(minutes=1))
    info, secret = keys.create("acme", expires_at=there + timedelta(hours=1))
    assert abs((info.created_at - there).total_seconds()) < 60
    cache = KeyCache(database, PEPPER, ADMIN_TOKEN, clock=plane.clock)
    assert who(cache, secret) == info.id
    plane.clock.advance(3500)
    assert who(cache, secret) == info.id
    plane.clock.advance(200)
    # It is read again, and the database says that it has an hour left, which is true: only our own clock ran.
    assert who(cache, secret) == info.id
    with database.write() as session:
        session.get_one(ApiKey, info.id).expires_at = there - timedelta(minutes=1)
    assert refused(cache, secret)
    rotated, old = keys.create("acme")
    rotated, _ = keys.rotate("acme", rotated.id, grace_seconds=600)
    assert rotated.previous_valid_until is not None
    assert abs((rotated.previous_valid_until - there).total_seconds() - 600) < 60
    assert who(cache, old) == rotated.id
    revoked = keys.revoke("acme", rotated.id)
    assert revoked.revoked_at is not None
    assert abs((revoked.revoked_at - there).total_seconds()) < 60
    database.close()


def test_a_remembered_key_ends_on_time_between_two_readings(plane: ControlPlane) -> None:
    """The time it had left by the database's clock runs down on ours."""
    info, secret = plane.keys.create("acme", expires_at=datetime.now(UTC) + timedelta(seconds=1000))
    cache = plane.key_cache(ttl_s=10_000)
    assert who(cache, secret) == info.id
    plane.clock.advance(900)
    assert who(cache, secret) == info.id
    plane.clock.advance(101)
    assert refused(cache, secret)


def test_rotating_twice_ends_the_first_secret_whatever_grace_it_had(plane: ControlPlane) -> None:
    info, first = plane.keys.create("acme")
    cache = plane.key_cache()
    _, second = plane.keys.rotate("acme", info.id, grace_seconds=3600)
    assert who(cache, first) == who(cache, second) == info.id
    _, third = plane.keys.rotate("acme", info.id, grace_seconds=60)
    assert refused(cache, first)
    assert who(cache, second) == who(cache, third) == info.id
    shown, fourth = plane.keys.rotate("acme", info.id)
    assert shown.previous_valid_until is None
    assert [refused(cache, secret) for secret in (first, second, third)] == [True] * 3
    assert who(cache, fourth) == info.id


def test_an_unknown_id_takes_the_work_of_a_known_one(
    plane: ControlPlane, statements: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    info, _ = plane.keys.create("acme")
    real, compared = hmac.compare_digest, []

    def compare(one: Any, other: Any) -> bool:
        compared.append((len(one), len(other)))
        return real(one, other)

    work = []
    for guess in (f"lpx_{info.id}_{'A' * 43}", f"lpx_{'0' * 16}_{'A' * 43}"):
        cache = plane.key_cache()
        statements.clear()
        compared.clear()
        monkeypatch.setattr(hmac, "compare_digest", compare)
        assert refused(cache, guess)
        monkeypatch.undo()
        work.append((len([s for s in statements if "api_keys" in s]), list(compared)))
    assert work[0] == work[1]
    assert work[0] == (1, [(64, 64)] * 3)  # the admin token's, the secret's, the previous one's


# When it was last used.


def test_uses_are_written_in_batches_and_not_on_the_way_of_a_request(
    plane: ControlPlane, statements: list[str]
) -> None:
    made = [plane.keys.create("acme") for _ in range(3)]
    use = KeyUse(plane.database, clock=plane.clock)
    cache = plane.key_cache(on_use=use.note)
    revision = plane.database.revision
    for _ in range(5):
        for _, secret in made[:2]:
            who(cache, secret)
    assert refused(cache, made[2][1] + "x")
    assert [plane.keys.get("acme", info.id).last_used_at for info, _ in made] == [None] * 3
    assert use.num_pending == 2
    plane.clock.advance(30)
    assert use.flush() == 2
    used = [info.last_used_at for info in plane.keys.list("acme").items]
    assert sum(moment is None for moment in used) == 1
    shown = plane.keys.get("acme", made[0][0].id)
    assert shown.last_used_at is not None
    # It was used half a minute ago, by the fake clock; the database's own has hardly moved.
    assert 15 <= (shown.created_at - shown.last_used_at).total_seconds() <= 30
    assert use.flush() == 0
    assert plane.database.revision == revision, "it would make every cache read everything again"


def test_a_later_use_on_another_server_stands(plane: ControlPlane) -> None:
    info, _ = plane.keys.create("acme")
    early, late = (KeyUse(plane.database, clock=plane.clock) for _ in range(2))
    early.note(info.id)
    plane.clock.advance(20)
    late.note(info.id)
    plane.clock.advance(5)
    late.flush()
    shown = plane.keys.get("acme", info.id)
    early.flush()
    assert plane.keys.get("acme", info.id) == shown


def test_the_last_uses_are_written_at_the_end(plane: ControlPlane) -> None:
    info, _ = plane.keys.create("acme")
    use = KeyUse(plane.database)
    use.note(info.id)

    async def serve() -> None:
        keeping = asyncio.create_task(use.run(interval_s=3600))
        await asyncio.sleep(0)
        keeping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await keeping

    asyncio.run(serve())
    assert plane.keys.get("acme", info.id).last_used_at is not None


def test_uses_of_keys_that_are_gone_and_of_very_many_are_no_trouble(plane: ControlPlane) -> None:
    info, _ = plane.keys.create("acme")
    use = KeyUse(plane.database)
    for number in range(MAX_ROWS):
        use.note(f"gone{number}")
    use.note(info.id)
    assert use.flush() == MAX_ROWS + 1
    assert plane.keys.get("acme", info.id).last_used_at is not None


# The pepper.


def test_a_server_with_another_pepper_does_not_start_beside_living_keys(plane: ControlPlane) -> None:
    other = bytes(32)
    check_pepper(plane.database, PEPPER)
    check_pepper(plane.database, PEPPER)
    check_pepper(plane.database, other)  # there is no key yet that it could harm
    check_pepper(plane.database, PEPPER)
    info, secret = plane.keys.create("acme")
    with pytest.raises(PepperChanged, match="none of them would work") as caught:
        check_pepper(plane.database, other)
    assert PEPPER.hex() not in caught.value.message
    assert who(plane.key_cache(), secret) == info.id
    check_pepper(plane.database, other, accept=True)
    check_pepper(plane.database, other)
    with pytest.raises(PepperChanged):
        check_pepper(plane.database, PEPPER)
    # The keys are still there: rotated, they work under the new pepper.
    assert refused(KeyCache(plane.database, other, ADMIN_TOKEN), secret)
    _, fresh = Keys(plane.database, other).rotate("acme", info.id)
    assert who(KeyCache(plane.database, other, ADMIN_TOKEN), fresh) == info.id


def test_a_given_pepper_is_taken_and_no_file_is_made(tmp_path: Any) -> None:
    assert load_pepper(tmp_path, "0A" * 32) == b"\x0a" * 32
    assert list(tmp_path.iterdir()) == []
