"""Engines die under requests of several tenants: the ledger, budgets and limits stay exact."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.control.db.database import Database
from loraplex.control.limits.budget_store import budget_states
from loraplex.control.types import Limits
from loraplex.control.usage.records import Ended
from loraplex.engine.types import EngineRequest, SamplingParams
from loraplex.serving.dialling.remote import RemoteEngine
from loraplex.serving.engines.engines import Engines
from loraplex.serving.engines.replica import Replica
from support.cluster.scripted import ScriptedSession
from support.control.usage import rows_of
from support.engine import fake_core
from support.engine.dialled import dialling, listening
from support.engine.fake_engine import fake_engine_info
from support.engine.fake_processes import until
from support.http.admin_plane import SERVED_NAME
from support.http.whole_server import WholeServer, bearer, whole_server

ENGINES = ("one", "two", "three")
CLIENTS = 6
REQUESTS = 3
TOKENS = 40
TENANTS: dict[str, dict[str, Any]] = {
    "acme": {"token_budget": 10**6, "budget_period": "forever", "max_concurrency": 5},
    "rival": {"token_budget": 10**6, "budget_period": "forever", "max_sequences": 9},
    "small": {"token_budget": 400, "budget_period": "forever", "max_concurrency": 4},
}


@dataclass
class Answer:
    """`sequences`: the tokens of each that came. `row_id` is unknown where nothing was answered but an error."""

    tenant: str
    prompt: str
    n: int
    status: int
    row_id: str | None = None
    code: str | None = None
    sequences: dict[int, list[int]] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.sequences.values()))

    def take(self, told: dict[str, Any]) -> None:
        """Part of a stream, or a whole answer."""
        if "error" in told:
            self.code = told["error"]["code"]
            return
        self.row_id = told["id"].removeprefix("cmpl-")
        for choice in told["choices"]:
            self.sequences.setdefault(choice["index"], []).extend(choice.get("token_ids") or ())


async def ask(http: httpx.AsyncClient, url: str, tenant: str, key: str, number: int) -> Answer:
    n, prompt = 3 if number % 3 == 0 else 1, f"{number:03}"
    body = {
        "model": SERVED_NAME, "prompt": prompt, "n": n, "max_tokens": TOKENS, "stream": number % 4 != 1,
        "return_token_ids": True,
    }  # fmt: skip
    whole = await http.post(f"{url}/v1/completions", json=body, headers=bearer(key))
    answer = Answer(tenant, prompt, n, whole.status_code)
    if whole.headers["content-type"].startswith("text/event-stream"):
        *events, done, end = whole.text.split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        for event in events:
            answer.take(json.loads(event.removeprefix("data: ")))
    else:
        answer.take(whole.json())
    return answer


@contextmanager
def cluster_server(root: Path) -> Iterator[tuple[WholeServer, Engines]]:
    """Both ports over three engines that dial in."""
    before = Replica("before", ScriptedSession(fake_engine_info()))  # the apps ask for the sizes once
    cluster = Engines([before])

    def on_join(replica: str, node: str, session: RemoteEngine) -> None:
        cluster.join(Replica(replica, session, node))

    stack = AsyncExitStack()

    async def start() -> None:
        cluster.leave("before")
        stack.push_async_callback(cluster.close)
        port = await stack.enter_async_context(listening(on_join=on_join, on_leave=cluster.leave))
        for name in ENGINES:
            await stack.enter_async_context(dialling(port.number, name))
        await until(lambda: len(cluster.replicas) == len(ENGINES))

    with whole_server(root, engine=cluster) as server:
        server.call(start)
        try:
            yield server, cluster
        finally:
            server.call(stack.aclose)


async def kill_engines(cluster: Engines) -> None:
    """One after the other, while answers are being written; two of three lie down at the same time."""
    while True:
        await until(lambda: len(cluster.replicas) == len(ENGINES))
        for left in (2, 1):
            await until(lambda: cluster.num_live >= 6)
            busiest = max(cluster.replicas, key=lambda replica: replica.session.num_live)
            assert busiest.session.pid is not None
            os.kill(busiest.session.pid, signal.SIGKILL)
            await until(lambda left=left: len(cluster.replicas) == left)  # type: ignore[misc]


async def drive(server: WholeServer, cluster: Engines, keys: dict[str, str]) -> list[Answer]:
    killing = asyncio.run_coroutine_threadsafe(kill_engines(cluster), server.loop)
    answers: list[Answer] = []
    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=100)) as http:

        async def client(tenant: str, first: int) -> None:
            for number in range(first, first + REQUESTS):
                for _ in range(200):  # a client that is refused for the moment asks again
                    answers.append(await ask(http, server.data_url, tenant, keys[tenant], number))
                    if answers[-1].status != 429 or answers[-1].code == "insufficient_quota":
                        break
                    await asyncio.sleep(0.02)

        clients = [client(tenant, REQUESTS * number) for tenant in TENANTS for number in range(CLIENTS)]
        await asyncio.gather(*clients)
        killing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wrap_future(killing)
        # All that was taken has been given back: as many as are allowed run at once again.
        most = TENANTS["acme"]["max_concurrency"]
        again = [ask(http, server.data_url, "acme", keys["acme"], 1) for _ in range(most)]
        last = await asyncio.gather(*again)
        assert [answer.status for answer in last] == [200] * most
    return [*answers, *last]


def check_row(answer: Answer, row: Ended) -> None:
    request = EngineRequest("r", answer.tenant, tuple(answer.prompt.encode()), SamplingParams(TOKENS))
    expected = list(fake_core.fake_tokens(request))
    assert all(tokens == expected[: len(tokens)] for tokens in answer.sequences.values()), answer
    assert (row.tenant_id, row.n) == (answer.tenant, answer.n)
    assert (row.prompt_tokens, row.completion_tokens) == (len(answer.prompt), answer.num_tokens), answer
    if answer.code is None:
        assert (row.status, answer.num_tokens) == ("length", answer.n * TOKENS)
    else:
        assert (row.status, answer.code) == ("engine_restarting", "engine_restarting")


@pytest.mark.slow
def test_each_request_is_billed_once_whatever_engines_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_core, "VOCAB_SIZE", 128)
    monkeypatch.setenv("FAKE_VOCAB", "128")
    monkeypatch.setenv("FAKE_STEP_S", "0.01")
    with cluster_server(tmp_path) as (server, cluster):
        keys = {}
        for tenant, limits in TENANTS.items():
            server.plane.make_tenant(tenant, limits=limits)
            keys[tenant] = server.plane.make_key(tenant, "inference")
        answers = asyncio.run(drive(server, cluster, keys))
        server.settle()
        assert (cluster.num_live, cluster.served_tenants) == (0, set())
        continued = cluster.num_continued
    database = Database(server.plane.database.url)
    rows = rows_of(database)
    ended = Counter((answer.status, answer.code) for answer in answers)
    assert ended[200, None] > 20
    assert ended[429, "insufficient_quota"] > 0
    assert continued > 0
    known = {answer.row_id: answer for answer in answers if answer.row_id is not None}
    for row_id, answer in known.items():
        assert row_id is not None
        check_row(answer, rows[row_id])
    unnamed = [row for row_id, row in rows.items() if row_id not in known]
    assert Counter(row.status for row in unnamed) == Counter(
        answer.code for answer in answers if answer.row_id is None and answer.status == 503
    )
    for tenant, limits in TENANTS.items():
        with database.read() as session:
            state = budget_states(session, "tenant", {tenant: Limits(**limits)})[tenant]
        billed = sum(
            row.prompt_tokens + row.completion_tokens for row in rows.values() if row.tenant_id == tenant
        )
        assert (state.spent, state.held) == (billed, 0), tenant
        assert billed <= limits["token_budget"]
    database.close()
