"""The benchmarks of many adapters in short: that they run, and that what they ask and count is what they say."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bench.adapters import beside_cold_loads, training_pushes, two_thousand
from bench.adapters.population import KINDS, AdapterFactory, architecture, gamma_arrivals, power_law, zipf
from bench.adapters.traffic import Answer, Question, Seen
from bench.adapters.training_pushes import Push, Run, judge
from loraplex.adapters.admission.base_model import load_base_spec
from loraplex.adapters.admission.inspection import inspect_adapter


class TestPopulation:
    @pytest.mark.parametrize("kind", sorted(KINDS))
    def test_each_adapter_is_admissible_and_its_own(
        self, kind: str, tiny_model: Path, tmp_path: Path
    ) -> None:
        base = load_base_spec(tiny_model, cache_dir=tmp_path)
        factory = AdapterFactory(architecture(tiny_model), KINDS[kind], 8)
        digests, ranks = set(), []
        for number in range(8):
            for name, data in factory.files(number).items():
                (tmp_path / name).write_bytes(data)
            files = tmp_path / "adapter_config.json", tmp_path / "adapter_model.safetensors"
            spec = inspect_adapter(*files, base, max_rank=64)
            digests.add(spec.digest)
            ranks.append(spec.rank)
            assert {site.site for site in spec.sites} == set(KINDS[kind].sites)
        assert len(digests) == 8
        assert ranks == [KINDS[kind].ranks[number % len(KINDS[kind].ranks)] for number in range(8)]

    def test_zipf_has_its_shares(self) -> None:
        counts = Counter(itertools.islice(zipf(2000, 1.1, 0), 20_000))
        assert counts[0] / counts[3] == pytest.approx(4**1.1, rel=0.15)
        assert max(counts) < 2000

    @pytest.mark.parametrize(("alpha", "share"), [(0.1, 0.5**0.1), (0.5, 0.5**0.5), (1.0, 0.5)])
    def test_power_law_is_that_of_s_lora(self, alpha: float, share: float) -> None:
        drawn = list(itertools.islice(power_law(2000, alpha, 0), 8_000))
        assert sum(place < 1000 for place in drawn) / 8_000 == pytest.approx(share, abs=0.02)
        assert max(drawn) < 2000

    def test_arrivals_have_rate_and_variation(self) -> None:
        times = list(itertools.islice(gamma_arrivals(5.0, 2.0, 0), 20_000))
        gaps = [b - a for a, b in itertools.pairwise(times)]
        assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.05)
        assert statistics.stdev(gaps) == pytest.approx(0.4, rel=0.05)


def answered(due: float, arrivals: list[float], text: str = "a", version: str = "run@v1") -> Answer:
    return Answer(
        Question("run", "", "", 4), due, version=version, arrivals=arrivals, text=text, tokens=len(arrivals)
    )


def test_a_window_counts_what_came_in_it() -> None:
    seen = Seen()
    early = answered(8.0, [9.0, 10.5, 10.6, 12.0])
    late = answered(11.0, [11.5, 12.5])
    assert seen.add([early, late], 10.0, 12.0) == pytest.approx(3 / 2)
    assert seen.answers == [late]
    assert seen.first_token_ms(50) == pytest.approx(500)


class TestJudging:
    def judged(self, probes: list[Answer], **answers: Any) -> dict[str, int]:
        right = {1: answered(0, [0], "one"), 2: answered(0, [0], "two")}
        run = Run(pushes=[Push(1, 0.0, 1.0), Push(2, 10.0, 11.0)], probes=probes, **answers)
        return judge(run, right)

    def test_right_answers(self) -> None:
        probes = [answered(2.0, [3.0], "one"), answered(10.9, [12.0], "one")]
        counts = self.judged([*probes, answered(10.9, [12.0], "two", "run@v2")])
        assert {counts[name] for name in ("errors", "stale", "torn", "leaked")} == {0}
        assert (counts["told apart"], counts["pairs"]) == (1, 1)

    def test_an_old_version_after_its_successor_is_stale(self) -> None:
        assert self.judged([answered(11.1, [12.0], "one")])["stale"] == 1

    def test_an_answer_of_another_version_is_torn(self) -> None:
        assert self.judged([answered(2.0, [3.0], "two")])["torn"] == 1

    def test_another_answer_to_the_same_question_is_leaked(self) -> None:
        streams = [answered(1.0, [2.0], "x"), answered(2.0, [3.0], "x"), answered(3.0, [4.0], "y")]
        assert self.judged([], streams=streams)["leaked"] == 1


class TestRuns:
    """The short version has one of the three: all start the same server and count the same traffic. What they measure
    has tests of its own."""

    @pytest.mark.soak
    def test_two_thousand(self, tiny_model: Path, tmp_path: Path) -> None:
        options = (
            "--adapters 24 --hot 4 --warm 8 --few 2 --tenants 3 --streams 4 --slots 4 --rounds 1 --kv 16MiB"
        )
        arguments = [
            str(tiny_model),
            *options.split(),
            "--seconds",
            "1.5",
            "--ramp",
            "0.2",
        ]
        for traces in ("zipf,1", "zipf"):  # the second run finds the adapters of the first
            told = two_thousand.main([*arguments, "--traces", traces, "--work", str(tmp_path / "work")])
            for trace in traces.split(","):
                few: Any = told[trace]["few"]
                many: Any = told[trace]["many"]
                assert few["requests"]
                assert many["requests"]
                assert not few["errors"]
                assert not many["errors"]
                assert many["shares"]["hot"] < few["shares"]["hot"] == 1.0

    @pytest.mark.slow
    def test_beside_cold_loads(self, tiny_model: Path) -> None:
        options = "--adapters 40 --streams 2 --pairs 1 --seconds 2 --ramp 0.5 --rate 4 --kv 16MiB"
        measured = beside_cold_loads.main([str(tiny_model), *options.split()])
        assert all(seen.answers and not seen.errors for seen in measured.values())

    @pytest.mark.soak
    def test_training_pushes(self, tiny_model: Path) -> None:
        options = (
            "--minutes 0.2 --every 1 --window 3 --streams 2 --tokens 16 --kv 16MiB --adapter-memory 16MiB"
        )
        counts = training_pushes.main([str(tiny_model), *options.split()])
        assert counts["pairs"] >= 2
        assert counts["told apart"] == counts["pairs"]
        assert {counts[name] for name in ("errors", "stale", "torn", "leaked")} == {0}
