"""Checks of the database, the Redis and the bucket that the settings name. Only the bucket is written to."""

from __future__ import annotations

import time
import uuid
from datetime import UTC, datetime

from sqlalchemy import create_engine, make_url, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from loraplex.app.doctor.findings import Finding, fail, ok, warn
from loraplex.app.doctor.production import check_skew
from loraplex.app.settings import Settings
from loraplex.app.storage.database import database_url, describe_database, existing_database
from loraplex.app.storage.redis import describe_redis
from loraplex.migrations.run import examine_schema, missing_migrations

_CONNECT_TIMEOUT_S = 5


def check_database(settings: Settings) -> Finding:
    """Raises SettingsInvalid, DatabaseTooNew."""
    found = describe_database(settings)
    url, is_there = existing_database(settings)
    if not is_there:
        return ok(f"{found}, made at the first start")
    try:
        schema = examine_schema(url).found
    except SQLAlchemyError as error:
        reason = (str(getattr(error, "orig", None) or error).splitlines() or ["no reason given"])[0]
        return fail(f"{found}: {reason}", "mend it, or restore a backup")
    if not settings.database_url:
        found += f", {'no schema yet' if schema is None else f'schema {schema}'}"
    pending = missing_migrations(schema)
    if schema is not None and pending:
        return warn(
            f"{found}; a start of this version migrates it ({', '.join(pending)})",
            "back it up first: an older version does not start on a newer schema",
        )
    return ok(found)


def check_database_clock(settings: Settings) -> Finding:
    """Keys end and budgets begin by the database's clock. Raises SettingsInvalid."""
    url = database_url(settings) if settings.database_url else ""
    if not url or make_url(url).get_backend_name() == "sqlite":
        return ok("this machine's own")
    engine = create_engine(url, poolclass=NullPool, connect_args={"connect_timeout": _CONNECT_TIMEOUT_S})
    try:
        with engine.connect() as connection:
            began = time.time()
            theirs = connection.scalar(text("SELECT clock_timestamp()"))
            ours = (began + time.time()) / 2
    except SQLAlchemyError:
        return fail("the database does not answer", "see the check of the database")
    finally:
        engine.dispose()
    assert isinstance(theirs, datetime)
    return check_skew(theirs.astimezone(UTC).timestamp() - ours)


def check_redis(settings: Settings) -> Finding:
    """Raises SettingsInvalid."""
    found = describe_redis(settings)
    if not settings.redis_url:
        return ok(found)
    summary, separator, warning = found.partition("; but ")
    if separator:
        return warn(summary, warning)
    facts = _redis_facts(settings)
    if facts is None:
        return ok(found)
    appended, saved = facts["aof_enabled"] == "1", facts["save"]
    kept = (
        "append-only file"
        if appended
        else f"snapshots ({saved})"
        if saved
        else "none, which limits do not need"
    )
    found += f", persistence: {kept}"
    if facts["rdb_last_bgsave_status"] == "err" or facts["aof_last_write_status"] == "err":
        return warn(
            found,
            "its last write to the disk failed, and it may refuse limits: give it room, or turn saving off",
        )
    return ok(found)


def check_bucket(settings: Settings) -> Finding:
    """Writes a small object, reads it and removes it. Raises SettingsInvalid."""
    from loraplex.adapters.store.bucket_client import BucketAway
    from loraplex.adapters.store.open_store import bucket_client

    try:
        bucket_client(settings.artifact_url, deadline_s=_CONNECT_TIMEOUT_S).probe(
            f"doctor/{uuid.uuid4().hex}"
        )
    except BucketAway as error:
        reason = (str(error.__cause__ or error).splitlines() or ["no reason given"])[0][:200]
        return fail(
            f"{settings.artifact_url}: {reason}",
            "look at AWS_ENDPOINT_URL, AWS_REGION and the credentials; they must allow to list, get, put and delete",
        )
    return ok(f"{settings.artifact_url}, written, read and removed")


def check_redis_clock(settings: Settings) -> Finding:
    """Windows of limits are counted by the Redis's clock."""
    from redis import Redis
    from redis.exceptions import RedisError

    try:
        with Redis.from_url(settings.redis_url, socket_timeout=5, socket_connect_timeout=5) as client:
            began = time.time()
            seconds, microseconds = client.time()
            ours = (began + time.time()) / 2
    except (RedisError, OSError):
        return fail("the Redis does not answer", "see the check of the Redis")
    return check_skew(seconds + microseconds / 1e6 - ours)


def _redis_facts(settings: Settings) -> dict[str, str] | None:
    """None where its user may not ask."""
    from redis import Redis
    from redis.exceptions import RedisError

    try:
        with Redis.from_url(settings.redis_url, socket_timeout=5, socket_connect_timeout=5) as client:
            info = {name: str(value) for name, value in dict(client.info(section="persistence")).items()}
            try:
                save = str(dict(client.config_get("save")).get("save", ""))
            except RedisError:
                save = ""
    except (RedisError, OSError):
        return None
    return {
        "save": save,
        "aof_enabled": info.get("aof_enabled", "0"),
        "rdb_last_bgsave_status": info.get("rdb_last_bgsave_status", "ok"),
        "aof_last_write_status": info.get("aof_last_write_status", "ok"),
    }
