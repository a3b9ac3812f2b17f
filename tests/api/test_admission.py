"""What a request costs that is refused: one of its rate, as soon as its key is known, unless the server is to blame."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.control.db.database import Database
from loraplex.control.limits.budget_store import BudgetStore
from loraplex.control.limits.budgets import Budgets
from loraplex.control.limits.in_process import InProcessLimiter
from loraplex.control.limits.service import RequestLimits
from loraplex.control.types import Limits
from support.control.plane import FakeClock, caller
from support.engine.fake_engine import FakeEngineClient, Reply, fake_engine_info
from support.http.data_plane import BASE, DataPlane, FakeAuthenticator, Refused, running_data_plane
from support.waiting import eventually

TEN_A_MINUTE = Limits(requests_per_minute=10)
CALLERS = {
    "lpx_ten": caller("acme", tenant_limits=TEN_A_MINUTE),
    "lpx_few": caller("few", tenant_limits=Limits(requests_per_minute=10, max_sequences=4)),
    "lpx_one": caller("one", tenant_limits=Limits(requests_per_minute=10, max_concurrency=1)),
    "lpx_tokens": caller("tokens", tenant_limits=Limits(requests_per_minute=10, tokens_per_minute=60)),
    "lpx_crowd": caller("crowd"),
}


class Shop:
    """A data plane whose limits are real, on a clock of its own."""

    def __init__(self, plane: DataPlane, clock: FakeClock, limiter: InProcessLimiter) -> None:
        self.plane = plane
        self.clock = clock
        self.limiter = limiter

    def ask(self, key: str, **body: Any) -> httpx.Response:
        body = {"model": BASE, "prompt": "x", "max_tokens": 1} | body
        return self.plane.http.post(
            f"{self.plane.url}/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}
        )

    def send(self, key: str, content: bytes) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        return self.plane.http.post(f"{self.plane.url}/v1/completions", content=content, headers=headers)

    def left(self, key: str) -> int:
        """Requests of the minute before this one, which is answered."""
        answer = self.ask(key)
        assert answer.status_code == 200, answer.text
        return int(answer.headers["x-ratelimit-remaining-requests"]) + 1

    def idle(self) -> None:
        assert self.plane.server.call(lambda: self.plane.drain.wait_idle(60))
        assert self.limiter.num_live == 0


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    clock, limiter = FakeClock(), None
    limiter = InProcessLimiter(clock=clock)

    async def nobody(*_: Any) -> Any:
        raise AssertionError("the database was asked")

    budgets = Budgets(BudgetStore(Database("sqlite://")), nobody)
    limits = RequestLimits(limiter, budgets, clock=clock)
    authenticator = FakeAuthenticator(CALLERS)
    with running_data_plane(tmp_path, limiter=limits, authenticator=authenticator) as plane:
        yield Shop(plane, clock, limiter)


def test_fan_outs_into_a_full_queue_cost_their_tenant_its_rate(shop: Shop) -> None:
    """As it was met: 1,966 of 1,970 requests of a tenant limited to 10 a minute were answered 503."""
    shop.plane.engine.max_inflight = 4 * 256
    shop.plane.engine.default = Reply(text="x", hold=True, hold_after=0)
    prompts = ["x"] * 16
    with ThreadPoolExecutor(4) as pool:
        held = [pool.submit(shop.ask, "lpx_ten", prompt=prompts, n=16) for _ in range(4)]
        eventually(lambda: len(shop.plane.on_loop(lambda: shop.plane.engine.live)) == 4 * 256)
        answers = [shop.ask("lpx_ten", prompt=prompts, n=16) for _ in range(200)]
        assert len(shop.plane.engine.requests) == 4 * 256, "nothing of a refused request was sent"
        shop.plane.on_loop(shop.plane.engine.release)
        assert {answer.result().status_code for answer in held} == {200}
    assert Counter(answer.status_code for answer in answers) == {503: 6, 429: 194}
    assert answers[-1].json()["error"]["code"] == "rate_limit_exceeded"
    assert answers[-1].headers["retry-after"] == "6"
    assert [answers[4].headers["retry-after"], answers[5].headers["retry-after"]] == ["1", "6"]
    shop.idle()
    shop.clock.advance(6)
    shop.plane.engine.default = Reply(text="x")
    assert shop.ask("lpx_ten").status_code == 200


def test_tokenizing_costs_a_request_and_no_tokens(shop: Shop) -> None:
    def tokenize(key: str, body: bytes) -> int:
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        url = f"{shop.plane.url}/tokenize"
        return shop.plane.http.post(url, content=body, headers=headers).status_code

    assert [tokenize("lpx_ten", b'{"prompt": "x"}') for _ in range(4)] == [200] * 4
    assert [tokenize("lpx_ten", b"{") for _ in range(6)] == [400] * 6
    assert tokenize("lpx_ten", b"{") == 429
    many = b'{"prompt": "' + b"x" * 1000 + b'"}'
    assert [tokenize("lpx_tokens", many) for _ in range(3)] == [200] * 3
    assert shop.left("lpx_tokens") == 7
    shop.idle()


def test_a_queue_that_others_fill_costs_nothing(shop: Shop) -> None:
    shop.plane.engine.max_inflight = 8
    shop.plane.engine.default = Reply(text="x", hold=True, hold_after=0)
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(shop.ask, "lpx_crowd", n=8)
        eventually(lambda: len(shop.plane.on_loop(lambda: shop.plane.engine.live)) == 8)
        assert {shop.ask("lpx_ten").status_code for _ in range(30)} == {503}
        shop.plane.on_loop(shop.plane.engine.release)
        held.result()
    shop.plane.engine.default = Reply(text="x")
    assert shop.left("lpx_ten") == 10


@pytest.mark.parametrize(
    ("error", "is_own", "left"),
    [
        ("server_overloaded", False, 10),
        ("server_overloaded", True, 9),
        ("adapter_unavailable", False, 10),
        ("context_length_exceeded", False, 9),
    ],
)
def test_refusal_by_the_engine_is_free_unless_the_caller_caused_it(
    shop: Shop, error: Any, is_own: bool, left: int
) -> None:
    shop.plane.engine.script(Reply(error=(error, "not now"), refused=True, is_own=is_own))
    assert shop.ask("lpx_ten").status_code in (400, 503)
    shop.idle()
    assert shop.left("lpx_ten") == left


def test_a_prompt_that_is_too_long_costs_one_request_and_is_not_tokenised_without_one(shop: Shop) -> None:
    tokenised = []
    text = shop.plane.services.text
    encode = text.encode

    def watched(*args: Any, **named: Any) -> list[int]:
        tokenised.append(threading.get_ident())
        return encode(*args, **named)

    text.encode = watched  # type: ignore[method-assign]
    answers = [shop.ask("lpx_ten", prompt="x" * 5000) for _ in range(50)]
    assert Counter(answer.status_code for answer in answers) == {400: 10, 429: 40}
    assert answers[0].json()["error"]["code"] == "context_length_exceeded"
    assert answers[-1].headers["retry-after"] == "6"
    assert len(tokenised) == 10
    shop.idle()


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b'{"model": "org/tiny", "prompt": "x", "surprise": 1}', 400),
        (b'{"model": "org/tiny", "prompt": "x", "max_tokens": 100000}', 400),
        (b'{"model": "nobody", "prompt": "x"}', 404),
        (b"x" * (5 << 20), 413),
    ],
)
def test_invalid_request_costs_one_request(shop: Shop, body: bytes, status: int) -> None:
    assert shop.send("lpx_ten", body).status_code == status
    shop.idle()
    assert shop.left("lpx_ten") == 9


def test_request_that_never_fits_costs_one_and_names_its_field(shop: Shop) -> None:
    by_n = shop.ask("lpx_few", n=5)
    by_prompts = shop.ask("lpx_few", prompt=["x"] * 5)
    for answer, field in ((by_n, "n"), (by_prompts, "prompt")):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_value", field)
        assert "5 sequences" in error["message"]
    assert shop.left("lpx_few") == 8


def test_more_sequences_than_the_server_ever_takes_are_refused_by_name(tmp_path: Path) -> None:
    """All of a request's sequences wait at first: however many could run, they would never fit the queue."""
    engine = FakeEngineClient(fake_engine_info(max_waiting=2, max_num_seqs=2))
    with running_data_plane(tmp_path, engine=engine) as plane:
        answer = plane.http.post(
            f"{plane.url}/v1/completions",
            json={"model": BASE, "prompt": "x", "n": 3},
            headers={"Authorization": "Bearer lpx_acme"},
        )
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
        assert engine.requests == []


def test_sequences_are_bounded_over_all_requests_of_a_tenant(shop: Shop) -> None:
    shop.plane.engine.default = Reply(text="x", hold=True, hold_after=0)
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(shop.ask, "lpx_few", n=3)
        eventually(lambda: len(shop.plane.on_loop(lambda: shop.plane.engine.live)) == 3)
        answers = [shop.ask("lpx_few", n=2) for _ in range(10)]
        shop.plane.on_loop(shop.plane.engine.release)
        assert held.result().status_code == 200
    assert [answer.status_code for answer in answers] == [429] * 10
    assert "4 sequences at a time" in answers[0].json()["error"]["message"]
    assert "10 requests a minute" in answers[-1].json()["error"]["message"]
    assert len(shop.plane.engine.requests) == 3
    shop.idle()


def test_the_other_limits_of_the_caller_cost_a_request_and_say_when_the_next_may_come(shop: Shop) -> None:
    assert shop.ask("lpx_tokens", prompt="x" * 50, max_tokens=10).status_code == 200
    answers = [shop.ask("lpx_tokens", prompt="x" * 50, max_tokens=10) for _ in range(10)]
    assert {answer.status_code for answer in answers} == {429}
    assert [answer.headers.get("x-ratelimit-remaining-requests") for answer in answers[:2]] == ["8", "7"]
    assert "60 tokens a minute" in answers[0].json()["error"]["message"]
    assert "10 requests a minute" in answers[-1].json()["error"]["message"]
    waited = int(answers[8].headers["retry-after"])
    assert waited > 6, "for the tokens"
    shop.clock.advance(waited - 1)
    assert shop.ask("lpx_tokens", prompt="x" * 50, max_tokens=10).status_code == 429


def test_a_refusal_says_the_longer_of_its_own_wait_and_of_the_rates(shop: Shop) -> None:
    shop.plane.engine.default = Reply(text="x", hold=True, hold_after=0)
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(shop.ask, "lpx_one")
        eventually(lambda: len(shop.plane.on_loop(lambda: shop.plane.engine.live)) == 1)
        answers = [shop.ask("lpx_one") for _ in range(9)]
        shop.plane.on_loop(shop.plane.engine.release)
        held.result()
    assert {answer.status_code for answer in answers} == {429}
    assert all("1 requests at a time" in answer.json()["error"]["message"] for answer in answers)
    assert [answer.headers["retry-after"] for answer in answers] == ["1"] * 8 + ["6"]


def test_failure_of_the_limiter_costs_nothing(tmp_path: Path) -> None:
    with running_data_plane(tmp_path) as plane:
        plane.limiter.refuse_with = [Refused("limits_unavailable", retry_after_s=1)]
        answer = plane.http.post(
            f"{plane.url}/v1/completions",
            json={"model": BASE, "prompt": "x"},
            headers={"Authorization": "Bearer lpx_acme"},
        )
        assert answer.status_code == 503
        assert [used for _, used in plane.limiter.costs] == [None]
