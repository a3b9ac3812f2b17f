"""Whatever a body says of its own size, the limits hold what the engine may draw for it, and of that no more is charged
than was drawn.

The API, the limits on key, tenant and server, and a token budget in a database are real. The engine is scripted: it
draws all that it is allowed, and what it was allowed is what the limits are compared with.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.control.errors import RateLimited
from loraplex.control.limits.budget_store import BudgetStore, budget_states
from loraplex.control.limits.budgets import Budgets
from loraplex.control.limits.in_process import InProcessLimiter
from loraplex.control.limits.service import RequestLimits
from loraplex.control.types import NO_LIMITS, Admission, Limits, Principal
from support.control.plane import ControlPlane, FakeClock, caller
from support.engine.fake_engine import Reply
from support.http.data_plane import BASE, DataPlane, FakeAuthenticator, running_data_plane
from support.waiting import eventually

ACME = Limits(
    requests_per_minute=12, tokens_per_minute=700, max_concurrency=2, token_budget=600, budget_period="hour"
)
SERVER = Limits(tokens_per_minute=900)
CALLERS = {
    "lpx_few": caller("acme", key_id="few", key_limits=Limits(tokens_per_minute=500), tenant_limits=ACME),
    "lpx_short": caller("acme", key_id="short", key_limits=Limits(max_output_tokens=60), tenant_limits=ACME),
    "lpx_rival": caller("rival", key_id="rival"),
}


@dataclass
class Shop:
    """A data plane whose limits are real, on a clock that only `next_hour` moves: within a history nothing flows back
    but what was not used."""

    plane: DataPlane
    control: ControlPlane
    clock: FakeClock
    limiter: InProcessLimiter
    budgets: Budgets
    limits: RequestLimits
    refused: int = 0
    """Requests of `acme` that cost one of its rate, and nothing else."""

    def next_hour(self) -> None:
        self.clock.advance(3600)
        self.refused = 0

        def forget() -> None:
            self.plane.engine.requests.clear()
            self.plane.ledger.accepted.clear()
            self.plane.ledger.rows.clear()

        self.plane.on_loop(forget)

    def idle(self) -> None:
        """Until nothing is being answered, and then nothing is reserved."""
        assert self.plane.server.call(lambda: self.plane.drain.wait_idle(60))
        self.plane.ledger.check()
        assert (self.limiter.num_live, self.budgets.num_live) == (0, 0)

    def live(self) -> set[str]:
        """Our own ids of the requests that the engine has."""
        return {name.rpartition("-")[0] for name in self.plane.engine.live}

    def check(self) -> None:
        """What the limits say is left is what is left by what the engine may draw and has drawn."""

        async def compare() -> None:
            charged, requests = self._charged()
            for who in CALLERS.values():
                windows = [
                    limits.tokens_per_minute - charged[owner]
                    for owner, limits in _owners(who)
                    if limits.tokens_per_minute is not None
                ]
                assert min(windows) >= 0, "more was let in than the limits hold"
                tokens_left, requests_left = await self._left(who)
                assert tokens_left == min(windows), who.key_id
                if who.tenant_id == "acme":
                    assert ACME.requests_per_minute is not None
                    assert requests_left == ACME.requests_per_minute - requests >= 0
            assert charged["acme"] <= (ACME.token_budget or 0)

        self.plane.server.call(compare)

    def check_budget(self) -> None:
        """When nothing runs: the database's sum is what was used."""

        async def spent() -> int:
            await self.budgets.report()
            with self.control.database.read() as session:
                states = budget_states(session, "tenant", {"acme": ACME}, now=self.clock.now())
            return states["acme"].spent

        assert self.plane.server.call(spent) == self._charged()[0]["acme"]

    def _charged(self) -> tuple[Counter[str], int]:
        """Tokens by key, by tenant and in all, and the requests of `acme`: those that were refused after all cost one
        each, too."""
        ledger = self.plane.ledger
        used = {row.id: row.prompt_tokens + row.completion_tokens for row in ledger.rows}
        charged: Counter[str] = Counter()
        for record in ledger.accepted:
            tokens = used.get(record.id, self._allowed(record.id))
            assert tokens <= self._allowed(record.id), "more was drawn than allowed"
            for owner in (record.key_id, record.tenant_id, "server"):
                charged[owner] += tokens
        return charged, self.refused + sum(record.tenant_id == "acme" for record in ledger.accepted)

    def _allowed(self, request_id: str) -> int:
        """Each prompt once, and all that the engine may draw for all choices."""
        mine = [r for r in self.plane.engine.requests if r.request_id.rpartition("-")[0] == request_id]
        prompts = sum(len(r.prompt_ids) for r in mine if r.sampling.choice == 0)
        return prompts + sum(r.sampling.max_tokens for r in mine)

    async def _left(self, who: Principal) -> tuple[int, int | None]:
        """Tokens and requests of this minute. A question that takes nothing."""
        try:
            held = await self.limits.reserve(
                Admission("question"), who, prompt_tokens=0, asked_tokens=0, default_tokens=1, n=1
            )
            tokens = held.windows.get("tokens")
        except RateLimited as refusal:  # no place is left, and nothing was taken
            tokens = refusal.windows.get("tokens")
        taken = 1
        try:
            requests = (await self.limits.admit("question", who)).windows.get("requests")
        except RateLimited as refusal:
            requests, taken = refusal.windows.get("requests"), 0
        await self.limits.settle(Admission("question"), used_tokens=None)
        assert tokens is not None
        return tokens.remaining, None if requests is None else requests.remaining + taken

    def send(self, key: str, label: str | None, body: dict[str, Any]) -> httpx.Response:
        route = "chat/completions" if "messages" in body else "completions"
        headers = {"Authorization": f"Bearer {key}"} | ({} if label is None else {"x-request-id": label})
        answer = self.plane.http.post(f"{self.plane.url}/v1/{route}", json=body, headers=headers)
        free = "requests a minute" in answer.text or "The server's limit" in answer.text
        if answer.status_code in (400, 429) and not free and CALLERS[key].tenant_id == "acme":
            self.refused += 1
        return answer


def _owners(who: Principal) -> list[tuple[str, Limits]]:
    return [
        (who.key_id or "", who.key_limits or NO_LIMITS),
        (who.tenant_id or "", who.tenant_limits or NO_LIMITS),
        ("server", SERVER),
    ]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    root: Path = tmp_path_factory.mktemp("caps")
    clock = FakeClock(epoch=1_800_000_000.0 - 1_800_000_000 % 3600)
    control = ControlPlane(root)
    for name in ("acme", "rival"):
        control.tenants.create(name)
    limiter = InProcessLimiter(clock=clock)
    store = BudgetStore(control.database, now=lambda _: clock.now())
    # A slow disk is not what these tests are about: a request that gave up on it would answer 503.
    budgets = Budgets(store, control.database.run, clock=clock, answer_timeout_s=60)
    limits = RequestLimits(limiter, budgets, server=SERVER)
    authenticator = FakeAuthenticator(CALLERS)
    with running_data_plane(root / "model", limiter=limits, authenticator=authenticator) as plane:
        yield Shop(plane, control, clock, limiter, budgets, limits)
        plane.server.call(budgets.close)
    control.close()


_TEXT = st.text("abc", min_size=1, max_size=20)
_IDS = st.lists(st.integers(0, 255), min_size=1, max_size=20)
_PROMPTS = st.one_of(
    _TEXT, _IDS, st.lists(_TEXT, min_size=1, max_size=4), st.lists(_IDS, min_size=1, max_size=4)
)
_LENGTH = st.one_of(
    st.none(), st.integers(1, 40), st.sampled_from([0, 60, 61, 300, 499, 500, 701, 4000, 2**31 - 1, -1])
)
_N = st.sampled_from([1, 2, 3, 16, None, 0])
_SHARED: dict[str, Any] = {
    "max_tokens": _LENGTH,
    "max_completion_tokens": _LENGTH,
    "n": _N,
    "stream": st.booleans(),
    "min_tokens": st.integers(0, 70),
    "ignore_eos": st.booleans(),
    "priority": st.integers(-5, 5),
    "user": st.just("somebody else"),
}
_BODIES = st.one_of(
    st.fixed_dictionaries(
        {"model": st.just(BASE), "prompt": _PROMPTS},
        optional=_SHARED | {"echo": st.booleans(), "best_of": _N, "logprobs": st.integers(0, 2)},
    ),
    st.fixed_dictionaries(
        {"model": st.just(BASE), "messages": _TEXT.map(lambda text: [{"role": "user", "content": text}])},
        optional=_SHARED | {"logprobs": st.booleans(), "top_logprobs": st.integers(0, 2)},
    ),
)
_ROUNDS = st.lists(
    st.tuples(
        st.lists(st.tuples(st.sampled_from(sorted(CALLERS)), _BODIES), min_size=1, max_size=3),  # at once
        st.sampled_from([None, "again", "the last one's id"]),  # what they all call themselves
        st.sampled_from([0, 1, 17, 5000]),  # how long answers get that nothing cuts
    ),
    min_size=1,
    max_size=5,
)
_Round = tuple[list[tuple[str, dict[str, Any]]], str | None, int]


def _follow(shop: Shop, rounds: list[_Round], seen: Counter[int]) -> None:
    shop.next_hour()
    own_id = "none yet"
    with ThreadPoolExecutor(3) as pool:
        for bodies, naming, length in rounds:
            shop.plane.engine.default = Reply(text="y" * length, chunk=16, hold=True)
            label = own_id if naming == "the last one's id" else naming
            answers = [pool.submit(shop.send, key, label, body) for key, body in bodies]
            try:
                _wait_for_all(shop, answers)
                shop.check()
            finally:
                shop.plane.on_loop(shop.plane.engine.release)
            for answer in answers:
                status = answer.result().status_code
                seen[status] += 1
                assert status in (200, 400, 429), answer.result().text
            shop.idle()
            shop.check()
            own_id = shop.plane.ledger.accepted[-1].id if shop.plane.ledger.accepted else own_id
    shop.check_budget()


def _wait_for_all(shop: Shop, answers: list[Future[httpx.Response]]) -> None:
    """Until each is refused, or with the engine and not going on."""
    eventually(
        lambda: sum(answer.done() for answer in answers) + len(shop.plane.on_loop(shop.live)) == len(answers)
    )


def _run(shop: Shop, examples: int) -> None:
    seen: Counter[int] = Counter()

    @settings(max_examples=examples, deadline=None, database=None, derandomize=True)
    @given(_ROUNDS)
    def histories(rounds: list[_Round]) -> None:
        _follow(shop, rounds, seen)

    histories()
    print(f"\n{examples} histories: requests by status {dict(sorted(seen.items()))}")
    assert min(seen[status] for status in (200, 400, 429)) >= examples // 10, seen


def test_no_declared_size_gets_more_than_it_is_charged_for(shop: Shop) -> None:
    _run(shop, 40)


@pytest.mark.soak
def test_no_declared_size_gets_more_than_it_is_charged_for_at_length(shop: Shop) -> None:
    _run(shop, 3000)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("drawn", range(7))
def test_a_hang_up_after_each_token_gives_back_exactly_what_was_not_drawn(
    shop: Shop, stream: bool, drawn: int
) -> None:
    shop.next_hour()
    shop.plane.engine.default = Reply(text="abcdef", hold=True, hold_after=drawn)
    body = json.dumps({"model": BASE, "prompt": "xyz", "max_tokens": 6, "n": 2, "stream": stream}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer lpx_few\r\nContent-Length: "
    engine = shop.plane.engine

    def all_drawn() -> bool:
        streams = list(engine._streams.values())
        return len(streams) == 2 and all(one.num_received == drawn for one in streams)

    with shop.plane.server.connect() as sock:
        sock.sendall(f"{head}{len(body)}\r\n\r\n".encode() + body)
        eventually(lambda: shop.plane.on_loop(all_drawn))
        shop.check()
    shop.idle()
    (row,) = shop.plane.ledger.rows
    assert row.completion_tokens == 2 * drawn
    assert row.prompt_tokens == 3 or drawn == row.prompt_tokens == 0
    shop.check()
    shop.check_budget()
