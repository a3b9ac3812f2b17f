"""A server's background tasks: each is supervised, and seen by its metrics; what cannot be recorded is told."""

from __future__ import annotations

import asyncio
import http.server
import json
import os
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy.exc
from prometheus_client.parser import text_string_to_metric_families

from loraplex.app.serve import serve, start_background, start_releases
from loraplex.app.settings import Settings, SettingsInvalid
from loraplex.control.background import BackgroundTasks
from loraplex.control.db.database import Database
from loraplex.control.db.outage import Outage
from loraplex.control.limits.budgets import Budgets
from loraplex.control.release_types import ReleasePlan, ReleaseTarget
from loraplex.control.tenancy.key_use import KeyUse
from loraplex.control.usage.roll_up import UsageRollUp
from loraplex.control.usage.running_arms import RunningArmsWriter
from loraplex.control.usage.writer import UsageWriter
from loraplex.engine.tenant_terms import TenantTerms
from loraplex.engine.types import EngineRequest, SamplingParams
from loraplex.lifecycle.damage_reports import DamageReports
from loraplex.lifecycle.tenant_terms import TermsSender
from loraplex.lifecycle.warming import Warming
from loraplex.serving.demand import Demand
from support.control.plane import ControlPlane
from support.engine.fake_engine import FakeEngineClient, Reply
from support.http.admin_plane import SERVED_NAME
from support.http.whole_server import WholeServer, bearer, whole_server
from support.waiting import eventually

RUNS: dict[str, tuple[type, str]] = {
    "key-use": (KeyUse, "run"),
    "usage-writer": (UsageWriter, "run"),
    "usage-roll-up": (UsageRollUp, "run"),
    "running-arms": (RunningArmsWriter, "run"),
    "database-watch": (Database, "watch"),
    "damage-reports": (DamageReports, "run"),
    "terms-watch": (TermsSender, "run"),
    "adapter-demand": (Warming, "run"),
    "budget-reports": (Budgets, "run"),
}


def fail_once(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    real: Callable[..., Any] = getattr(owner, name)
    failures = [RuntimeError("a bug")]

    async def run(*args: Any, **options: Any) -> None:
        if failures:
            raise failures.pop()
        await real(*args, **options)

    monkeypatch.setattr(owner, name, run)


def scraped(server: WholeServer) -> dict[tuple[str, str], float]:
    text = server.http.get(f"{server.admin_url}/metrics").text
    return {
        (sample.name.removeprefix("loraplex_background_task_"), sample.labels["task"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("loraplex_background_task_") and not sample.name.endswith("_created")
    }


def test_every_task_of_a_server_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in RUNS.values():
        fail_once(monkeypatch, owner, name)
    with whole_server(tmp_path) as server:
        installation = server.installation
        damage = DamageReports(installation.database, installation.catalog)
        warming = Warming(
            tmp_path,
            Demand(),
            database=installation.database,
            catalog=installation.catalog,
            releases=installation.releases,
            tenants=installation.tenants,
        )

        async def start() -> None:
            start_background(installation, server.plane.engine, damage, warming)

        server.call(start)
        tasks = {*RUNS, "usage-journal"}
        eventually(lambda: all(scraped(server)["up", name] == 1 for name in tasks))
        found = scraped(server)
        assert {name for kind, name in found if kind == "up"} == tasks
        assert {name: found["restarts_total", name] for name in tasks} == dict.fromkeys(RUNS, 1) | {
            "usage-journal": 0
        }
    assert not any(state.up for state in installation.background.states if state.name != "usage-journal")


def test_a_server_steps_its_releases_and_tells_the_webhook(tmp_path: Path) -> None:
    """All of it by the clock of the database, as a server runs it."""
    told: list[bytes] = []

    class Hook(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Hook) as hook:
        threading.Thread(target=hook.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{hook.server_port}/"
        secret = "0123456789abcdef"
        with whole_server(
            tmp_path, webhook_url=url, webhook_secret=secret, webhook_allow=["127.0.0.1"]
        ) as server:
            installation, plane = server.installation, server.plane
            plane.make_tenant()
            for seed in (1, 2):
                plane.make_adapter(seed=seed)

            async def start() -> None:
                start_releases(installation, plane.engine, server.apps.shared.metrics.releases)

            server.call(start)
            installation.releases.put(
                "acme",
                "support",
                [ReleaseTarget("v1", 100), ReleaseTarget("v2", 0)],
                plan=ReleasePlan(schedule=[{"weight": 50, "for_seconds": 1}]),
            )
            eventually(
                lambda: installation.releases.get("acme", "support").targets == (ReleaseTarget("v2", 100),)
            )
            eventually(lambda: told)
            assert json.loads(told[0])["event"] == "release.promoted"
            assert plane.engine.prefetches
        hook.shutdown()


def test_a_webhook_without_a_secret_stops_the_start(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, webhook_url="https://hooks.example.com/")
    with pytest.raises(SettingsInvalid, match="--webhook-url needs --webhook-secret"):
        serve(settings)


@pytest.fixture
async def tasks() -> AsyncIterator[BackgroundTasks]:
    async def soon(_: float) -> None:
        await asyncio.sleep(0.005)

    made = BackgroundTasks(sleep=soon)
    yield made
    await made.close()


class InsufficientPrivilege(Exception):
    sqlstate = "42501"


async def test_an_unmapped_database_error_does_not_end_the_weight_watch(
    tmp_path: Path, tasks: BackgroundTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An administrator revokes the right to read the tenants from the server's user, and grants it again."""
    plane = ControlPlane(tmp_path)
    engine = FakeEngineClient()
    await engine.start()
    plane.tenants.create("acme", weight=1.0)
    engine.script(Reply(hold=True))
    engine.submit(EngineRequest("r", "acme", (1,), SamplingParams(5)))
    plane.tenants.update("acme", {"weight": 4.0})

    def refused(*_: object) -> dict[str, TenantTerms]:
        raise sqlalchemy.exc.ProgrammingError("SELECT", {}, InsufficientPrivilege("permission denied"))

    watch = TermsSender(plane.database, plane.tenants)
    with monkeypatch.context() as patch:
        patch.setattr(plane.tenants, "terms", refused)
        tasks.start("terms-watch", lambda: watch.run(engine, interval_s=0.001))
        async with asyncio.timeout(10):
            while tasks.states[0].restarts < 2:
                await asyncio.sleep(0.005)
    async with asyncio.timeout(10):
        while engine.terms != {"acme": TenantTerms(4.0)}:
            await asyncio.sleep(0.005)
    await engine.close()
    plane.close()


async def test_reports_of_damage_that_wait_outlive_a_failure(
    tmp_path: Path, tasks: BackgroundTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = ControlPlane(tmp_path)
    engine = FakeEngineClient()
    await engine.start()
    damage = DamageReports(plane.database, plane.catalog)
    seen: list[str] = []

    async def see_to(digest: str, _: object) -> None:
        seen.append(digest)
        if digest == "first":
            raise RuntimeError("a bug")

    monkeypatch.setattr(damage, "_see_to", see_to)
    damage.put(["first", "second"])
    tasks.start("damage-reports", lambda: damage.run(engine))
    async with asyncio.timeout(10):
        while seen != ["first", "second"]:
            await asyncio.sleep(0.005)
    await engine.close()
    plane.close()


def test_an_outage_ends_though_no_thread_was_to_be_had_to_watch_it(monkeypatch: pytest.MonkeyPatch) -> None:
    outage = Outage(lambda: None, interval_s=0.005)
    with monkeypatch.context() as patch:

        def none_left(_: object) -> None:
            raise RuntimeError("can't start new thread")

        patch.setattr("threading.Thread.start", none_left)
        outage.report_lost("the connection was refused")
    assert outage.seconds is None  # the next caller finds out by itself
    outage.report_lost("the connection was refused")
    eventually(lambda: outage.seconds is None)
    outage.close()


def test_a_journal_that_cannot_be_written_is_told_to_balancers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with whole_server(tmp_path) as server:
        server.plane.make_tenant("acme")
        headers = bearer(server.plane.make_key("acme", "inference"))

        def ask() -> int:
            body = {"model": SERVED_NAME, "prompt": "x"}
            url = f"{server.data_url}/v1/completions"
            return server.http.post(url, json=body, headers=headers).status_code

        assert ask() == 200
        with monkeypatch.context() as patch:
            patch.delattr(os, "fdatasync")
            assert ask() == 200  # it had been accepted
            for port in (server.data_url, server.admin_url):
                answer = server.http.get(f"{port}/readyz")
                assert answer.status_code == 503
                assert answer.json()["reason"].startswith("usage cannot be recorded (")
                assert server.http.get(f"{port}/livez").status_code == 200
            assert ask() == 503
        eventually(lambda: server.http.get(f"{server.data_url}/readyz").status_code == 200)
        assert ask() == 200
