"""A real server with all that dashboards show: tenants, adapters, a canary, refusals, and failures on purpose."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from support.servers.live_server import (
    TINY_SIZES,
    LiveServer,
    checked,
    write_tiny_adapter,
    write_tiny_model,
)
from support.servers.prometheus import Prometheus
from support.servers.redis_server import RedisServer

JOB = "loraplex"
CHOSEN = {"tenant": "acme", "adapter": "support@v2", "release": "support"}
"""What is chosen at the top of the dashboards."""
NUM_ADAPTERS = 10
"""Of each of the two large tenants; more than fit into the device's memory."""
TENANTS: dict[str, dict[str, Any]] = {
    "acme": {"weight": 2, "limits": {"max_concurrency": 2}},
    "globex": {},
    "initech": {"limits": {"requests_per_minute": 20, "max_concurrency": 1}},
    "hooli": {"limits": {"token_budget": 300, "budget_period": "day"}},
}


class BusyServer:
    """`server` under load of every tenant until the block ends; its Prometheus scrapes it every second. `pause`:
    seconds between an answer and the client's next request."""

    def __init__(self, server: LiveServer, prometheus: Prometheus, redis: RedisServer, pause: float) -> None:
        self.server, self.prometheus, self.redis, self._pause = server, prometheus, redis, pause
        self.began = time.time()
        self._keys: dict[str, str] = {}
        self._end = threading.Event()
        self._threads: list[threading.Thread] = []
        self.answers: list[int] = []

    def fill(self, folders: list[Path]) -> None:
        """Tenants, keys, adapters, and a release with a canary, whose guard never has enough. Equal uploads would
        share memory."""
        for tenant, fields in TENANTS.items():
            self.server.create_tenant(tenant, **fields)
            self._keys[tenant] = self.server.create_key(tenant)
        for folder in folders[:2]:
            self.server.upload("acme", "support", folder)
        targets = [{"version": "v1", "weight": 80}, {"version": "v2", "weight": 20}]
        guard = {"metrics": [{"name": "error_rate"}], "min_requests": 100_000}
        checked(self.server.admin.put(f"{self._release}", json={"targets": targets, "guard": guard}))
        for number, folder in enumerate(folders[2:]):
            self.server.upload(("acme", "globex")[number % 2], f"a{number // 2}", folder)

    _release = "tenants/acme/adapters/support/release"

    def begin(self) -> None:
        """Starts the load: a thread for each kind of client."""
        acme = ["support"] * 4 + [f"a{number}" for number in range(NUM_ADAPTERS)]
        others = [f"a{number}" for number in range(NUM_ADAPTERS)]
        for run in (
            self._asks("acme", acme),
            self._asks("acme", ["support"]),
            self._asks("acme", ["support"], pause=0.2),
            self._asks("globex", others),
            self._asks("initech", [""]),
            self._asks("initech", [""]),
            self._asks("hooli", [""], pause=0.3),
            self._asks("", [""], pause=0.5),
            self._hangs_up,
        ):
            thread = threading.Thread(target=run, daemon=True)
            thread.start()
            self._threads.append(thread)

    def end(self) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join(60)

    def change_releases(self) -> None:
        """The canary is promoted, and rolled back."""
        checked(self.server.admin.post(f"{self._release}/promote", json={"version": "v2"}))
        checked(self.server.admin.post(f"{self._release}/rollback"))

    def get_into_trouble(self) -> None:
        """Releases change, Redis is away, and the engine dies; each until Prometheus has seen it, and then recovers."""
        self.scraped('increase(loraplex_requests_total{tenant="acme",adapter="support@v2"}[15s]) > 0')
        self.scraped("loraplex_limiter_redis_seconds_count > 0")
        self.scraped('loraplex_adapter_evictions_total{tier="device"} > 0')
        self.change_releases()
        self.scraped('loraplex_admin_changes_total{action="release.rollback"} > 0')
        self.redis.kill()
        self.scraped("loraplex_limiter_apart == 1")
        self.scraped("increase(loraplex_limiter_apart_decisions_total[15s]) > 0")
        self.redis.start()
        self.scraped("loraplex_limiter_apart == 0")
        for life in range(1, 4):
            self.server.kill_engine()
            self.scraped(f"loraplex_engine_restarts_total >= {life}")
            self.scraped("loraplex_engine_up == 1")
            if self.prometheus.query("min_over_time(loraplex_engine_up[5m]) == 0"):
                break  # else it was back before it was scraped
        self.scraped('increase(loraplex_requests_total{tenant="acme",status="200"}[5s]) > 0')

    def scraped(self, expression: str, timeout: float = 60.0) -> None:
        """Waits until Prometheus has an answer."""
        end = time.monotonic() + timeout
        while not self.prometheus.query(expression):
            assert time.monotonic() < end, f"never scraped: {expression}\n{self.server.log_tail()}"
            time.sleep(0.1)

    def _asks(self, tenant: str, models: list[str], pause: float | None = None) -> Callable[[], None]:
        rng = random.Random(f"{tenant} {models}")
        pause = self._pause if pause is None else pause
        base = checked(self.server.client(self._keys["acme"]).get("/v1/models"))["data"][0]["id"]
        system = "You are a helpful assistant. " * 3

        def ask() -> None:
            # A tenant without a name has no valid key.
            with self.server.client(self._keys.get(tenant, "lpx_wrong")) as client:
                while not self._end.wait(pause):
                    body = {
                        "model": rng.choice(models) or base,
                        "prompt": system + "question " * rng.randint(1, 20),
                        # On an idle machine no scrape would meet one of short answers alone.
                        "max_tokens": rng.choice([1, 8, 400 if tenant == "acme" else 40]),
                        "ignore_eos": True,
                    }
                    if tenant == "globex" and rng.random() < 0.1:
                        body["model"] = "nobody-has-this"
                    with contextlib.suppress(httpx.HTTPError):
                        self.answers.append(client.post("/v1/completions", json=body).status_code)

        return ask

    def _hangs_up(self) -> None:
        with self.server.client(self._keys["globex"]) as client:
            while not self._end.wait(0.5):
                body = {"model": "a1", "prompt": "x", "max_tokens": 2000, "stream": True}
                with (
                    contextlib.suppress(httpx.HTTPError),
                    client.stream("POST", "/v1/completions", json=body) as answer,
                ):
                    next(answer.iter_lines())


@contextmanager
def busy_server(directory: Path, pause: float = 0.02) -> Iterator[BusyServer]:
    """A server of a tiny model with a Redis and a Prometheus of its own, filled and under load."""
    model = write_tiny_model(directory / "tiny")
    folders = [
        write_tiny_adapter(directory / f"adapter-{seed}", rank=8, seed=seed)
        for seed in range(2 + 2 * NUM_ADAPTERS)
    ]
    redis = RedisServer()
    settings = {**TINY_SIZES, "adapter_memory": "1MiB", "redis_url": redis.url, "dtype": "float32"}
    try:
        with (
            LiveServer(model, directory / "data", **settings) as server,
            Prometheus(directory / "prometheus", {f"127.0.0.1:{server.admin_port}": {}}, JOB) as prometheus,
        ):
            busy = BusyServer(server, prometheus, redis, pause)
            busy.fill(folders)
            busy.scraped("loraplex_engine_up == 1")
            busy.begin()
            try:
                yield busy
            finally:
                busy.end()
    finally:
        redis.close()
