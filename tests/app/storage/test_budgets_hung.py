"""Token budgets on a real PostgreSQL that hangs (SIGSTOP) under requests that never stop, and goes on."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from loraplex.control.db.database import Database
from loraplex.control.limits.budget_store import budget_states
from loraplex.control.limits.budgets import ANSWER_TIMEOUT_S
from loraplex.control.types import Limits
from support.control.plane import use_database
from support.engine.fake_engine import Reply
from support.http.admin_plane import SERVED_NAME
from support.http.whole_server import WholeServer, bearer, whole_server
from support.servers.postgres import need_programs, postgres_server

BUDGET = Limits(token_budget=10**7, budget_period="forever")
CLIENTS = 6
DISCOVERY_S = 4.0
"""How long a request may wait when a silent database is discovered."""


@dataclass
class Outcome:
    """`phase`: how PostgreSQL was when the request began."""

    phase: str
    seconds: float
    status: int
    code: str | None
    retry_after: str | None
    tokens: int


class Traffic:
    """Clients that ask one of the servers, again and again, for `max_tokens`."""

    def __init__(self, servers: list[WholeServer], key: str) -> None:
        self.servers = servers
        self.headers = bearer(key)
        self.phase = "before"
        self.max_tokens = 500  # slices are for some more requests like those that come
        self.outcomes: list[Outcome] = []
        self.ended = threading.Event()

    def client(self, number: int) -> None:
        server = self.servers[number % len(self.servers)]
        while not self.ended.is_set():
            phase, began = self.phase, time.monotonic()
            body = {"model": SERVED_NAME, "prompt": "12345", "max_tokens": self.max_tokens}
            answer = server.http.post(f"{server.data_url}/v1/completions", json=body, headers=self.headers)
            seconds = time.monotonic() - began
            told = answer.json()
            code = None if answer.is_success else told["error"]["code"]
            tokens = told["usage"]["total_tokens"] if answer.is_success else 0
            retry_after = answer.headers.get("retry-after")
            self.outcomes.append(Outcome(phase, seconds, answer.status_code, code, retry_after, tokens))
            time.sleep(0.02)

    def wait_served(self, seconds: float) -> None:
        """Until requests of this phase have been answered."""
        end = time.monotonic() + seconds
        while sum(one.phase == self.phase and one.status == 200 for one in self.outcomes) < 2 * CLIENTS:
            assert time.monotonic() < end, Counter((one.status, one.code) for one in self.outcomes[-50:])
            time.sleep(0.02)


def _drill(root: Path, hang_s: float) -> None:
    postgres = postgres_server()
    url = postgres.clear()
    with ExitStack() as stack:
        servers = []
        for name in ("one", "two"):
            (root / name).mkdir()
            use_database(root / name, url)
            server = whole_server(root / name, budget_answer_s=ANSWER_TIMEOUT_S, default_max_tokens=5)
            servers.append(stack.enter_context(server))
            servers[-1].plane.engine.default = Reply(text="x" * 5000, chunk=64)
        plane = servers[0].plane
        plane.make_tenant("acme")
        plane.services.tenants.update(
            "acme", {"limits": {"token_budget": BUDGET.token_budget, "budget_period": BUDGET.budget_period}}
        )
        traffic = Traffic(servers, plane.make_key("acme", "inference"))
        with ThreadPoolExecutor(CLIENTS) as pool:
            clients = [pool.submit(traffic.client, number) for number in range(CLIENTS)]
            try:
                traffic.wait_served(60)
                traffic.max_tokens = 5
                postgres.hang()
                traffic.phase = "hung"
                traffic.wait_served(60)  # slices serve on
                traffic.max_tokens = 2000  # and are spent
                time.sleep(hang_s)
                postgres.go_on()
                traffic.max_tokens = 5
                traffic.phase = "after"
                traffic.wait_served(60)
            finally:
                postgres.go_on()
                traffic.ended.set()
            for client in clients:
                client.result(60)
        for server in servers:
            server.settle()
    hung = [one for one in traffic.outcomes if one.phase == "hung"]
    refused = [one for one in hung if one.status != 200]
    longest = max(one.seconds for one in traffic.outcomes)
    print(
        f"\nhung for {hang_s:g} s: {len(hung) - len(refused)} of {len(hung)} answered from slices, longest wait "
        f"{longest:.2f} s; {len(traffic.outcomes)} in all"
    )
    assert refused, "the slices were not spent"
    assert {(one.status, one.code) for one in refused} == {(503, "database_unavailable")}
    assert all(one.retry_after is not None and int(one.retry_after) >= 1 for one in refused)
    assert longest < DISCOVERY_S + 1.5  # a machine that has other things to do
    # A request that began while it hung may have ended after; nobody else was refused for long.
    assert all(one.code in (None, "database_unavailable") for one in traffic.outcomes)
    database = Database(url)
    with database.read() as session:
        state = budget_states(session, "tenant", {"acme": BUDGET})["acme"]
    database.close()
    assert (state.spent, state.held) == (sum(one.tokens for one in traffic.outcomes), 0)


@pytest.mark.slow
def test_budgets_serve_on_while_postgresql_hangs_and_are_exact_after(tmp_path: Path) -> None:
    need_programs()
    _drill(tmp_path, hang_s=2.0)


@pytest.mark.soak
@pytest.mark.parametrize("hang_s", [10.0, 45.0])
def test_budgets_serve_on_while_postgresql_hangs_for_long_and_are_exact_after(
    tmp_path: Path, hang_s: float
) -> None:
    need_programs()
    _drill(tmp_path, hang_s)
