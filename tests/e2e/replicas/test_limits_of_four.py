"""Four whole servers on one Redis, asked over HTTP: what they let pass together with it, without it, and after it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from support.http.admin_plane import SERVED_NAME
from support.http.whole_server import bearer, whole_server
from support.servers.live_server import TINY_TORCH, LiveServer, write_tiny_model
from support.servers.redis_server import RedisServer

pytestmark = pytest.mark.slow
SERVERS = 4
REQUESTS, TOKENS = 40, 150
LIMITS = {"requests_per_minute": REQUESTS, "tokens_per_minute": TOKENS}
PATIENCE_S = 20.0
LONGEST = 5
"""Tokens of a request: less than a share."""


@dataclass(frozen=True)
class Target:
    url: str
    model: str
    keys: dict[str, str]


@dataclass
class Hammer:
    """Asks all servers at once. `passed`: for each tenant, when each request that passed was sent and answered, and its
    tokens. `codes` of all other answers."""

    targets: list[Target]
    passed: dict[str, list[tuple[float, float, int]]] = field(default_factory=dict)
    codes: set[tuple[int, str]] = field(default_factory=set)
    http: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=60))

    def strike(
        self, seconds: float, tenants: list[str], servers: range = range(SERVERS), *, together: bool = True
    ) -> dict[str, int]:
        """How many requests of each tenant passed meanwhile. It goes on until each server has refused each of them, or
        for PATIENCE_S: a busy machine takes longer to spend a limit. `together`: as Redis decides; of a server that has
        lost it for a moment the refusals do not count."""
        before = {tenant: len(self.passed.get(tenant, ())) for tenant in tenants}
        end = time.monotonic() + seconds

        def client(server: int, tenant: str) -> None:
            target = self.targets[server]
            body = {"model": target.model, "prompt": "x", "max_tokens": LONGEST - 1, "ignore_eos": True}
            headers, refused = bearer(target.keys[tenant]), False
            while time.monotonic() < end + (0 if refused else PATIENCE_S):
                sent = time.monotonic()
                answer = self.http.post(f"{target.url}/v1/completions", json=body, headers=headers)
                if answer.status_code == 200:
                    used = answer.json()["usage"]["total_tokens"]
                    assert used <= LONGEST
                    self.passed.setdefault(tenant, []).append((sent, time.monotonic(), used))
                else:
                    refused = refused or answer.status_code == 429 or not together
                    self.codes.add((answer.status_code, answer.json()["error"]["code"]))
                    time.sleep(0.02)

        with ThreadPoolExecutor(SERVERS * len(tenants)) as pool:
            for done in [pool.submit(client, server, tenant) for server in servers for tenant in tenants]:
                done.result()
        return {tenant: len(self.passed.get(tenant, ())) - before[tenant] for tenant in tenants}

    def overshoot(self, tenant: str) -> tuple[float, float]:
        """By which part of a limit, in requests and in tokens, the worst stretch exceeds it and what flowed back."""
        passed = sorted(self.passed[tenant])
        requests = tokens = 0.0
        for first, (begin, *_) in enumerate(passed):
            used = 0
            for count, (_, end, cost) in enumerate(passed[first:], 1):
                used += cost
                room = 1 + (end - begin) / 60
                requests = max(requests, count / REQUESTS - room)
                tokens = max(tokens, used / TOKENS - room)
        return requests, tokens


@contextlib.contextmanager
def served_in_process(root: Path, redis: RedisServer) -> Iterator[list[Target]]:
    """Both ports and all that is behind them, over a scripted engine."""
    with contextlib.ExitStack() as stack:
        targets = []
        for number in range(SERVERS):
            (root / str(number)).mkdir()
            server = stack.enter_context(whole_server(root / str(number), redis_url=redis.url))
            keys = {}
            for tenant in ("steady", "unseen", "fresh"):
                server.plane.make_tenant(tenant, limits=LIMITS)
                keys[tenant] = server.plane.make_key(tenant, "inference")
            targets.append(Target(server.data_url, SERVED_NAME, keys))
        yield targets


@contextlib.contextmanager
def served_by_processes(root: Path, redis: RedisServer) -> Iterator[list[Target]]:
    """`loraplex serve` with a tiny model."""
    model = write_tiny_model(root / "model")
    environment = {"LORAPLEX_REDIS_URL": redis.url}
    servers = [
        LiveServer(
            model,
            root / str(number),
            environment=environment,
            served_model_name=SERVED_NAME,
            **TINY_TORCH,
        )
        for number in range(SERVERS)
    ]
    try:
        targets = []
        for server in servers:
            server.start()
            keys = {}
            for tenant in ("steady", "unseen", "fresh"):
                server.create_tenant(tenant, limits=LIMITS)
                keys[tenant] = server.create_key(tenant)
            targets.append(Target(server.data_url, SERVED_NAME, keys))
        yield targets
    finally:
        for server in servers:
            server.reap()


def check(targets: list[Target], redis: RedisServer, seconds: float) -> None:
    """`steady` is asked for all the time; `unseen` is spent by one server, and then asked for on all while Redis is
    away; `fresh` is asked for only then."""
    hammer = Hammer(targets)
    together = hammer.strike(seconds, ["steady"]) | hammer.strike(seconds, ["unseen"], range(1))
    redis.hang()
    apart = hammer.strike(seconds, ["steady", "unseen", "fresh"], together=False)
    redis.go_on()
    after = hammer.strike(seconds, ["steady", "unseen", "fresh"])
    print(f"\npassed with Redis {together}, without it {apart}, after it {after}")
    for tenant in ("steady", "unseen", "fresh"):
        requests, tokens = hammer.overshoot(tenant)
        print(f"{tenant}: overshoot {requests:.2f} of the requests, {tokens:.2f} of the tokens")
        # What others had spent and a server did not see.
        most = (SERVERS - 1) / SERVERS + 1e-6
        assert requests <= most
        assert tokens <= most
    assert min(together["steady"], together["unseen"], apart["fresh"]) >= 0.9 * TOKENS / LONGEST
    assert {status for status, _ in hammer.codes} <= {429, 503}
    assert {code for status, code in hammer.codes if status == 503} <= {"limits_unavailable"}


def test_together_they_exceed_a_limit_by_what_is_stated(tmp_path: Path) -> None:
    redis = RedisServer()
    try:
        with served_in_process(tmp_path, redis) as targets:
            check(targets, redis, 1.0)
    finally:
        redis.go_on()
        redis.close()


@pytest.mark.soak
def test_together_they_exceed_a_limit_by_what_is_stated_at_length(tmp_path: Path) -> None:
    redis = RedisServer()
    try:
        with served_by_processes(tmp_path, redis) as targets:
            check(targets, redis, 20.0)
    finally:
        redis.go_on()
        redis.close()
