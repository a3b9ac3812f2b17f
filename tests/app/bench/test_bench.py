"""The load generator: what it asks, when, and whether its figures are the truth."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from loraplex.app.bench.client import Asking, Outcome
from loraplex.app.bench.load import Load, Run, run_load
from loraplex.app.bench.report import percentile, report
from loraplex.app.bench.workload import BenchRequest, Workload
from loraplex.app.cli import create_cli
from support.http.api_server import RunningServer, serve_app
from support.http.sse_server import KEY, Answer, FakeDataPlane


@pytest.fixture
def plane() -> FakeDataPlane:
    return FakeDataPlane()


@pytest.fixture
def server(plane: FakeDataPlane) -> Iterator[RunningServer]:
    with serve_app(plane.app()) as running:
        yield running


def first(workload: Workload, count: int) -> list[BenchRequest]:
    return list(itertools.islice(workload.requests(), count))


def measure(server: RunningServer, workload: Workload, load: Load, asking: Asking | None = None) -> Run:
    async def run() -> Run:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=server.url, headers={"authorization": f"Bearer {KEY}"}, limits=limits, timeout=20
        ) as client:
            return await run_load(client, workload, load, asking or Asking())

    return asyncio.run(run())


class TestWorkload:
    def test_the_same_seed_asks_the_same_and_another_does_not(self) -> None:
        workload = Workload(("a", "b"), rate=5, seed=3)
        assert first(workload, 50) == first(workload, 50)
        assert first(workload, 50) != first(Workload(("a", "b"), rate=5, seed=4), 50)

    def test_poisson_arrivals_have_the_rate_and_exponential_gaps(self) -> None:
        times = [r.arrival_s for r in first(Workload(("a",), rate=20, input_len=1), 4000)]
        gaps = [b - a for a, b in itertools.pairwise([0.0, *times])]
        mean = sum(gaps) / len(gaps)
        deviation = math.sqrt(sum((g - mean) ** 2 for g in gaps) / len(gaps))
        assert mean == pytest.approx(1 / 20, rel=0.06)
        assert deviation == pytest.approx(mean, rel=0.1)

    def test_distributions(self) -> None:
        names = ("a", "b", "c", "d")

        def counts(kind: Any, alpha: float = 1.0) -> Counter[str]:
            workload = Workload(names, distribution=kind, zipf_alpha=alpha, input_len=1)
            return Counter(r.model for r in first(workload, 4000))

        assert counts("one") == {"a": 4000}
        assert all(900 < counts("uniform")[n] < 1100 for n in names)
        zipf = counts("zipf")
        assert zipf["a"] / zipf["b"] == pytest.approx(2, rel=0.15)
        assert zipf["a"] / zipf["d"] == pytest.approx(4, rel=0.2)

    def test_prompts_have_the_length_and_differ_beyond_the_shared_prefix(self) -> None:
        words = [
            str(r.prompt).split() for r in first(Workload(("a",), input_len=30, shared_prefix_len=10), 20)
        ]
        assert {len(w) for w in words} == {30}
        assert len({tuple(w[:10]) for w in words}) == 1
        assert len({tuple(w[10:]) for w in words}) == 20
        ids = [r.prompt for r in first(Workload(("a",), input_len=30, unit="tokens", vocab_size=1200), 20)]
        assert all(len(i) == 30 and all(1000 <= int(t) < 1200 for t in i) for i in ids)
        assert len({tuple(i) for i in ids}) == 20


class TestLoads:
    def test_a_closed_loop_keeps_exactly_its_workers_busy(
        self, server: RunningServer, plane: FakeDataPlane
    ) -> None:
        plane.answer = Answer(first_s=0.01, together=3)
        run = measure(server, Workload(("a",), input_len=4), Load(concurrency=3, num_requests=24))
        assert len(run.outcomes) == len(plane.bodies) == 24
        assert plane.busiest == 3
        assert all(o.error is None and o.output_tokens == 4 and o.prompt_tokens == 7 for o in run.outcomes)

    def test_poisson_does_not_wait_for_answers_and_measures_from_the_due_time(
        self, server: RunningServer, plane: FakeDataPlane
    ) -> None:
        plane.answer = Answer(together=20)
        workload = Workload(("a",), rate=200, input_len=4)
        run = measure(server, workload, Load(num_requests=20))
        assert plane.busiest == 20  # a closed loop would have had one
        due = sorted(o.due for o in run.outcomes)
        wanted = [r.arrival_s for r in first(workload, 20)]
        assert [d - due[0] for d in due] == pytest.approx([w - wanted[0] for w in wanted])
        assert all(o.sent >= o.due for o in run.outcomes)
        figures = report(run)
        assert figures["e2e_latency_s"]["mean"] == pytest.approx(
            sum(o.done - o.due for o in run.outcomes) / 20
        )

    def test_a_duration_ends_a_run(self, server: RunningServer, plane: FakeDataPlane) -> None:
        plane.answer = Answer(first_s=0.02)
        for duration_s in (0.3, 1.2, 4.8):  # a busy machine may do nothing for some of it
            run = measure(server, Workload(("a",), input_len=4), Load(concurrency=2, duration_s=duration_s))
            began = [o.due for o in run.outcomes]
            assert len(began) <= 2 * (duration_s / 0.02 + 1)
            assert max(began) - min(began) < duration_s
            if len(began) >= 4:
                break
        assert len(began) >= 4
        open_loop = Workload(("a",), rate=50, input_len=4)
        run = measure(server, open_loop, Load(duration_s=0.3))
        assert len(run.outcomes) == sum(r.arrival_s < 0.3 for r in first(open_loop, 100))

    def test_warm_up_requests_are_not_counted_and_share_no_prompt(
        self, server: RunningServer, plane: FakeDataPlane
    ) -> None:
        run = measure(server, Workload(("a", "b"), input_len=12), Load(num_requests=6, warmup=2))
        assert len(run.outcomes) == 6
        assert len(plane.bodies) == 10
        assert [b["model"] for b in plane.bodies[:4]] == ["a", "a", "b", "b"]
        assert len({b["prompt"] for b in plane.bodies}) == 10

    def test_times_are_those_of_the_stream(self, server: RunningServer, plane: FakeDataPlane) -> None:
        for first_s, gap_s in ((0.15, 0.06), (0.6, 0.24), (2.4, 0.96)):  # a busy machine adds to short ones
            plane.answer = Answer(first_s=first_s, gap_s=gap_s)
            figures = report(measure(server, Workload(("a",), input_len=4), Load(num_requests=3)))
            assert figures["inter_token_latency_s"]["count"] == 9
            assert figures["e2e_latency_s"]["median"] >= first_s + 3 * gap_s
            first, between, each = (
                figures["time_to_first_token_s"]["median"],
                figures["inter_token_latency_s"],
                figures["time_per_output_token_s"]["median"],
            )
            told = (
                first_s <= first < 2 * first_s
                and 0.9 * gap_s <= between["median"] < 2 * gap_s
                and each == pytest.approx(between["mean"], rel=0.2)
            )
            if told:
                break
        assert told, figures

    def test_in_chat_the_empty_role_piece_is_not_a_first_token(
        self, server: RunningServer, plane: FakeDataPlane
    ) -> None:
        run = measure(server, Workload(("a",)), Load(num_requests=1), Asking("chat"))
        assert len(run.outcomes[0].arrivals) == 4
        assert plane.bodies[0]["messages"][0]["role"] == "user"

    def test_failures_are_counted_by_code_and_kept_out_of_the_latencies(
        self, server: RunningServer, plane: FakeDataPlane
    ) -> None:
        kinds = itertools.cycle(
            [
                Answer(),
                Answer(status=503),
                Answer(status=502, code=None),
                Answer(error_after=2),
                Answer(cut_after=1),
            ]
        )
        plane.answer = lambda _body: next(kinds)
        figures = report(measure(server, Workload(("a",), input_len=4), Load(num_requests=10)))
        assert figures["completed"] == 2
        assert figures["failed"] == 8
        assert figures["errors"] == {
            "server_overloaded": 2,
            "http_502": 2,
            "engine_restarting": 2,
            "stream_cut": 2,
        }
        assert figures["e2e_latency_s"]["count"] == 2
        assert figures["output_tokens"] == 8

    def test_a_server_that_goes_away_is_an_outcome(self, plane: FakeDataPlane) -> None:
        with serve_app(plane.app()) as running:
            pass
        figures = report(measure(running, Workload(("a",)), Load(num_requests=2)))
        assert figures["errors"] == {"connection_failed": 2}


class TestReport:
    def test_percentiles_interpolate_between_closest_ranks(self) -> None:
        values = [float(v) for v in range(1, 102)]
        assert [percentile(values, q) for q in (0, 50, 95, 99, 100)] == [1, 51, 96, 100, 101]
        assert percentile([1.0, 2.0], 50) == 1.5
        assert percentile([3.0], 99) == 3.0

    def test_throughput_counts_the_servers_tokens_over_the_whole_run(self) -> None:
        outcomes = tuple(
            Outcome(
                "m",
                due=i,
                sent=i,
                arrivals=[i + 1.0, i + 2.0],
                done=i + 2.0,
                prompt_tokens=10,
                output_tokens=5,
            )
            for i in range(4)
        )
        figures = report(Run(outcomes, wall_s=5.0))
        assert figures["output_tokens_per_s"] == 4
        assert figures["total_tokens_per_s"] == 12
        assert figures["requests_per_s"] == 0.8
        assert figures["time_per_output_token_s"]["mean"] == 0.25

    def test_a_run_without_outcomes_is_all_nothing(self) -> None:
        figures = report(Run((), 0.0))
        assert figures["requests"] == 0
        assert figures["output_tokens_per_s"] == 0
        assert figures["e2e_latency_s"] is None


class TestCommand:
    def run(self, server: RunningServer, *args: str, key: str = KEY) -> Any:
        arguments = ["bench", "--url", server.url, "--api-key", key, *args]
        return CliRunner().invoke(create_cli(), arguments)

    def test_json_has_the_options_and_the_figures(self, server: RunningServer, plane: FakeDataPlane) -> None:
        result = self.run(server, "--adapters", "a,b", "--num-requests", "8", "--concurrency", "2", "--json")
        assert result.exit_code == 0, result.output
        figures = json.loads(result.stdout)
        assert figures["options"]["models"] == ["a", "b"]
        assert figures["completed"] == 8
        assert set(figures["by_model"]) <= {"a", "b"}
        assert {b["model"] for b in plane.bodies} == {"a", "b"}
        assert all(b["ignore_eos"] and b["max_tokens"] == 64 for b in plane.bodies)

    def test_the_table_names_every_latency(self, server: RunningServer) -> None:
        result = self.run(server, "--rate", "100", "--num-requests", "5")
        assert result.exit_code == 0, result.output
        for word in ("time to first token", "inter-token latency", "p99", "output tokens/s"):
            assert word in result.stdout

    def test_base_model_is_asked_without_adapters(self, server: RunningServer, plane: FakeDataPlane) -> None:
        assert self.run(server, "--num-requests", "1").exit_code == 0
        assert plane.bodies[0]["model"] == "base-model"

    def test_the_address_may_have_the_path_of_the_routes(self, server: RunningServer) -> None:
        assert self.run(server, "--num-requests", "1", "--url", f"{server.url}/v1").exit_code == 0

    def test_wrong_usage_is_2_and_failure_is_1_with_one_line(
        self, server: RunningServer, plane: FakeDataPlane
    ) -> None:
        assert self.run(server, "--rate", "1", "--concurrency", "1").exit_code == 2
        assert self.run(server, "--rate", "0").exit_code == 2
        assert self.run(server, "--distribution", "normal").exit_code == 2
        assert self.run(server, "--input-unit", "tokens", "--endpoint", "chat").exit_code == 2
        denied = self.run(server, key="lpx_wrong")
        assert denied.exit_code == 1
        assert "--api-key" in denied.stderr
        assert len(denied.stderr.splitlines()) == 1
        plane.answer = Answer(status=503)
        result = self.run(server, "--num-requests", "2")
        assert result.exit_code == 1
        assert "server_overloaded" in result.stdout

    def test_no_server(self) -> None:
        result = CliRunner().invoke(
            create_cli(), ["bench", "--url", "http://127.0.0.1:9", "--api-key", "lpx_x"]
        )
        assert result.exit_code == 1
        assert "no server answers" in result.stderr
