"""Limits on both ports of a whole server: budgets from setting them to spending them, and what clients try."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loraplex.control.db.database import Database
from loraplex.control.limits.budget_store import budget_states
from loraplex.control.types import BudgetState, Limits
from support.engine.fake_engine import Reply
from support.http.admin_plane import ADMIN_TOKEN, SERVED_NAME
from support.http.whole_server import WholeServer, bearer, whole_server

ENDLESS = Reply(text="x" * 5000, chunk=16)
"""Longer than whatever is asked for: the engine is stopped by what was reserved alone."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[WholeServer]:
    with whole_server(tmp_path) as running:
        running.plane.engine.default = ENDLESS
        yield running
        running.settle()


def make_tenant(server: WholeServer, **limits: Any) -> dict[str, str]:
    """Headers with a key of a new tenant `acme` with these limits."""
    body = {"id": "acme", "limits": limits}
    assert server.http.post(f"{server.admin_url}/admin/v1/tenants", json=body, headers=bearer(ADMIN_TOKEN))
    return bearer(server.plane.make_key("acme", "inference"))


def change(server: WholeServer, limits: dict[str, Any]) -> httpx.Response:
    url = f"{server.admin_url}/admin/v1/tenants/acme"
    return server.http.patch(url, json={"limits": limits}, headers=bearer(ADMIN_TOKEN))


def shown_budget(server: WholeServer) -> Any:
    url = f"{server.admin_url}/admin/v1/tenants/acme"
    return server.http.get(url, headers=bearer(ADMIN_TOKEN)).json()["budget"]


def complete(server: WholeServer, headers: dict[str, str], **fields: Any) -> httpx.Response:
    body = {"model": SERVED_NAME, "prompt": "12345", "max_tokens": 5, **fields}
    return server.http.post(f"{server.data_url}/v1/completions", json=body, headers=headers)


def used(answer: httpx.Response) -> int:
    total: int = answer.json()["usage"]["total_tokens"]
    return total


def test_the_life_of_a_budget(server: WholeServer) -> None:
    cost = used(complete(server, make_tenant(server), max_tokens=5))
    headers = bearer(server.plane.make_key("acme", "inference"))
    assert change(server, {"token_budget": 3 * cost, "budget_period": "forever"}).status_code == 200
    assert [complete(server, headers).status_code for _ in range(3)] == [200] * 3
    refused = complete(server, headers)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")
    assert refused.headers["x-should-retry"] == "false"
    assert "retry-after" not in refused.headers
    shown = shown_budget(server)
    assert (shown["limit"], shown["period"], shown["ends_at"]) == (3 * cost, "forever", None)
    assert (shown["spent"] + shown["held"], shown["left"]) == (3 * cost, 0)
    assert change(server, {"token_budget": 4 * cost}).json()["limits"]["token_budget"] == 4 * cost
    assert complete(server, headers).status_code == 200
    assert change(server, {"token_budget": 2 * cost}).status_code == 200
    assert complete(server, headers).status_code == 429
    gone = change(server, {"token_budget": None}).json()
    assert (gone["limits"]["token_budget"], gone["limits"]["budget_period"], gone["budget"]) == (None,) * 3
    assert complete(server, headers).status_code == 200
    scrape = server.http.get(f"{server.admin_url}/metrics").text
    assert 'loraplex_limiter_decisions_total{outcome="insufficient_quota"} 2.0' in scrape
    assert 'loraplex_limiter_decisions_total{outcome="allowed"} 6.0' in scrape


def test_request_larger_than_a_budget_is_a_400_that_names_the_field(server: WholeServer) -> None:
    headers = make_tenant(server, token_budget=20, budget_period="day")
    answer = complete(server, headers, max_tokens=100)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")
    answer = complete(server, headers, prompt="x" * 30)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")


def test_a_prompt_that_fills_the_limit_is_scored(server: WholeServer) -> None:
    headers = make_tenant(server, tokens_per_minute=40)
    scored = complete(server, headers, prompt=[7] * 40, max_tokens=0, echo=True, logprobs=0)
    assert (scored.status_code, used(scored)) == (200, 40)
    assert scored.headers["x-ratelimit-remaining-tokens"] == "0"
    assert complete(server, headers, prompt=[7] * 41, max_tokens=0, echo=True).status_code == 400


def test_a_request_that_the_engine_refuses_costs_nothing(server: WholeServer) -> None:
    headers = make_tenant(server, requests_per_minute=1, token_budget=100, budget_period="day")
    server.plane.engine.max_inflight = 0
    for _ in range(3):
        assert complete(server, headers).status_code == 503
    server.plane.engine.max_inflight = 10
    assert complete(server, headers).status_code == 200
    assert complete(server, headers).status_code == 429


def test_changes_are_in_force_at_once_on_the_server_that_made_them(server: WholeServer) -> None:
    headers = make_tenant(server)
    assert complete(server, headers).status_code == 200
    change(server, {"requests_per_minute": 1})
    assert [complete(server, headers).status_code for _ in range(2)] == [200, 429]
    change(server, {"requests_per_minute": None, "max_output_tokens": 4})
    assert complete(server, headers, max_tokens=5).status_code == 400
    assert complete(server, headers, max_tokens=4).status_code == 200
    weight = {"weight": 7}
    url = f"{server.admin_url}/admin/v1/tenants/acme"
    assert server.http.patch(url, json=weight, headers=bearer(ADMIN_TOKEN)).status_code == 200
    assert complete(server, headers, max_tokens=4).status_code == 200
    assert server.plane.engine.terms["acme"].weight == 7.0


def test_a_keys_limits_change_while_it_is_used(server: WholeServer) -> None:
    """At once, and what is spent stays spent as a share. The secret is the same."""
    headers = make_tenant(server)
    (key,) = server.plane.services.keys.list("acme").items
    url = f"{server.admin_url}/admin/v1/tenants/acme/keys/{key.id}"

    def limit(**limits: int | None) -> None:
        answer = server.http.patch(url, json={"limits": limits}, headers=bearer(ADMIN_TOKEN))
        assert answer.status_code == 200, answer.text

    def statuses(number: int) -> list[int]:
        return [complete(server, headers).status_code for _ in range(number)]

    assert statuses(3) == [200] * 3
    limit(requests_per_minute=4)
    assert statuses(2) == [200] * 2
    limit(requests_per_minute=2)  # half of it is spent
    assert statuses(2) == [200, 429]
    limit(requests_per_minute=None, max_output_tokens=4)
    assert complete(server, headers, max_tokens=5).status_code == 400
    assert complete(server, headers, max_tokens=4).status_code == 200


def test_limits_over_all_tenants(tmp_path: Path) -> None:
    limits = ["requests_per_minute=4", "max_output_tokens=5", "token_budget=1000"]
    with whole_server(tmp_path, server_limit=limits) as server:
        server.plane.engine.default = ENDLESS
        keys = []
        for tenant in ("one", "two"):
            server.plane.make_tenant(tenant)
            keys.append(bearer(server.plane.make_key(tenant, "inference")))
        assert complete(server, keys[0], max_tokens=6).status_code == 400  # it costs one of four, too
        assert [complete(server, keys[i % 2]).status_code for i in range(4)] == [200, 200, 200, 429]
        assert complete(server, keys[0], max_tokens=None).status_code == 429
        server.settle()
    database = Database(server.plane.database.url)
    spent = _state(database, "server", "", Limits(token_budget=1000, budget_period="month")).spent
    assert spent == 3 * 10
    database.close()


def _state(database: Database, kind: Any, owner: str, limits: Limits) -> BudgetState:
    with database.read() as session:
        return budget_states(session, kind, {owner: limits})[owner]


_TRICKS = st.fixed_dictionaries(
    {},
    optional={
        "n": st.integers(1, 4),
        "max_tokens": st.one_of(st.none(), st.integers(0, 60)),
        "echo": st.booleans(),
        "logprobs": st.integers(0, 2),
        "stream": st.booleans(),
        "prompt": st.one_of(
            st.text("ab", min_size=1, max_size=40),
            st.lists(st.integers(0, 200), min_size=1, max_size=40),
            st.lists(st.text("ab", min_size=1, max_size=9), min_size=1, max_size=3),
            st.lists(st.lists(st.integers(0, 200), min_size=1, max_size=20), min_size=1, max_size=3),
        ),
        "min_tokens": st.integers(0, 5),
        "ignore_eos": st.booleans(),
        "stop": st.sampled_from(["xx", "never"]),
    },
)
_CHAT_TRICKS = st.fixed_dictionaries(
    {},
    optional={
        "n": st.integers(1, 4),
        "max_tokens": st.one_of(st.none(), st.integers(1, 60)),
        "max_completion_tokens": st.one_of(st.none(), st.integers(1, 60)),
        "stream": st.booleans(),
        "logprobs": st.booleans(),
        "stop": st.sampled_from(["xx", "never"]),
    },
)
BUDGET = Limits(token_budget=10**7, budget_period="forever")


@pytest.mark.slow
def test_no_way_of_asking_gets_more_than_was_reserved_and_every_token_is_counted(tmp_path: Path) -> None:
    """The budget is the meter: in the end it tells exactly what the answers said that they used."""
    with whole_server(tmp_path, default_max_tokens=30) as server:
        server.plane.engine.default = ENDLESS
        headers = make_tenant(
            server, token_budget=BUDGET.token_budget, budget_period="forever", max_output_tokens=50
        )
        total = 0

        def send(path: str, body: dict[str, Any], label: str) -> None:
            nonlocal total
            before = len(server.plane.engine.requests)
            body = {"model": SERVED_NAME, **body}
            if body.get("stream"):
                body["stream_options"] = {"include_usage": True}
            sent = {**headers, "x-request-id": label}
            answer = server.http.post(f"{server.data_url}/v1/{path}", json=body, headers=sent)
            made = server.plane.engine.requests[before:]
            if answer.status_code != 200:
                assert answer.status_code == 400
                assert made == []
                return
            usage = _usage(answer)
            given_lengths = (body.get("max_completion_tokens"), body.get("max_tokens"))
            most = next((length for length in given_lengths if length is not None), 30)
            assert most <= 50
            assert all(one.sampling.max_tokens == most for one in made)
            assert usage["completion_tokens"] <= len(made) * most
            total += usage["total_tokens"]

        @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
        @given(_TRICKS, st.sampled_from(["same", "other"]))
        def completions(body: dict[str, Any], label: str) -> None:
            send("completions", {"prompt": "abc", **body}, label)

        @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
        @given(_CHAT_TRICKS, st.sampled_from(["same", "other"]))
        def chats(body: dict[str, Any], label: str) -> None:
            send("chat/completions", {"messages": [{"role": "user", "content": "hi"}], **body}, label)

        completions()
        chats()
        server.settle()
    database = Database(server.plane.database.url)
    state = _state(database, "tenant", "acme", BUDGET)
    assert (state.spent, state.held) == (total, 0)
    assert total > 0
    database.close()


def _usage(answer: httpx.Response) -> dict[str, int]:
    if answer.headers["content-type"].startswith("text/event-stream"):
        chunk = answer.text.split("\n\n")[-3].removeprefix("data: ")
        found: dict[str, int] = json.loads(chunk)["usage"]
        return found
    whole: dict[str, int] = answer.json()["usage"]
    return whole
