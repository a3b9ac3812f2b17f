"""Whether a Redis is fit for limits. Imported where there is one."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from redis import Redis
from redis.exceptions import MovedError, NoPermissionError, RedisError

from loraplex.app.settings import SettingsInvalid
from loraplex.control.limits.redis_link import TAG

_PATIENCE_S = 5.0
_OLDEST = (6, 0)
_HOW = (
    "--redis-url: give redis://HOST:PORT/DB, rediss://… for TLS or unix:///PATH, with USER:PASSWORD@ before HOST where "
    "it asks for them and what is special in them percent-encoded; behind a ? only ssl_… options are taken."
)


def shown_redis(url: str) -> str:
    """Without user, password and options."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


@dataclass(frozen=True, slots=True)
class Fitness:
    """The fitness of a Redis for limits: doctor's words for it, and what speaks against it."""

    summary: str
    warning: str


def examine_redis(url: str) -> Fitness:
    """Raises SettingsInvalid."""
    check_url(url)
    try:
        with Redis.from_url(url, socket_timeout=_PATIENCE_S, socket_connect_timeout=_PATIENCE_S) as client:
            # What its user may not do is found out now, and not after the model has been loaded.
            with contextlib.suppress(MovedError):
                client.eval("return redis.call('EXISTS', KEYS[1])", 1, TAG)
            try:
                facts = client.info()
            except NoPermissionError:
                return Fitness(
                    f"Redis at {shown_redis(url)}", "its user may not call INFO: see to 'noeviction'"
                )
    except (RedisError, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise SettingsInvalid(
            f"the Redis of the limits, {shown_redis(url)}, cannot be used: {reason}. Start or mend it, or leave out "
            "--redis-url for one server that counts by itself."
        ) from error
    return _judge(url, facts)


def _judge(url: str, facts: dict[str, object]) -> Fitness:
    version, policy = str(facts["redis_version"]), str(facts["maxmemory_policy"])
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
        raise SettingsInvalid(f"the Redis of the limits is {version}; 6.0 or later is needed.")
    memory = int(str(facts["maxmemory"]))
    warning = ""
    if policy != "noeviction":
        # What is thrown out is a limit that counts from nothing.
        told = f"its maxmemory-policy is {policy}: set it to noeviction, or it throws limits out when memory is short"
        if memory:
            raise SettingsInvalid(f"the Redis of the limits cannot be used: {told}.")
        warning = told
    kind = "a cluster's node" if facts.get("redis_mode") == "cluster" else str(facts.get("role", ""))
    room = f"at most {memory >> 20} MiB" if memory else "no memory limit"
    return Fitness(f"Redis {version} at {shown_redis(url)}, {kind}, {room}, {policy}", warning)


def check_url(url: str) -> None:
    """Raises SettingsInvalid, without the URL: it may hold a password."""
    try:
        parts = urlsplit(url)
        if parts.scheme == "unix":
            good = bool(parts.path)
        else:
            database = parts.path in ("", "/") or parts.path[1:].isdecimal()
            good = (
                parts.scheme in ("redis", "rediss") and bool(parts.hostname) and database and parts.port != 0
            )
        options = parse_qsl(parts.query, strict_parsing=True) if parts.query else []
        if not good or any(not name.startswith("ssl_") for name, _ in options):
            raise ValueError
        Redis.from_url(url).connection_pool.make_connection()
    except (ValueError, TypeError, RedisError) as error:
        raise SettingsInvalid(_HOW) from error
