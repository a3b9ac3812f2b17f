"""`--redis-url`: what is taken, what a server finds out before it starts, and what clients see of shared limits."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from loraplex.app.settings import Settings, SettingsInvalid
from loraplex.app.storage.redis import check_redis, describe_redis, make_limiter
from loraplex.control.background import BackgroundTasks
from loraplex.control.limits import redis_limiter
from support.control.limit_watch import Watch
from support.http.admin_plane import SERVED_NAME
from support.http.whole_server import WholeServer, bearer, whole_server
from support.servers.redis_server import RedisServer, redis_server

SECRET = "not-to-be-seen"


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    server = redis_server()
    server.client.flushall()
    yield server
    server.revive()
    server.client.config_set("maxmemory-policy", "noeviction")


def settings(url: str) -> Settings:
    return Settings(redis_url=url)


@pytest.mark.parametrize(
    "url",
    [
        f"http://{SECRET}@h:1",
        f"redis://:{SECRET}@",
        f"redis://:{SECRET}@h:0",
        f"redis://:{SECRET}@h:70000",
        f"redis://:{SECRET}@h:one",
        f"redis://:{SECRET}@h/zero",
        f"redis://:{SECRET}@h/0/1",
        f"redis://:{SECRET}@h?socket_timeout=1",
        f"rediss://:{SECRET}@h?ssl_nothing=1",
        "unix://",
        "127.0.0.1:6379",
    ],
)
def test_invalid_url_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(SettingsInvalid, match="--redis-url: give redis://HOST") as refused:
        make_limiter(settings(url), Watch(), BackgroundTasks())
    assert SECRET not in refused.value.message


@pytest.mark.parametrize(
    "url",
    [
        "redis://h",
        "redis://h/",
        "redis://u:p%40@h:1/15",
        "rediss://h?ssl_cert_reqs=none",
        "unix:///run/redis.sock",
    ],
)
def test_valid_url_is_taken(url: str) -> None:
    assert make_limiter(settings(url), Watch(), BackgroundTasks()).name == "redis"
    assert make_limiter(settings(""), Watch(), BackgroundTasks()).name == "in-process"


def test_a_redis_that_cannot_be_reached_is_told_without_its_password(redis: RedisServer) -> None:
    redis.kill()
    url = f"redis://user:{SECRET}@127.0.0.1:{redis.port}/3"
    with pytest.raises(SettingsInvalid, match=f"redis://127.0.0.1:{redis.port}/3, cannot be used") as refused:
        check_redis(settings(url))
    assert SECRET not in refused.value.message


def test_a_wrong_password_is_told_without_it(redis: RedisServer) -> None:
    with pytest.raises(SettingsInvalid, match="cannot be used") as refused:
        check_redis(settings(f"redis://user:{SECRET}@127.0.0.1:{redis.port}"))
    assert SECRET not in refused.value.message


def test_a_user_that_may_not_do_it_is_told_at_once(redis: RedisServer) -> None:
    for rights, wanted in (("~other* +@all", "keys"), ("~{loraplex}* +@all -eval", "eval")):
        redis.client.execute_command("ACL", "SETUSER", "narrow", "reset", "on", f">{SECRET}", *rights.split())
        url = redis.url.replace("redis://", f"redis://narrow:{SECRET}@")
        with pytest.raises(SettingsInvalid, match=f"permissions.*{wanted}") as refused:
            check_redis(settings(url))
        assert SECRET not in refused.value.message


def test_a_redis_that_throws_limits_out_is_refused(redis: RedisServer) -> None:
    check_redis(settings(redis.url))
    described = describe_redis(settings(redis.url))
    assert "no memory limit, noeviction" in described
    assert str(redis.port) in described
    redis.client.config_set("maxmemory-policy", "allkeys-lru")
    check_redis(settings(redis.url))  # as long as nothing makes it throw anything out
    assert "set it to noeviction" in describe_redis(settings(redis.url))
    redis.client.config_set("maxmemory", "64mb")
    with pytest.raises(SettingsInvalid, match="maxmemory-policy is allkeys-lru: set it to noeviction"):
        check_redis(settings(redis.url))


def test_each_server_counts_by_itself_without_redis() -> None:
    check_redis(settings(""))
    assert describe_redis(settings("")) == "none: each server counts its limits by itself"


@pytest.fixture
def pair(tmp_path: Path, redis: RedisServer) -> Iterator[list[WholeServer]]:
    """Two servers that share nothing but their limits."""
    roots = [tmp_path / "one", tmp_path / "other"]
    for root in roots:
        root.mkdir()
    with (
        whole_server(roots[0], redis_url=redis.url) as one,
        whole_server(roots[1], redis_url=redis.url) as other,
    ):
        yield [one, other]


def ask(server: WholeServer, key: str) -> httpx.Response:
    body = {"model": SERVED_NAME, "prompt": "x", "max_tokens": 1}
    return server.http.post(server.data_url + "/v1/completions", headers=bearer(key), json=body)


def metric(server: WholeServer, name: str) -> float:
    lines = server.http.get(server.admin_url + "/metrics").text.splitlines()
    (value,) = [line.rsplit(" ", 1)[1] for line in lines if line.startswith(f"{name} ")]
    return float(value)


def test_clients_see_one_limit_on_both_servers_and_a_503_when_a_share_is_spent(
    pair: list[WholeServer], redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_limiter, "TIMEOUT_S", 10.0)  # so that a busy machine is no fault
    limits = {"requests_per_minute": 5}
    keys = []
    for server in pair:
        server.plane.make_tenant("acme", limits=limits)
        keys.append(server.plane.make_key("acme", "inference"))
    began = time.monotonic()
    answers = [ask(server, key) for server, key in zip(pair * 3, keys * 3, strict=True)]
    seconds = time.monotonic() - began
    assert [answer.status_code for answer in answers] == [200] * 5 + [429]
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == [*"432100"]
    assert 12 - seconds <= int(answers[-1].headers["retry-after"]) <= 12
    assert metric(pair[0], "loraplex_limiter_redis_seconds_count") == 6, "admitted, and reserved"
    assert metric(pair[0], "loraplex_limiter_apart") == 0

    redis.kill()
    answer = ask(pair[0], keys[0])
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "limits_unavailable"
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert metric(pair[0], "loraplex_limiter_apart") == 1
    assert metric(pair[0], 'loraplex_limiter_apart_decisions_total{result="refused"}') == 1
