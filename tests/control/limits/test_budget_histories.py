"""Whatever servers, the database and time do: a budget is never overspent, and nothing is lost for good."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from loraplex.control.db.database import Database, utc_now
from loraplex.control.db.tables import Tenant
from loraplex.control.errors import DatabaseUnavailable, QuotaSpent, RateLimited
from support.control.budgets import SLICE_S, Replica, World, charge
from support.control.plane import database_url

LIMIT = 1000
LONGEST_S = SLICE_S / 2
"""No request of these histories runs longer: the other half of a slice's time is for it."""


class _Server:
    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.running: dict[str, tuple[int, float]] = {}  # cost, when it began
        self.untold = 0  # spent while the database did not answer
        self.wanted, self.wanted_before = (
            0,
            0,
        )  # since the last report that was answered, and in the time before


_USED = st.one_of(st.none(), st.integers(0, 150))
"""Tokens; None: it still runs."""


class Histories(RuleBasedStateMachine):
    def __init__(self, seen: Counter[str]) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="loraplex-budgets-"))
        self.database = Database(database_url(self.root))
        with self.database.write() as session:
            session.add(Tenant(id="acme", weight=1.0, limits={}, created_at=utc_now()))
        self.world = World(self.database)
        self.servers = [_Server(self.world.replica()) for _ in range(3)]
        self.spent = 0
        self.doubt = 0  # what killed servers had said that they might spend
        self.seen = seen

    def teardown(self) -> None:
        """In the end everything that is left can be spent, and the database's sum is true."""
        for server in self.servers:
            server.replica.reach = "answers"
            for name in list(server.running):
                self._settle(server, name, 0)
            server.replica.close()
        self.world.clock.advance(SLICE_S + 1)
        with contextlib.suppress(QuotaSpent):
            self.world.replica().take(charge(1, LIMIT, "forever"))
        told = self.world.state(LIMIT, "forever").spent
        assert self.spent <= told <= self.spent + self.doubt
        self.world.close()
        self.database.close()
        shutil.rmtree(self.root)

    def _settle(self, server: _Server, name: str, used: int) -> None:
        cost, _ = server.running.pop(name)
        server.replica.settle(name, min(used, cost))
        self.spent += min(used, cost)
        if server.replica.reach == "away":
            server.untold += min(used, cost)

    @rule(
        which=st.integers(0, 2), asked=st.lists(st.tuples(st.integers(1, 150), _USED), min_size=1, max_size=5)
    )
    def serve(self, which: int, asked: list[tuple[int, int | None]]) -> None:
        """One after the other; some go on for longer."""
        server = self.servers[which]
        for cost, used in asked:
            name = self._take(server, cost)
            if name is not None and used is not None:
                self._settle(server, name, used)

    def _take(self, server: _Server, cost: int) -> str | None:
        server.wanted += cost
        try:
            name = server.replica.take(charge(cost, LIMIT, "forever"))
        except (QuotaSpent, RateLimited, DatabaseUnavailable) as refusal:
            self.seen[refusal.code] += 1
            return None
        self.seen["passed"] += 1
        server.running[name] = (cost, self.world.clock())
        return name

    @rule(which=st.integers(0, 2), oldest=st.booleans(), used=st.integers(0, 400))
    def settle(self, which: int, oldest: bool, used: int) -> None:
        server = self.servers[which]
        if server.running:
            self._settle(server, list(server.running)[0 if oldest else -1], used)

    @rule(which=st.integers(0, 2))
    def report(self, which: int) -> None:
        server = self.servers[which]
        server.replica.report()
        if server.replica.reach != "away":
            server.untold = 0
        if server.replica.reach == "answers":
            server.wanted, server.wanted_before = 0, server.wanted

    @rule(which=st.integers(0, 2), reach=st.sampled_from(["answers", "answers", "away", "lost"]))
    def reach(self, which: int, reach: str) -> None:
        self.servers[which].replica.reach = reach  # type: ignore[assignment]

    @rule(which=st.integers(0, 2))
    def kill(self, which: int) -> None:
        """Unless it is cut off with something that it could not tell: then two things have failed at once."""
        server = self.servers[which]
        if server.untold:
            return
        self.seen["killed"] += 1
        self.doubt += 2 * (server.wanted + server.wanted_before)
        self.servers[which] = _Server(self.world.replica())

    @rule(which=st.integers(0, 2))
    def stop(self, which: int) -> None:
        server = self.servers[which]
        if server.replica.reach == "answers" and not server.running:
            server.replica.close()
            self.servers[which] = _Server(self.world.replica())

    @rule(seconds=st.sampled_from([0.5, 5.0, 60.0, LONGEST_S]))
    def time_passes(self, seconds: float) -> None:
        for server in self.servers:
            for name, (cost, began) in list(server.running.items()):
                if self.world.clock() + seconds - began > LONGEST_S:
                    self._settle(server, name, cost)
        self.world.clock.advance(seconds)

    @invariant()
    def never_overspent(self) -> None:
        running = sum(cost for server in self.servers for cost, _ in server.running.values())
        assert self.spent + running <= LIMIT
        assert self.world.promised() <= LIMIT


def _run(max_examples: int, steps: int) -> None:
    seen = Counter[str]()
    run_state_machine_as_test(
        lambda: Histories(seen),
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    print(f"\n{max_examples} histories: {dict(seen)}; never overspent")


@pytest.mark.slow
def test_histories() -> None:
    _run(20, 30)


@pytest.mark.soak
def test_many_histories() -> None:
    _run(2000, 60)
