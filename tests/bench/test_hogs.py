"""What the benches of tenants beside each other conclude from their figures."""

from __future__ import annotations

from itertools import count

import pytest

from bench.hogs.figures import Rate, Spread, hog_table, last_to_first, missed, rate_table
from bench.hogs.mixes import EIGHT, INVOCATION, MIXES
from bench.hogs.servers import in_turns, parse_setting
from bench.hogs.tenants import Seen

ALONE = Seen(waits=[0.03] * 5, gaps=[0.008] * 5)


def test_p99_is_the_nearest_rank() -> None:
    values = [float(value) for value in range(1, 201)]
    assert Spread.of(values) == Spread(median=100.5, p99=198.0, most=200.0)
    assert Spread.of(values[:99]).p99 == 99.0


@pytest.mark.parametrize(
    ("waits", "gaps", "what"),
    [
        ([0.18] * 200, [0.04] * 200, []),
        ([0.19] * 200, [0.04] * 200, ["first token, median"]),
        ([0.18] * 200, [0.041] * 200, ["gap, median"]),
        ([0.1] * 197 + [0.31] * 3, [0.02] * 200, ["first token, p99"]),
        ([0.1] * 198 + [0.31] * 2, [0.02] * 197 + [0.081] * 3, ["gap, p99"]),
        ([9.0], [], ["first token, median", "first token, p99", "gap, median", "gap, p99"]),
    ],
)
def test_aims_are_multiples_of_the_medians_alone(
    waits: list[float], gaps: list[float], what: list[str]
) -> None:
    assert missed(ALONE, Seen(waits, gaps)) == what


def test_a_mix_stands_under_each_setting() -> None:
    seen = {"before": {"alone": ALONE, "long": Seen([0.6], [0.16])}, "after": {"alone": ALONE, "long": ALONE}}
    rows = hog_table(seen, {"alone": "nobody", "long": "4 prompts"}).splitlines()
    assert [row.split(" | ")[:2] for row in rows[2:]] == [
        ["| nobody", "before"],
        ["| nobody", "after"],
        ["| 4 prompts", "before"],
        ["| 4 prompts", "after"],
    ]
    assert "| 0.600 s | 20.0 |" in rows[4]
    assert rows[5].endswith("| 5 | none |")


def test_throughput_is_the_last_setting_over_the_first() -> None:
    rates = {"alone": Rate("prompts", "tokens/s", 0.99), "single": Rate("a prompt", "s", 1.2)}
    measured = {
        "`--max-step-ms 0`": {"alone": [1000.0, 900.0, 1100.0], "single": [4.0]},
        "default": {"alone": [980.0], "single": [4.8]},
    }
    assert last_to_first([[1000.0, 900.0, 1100.0], [980.0]]) == pytest.approx(0.98)
    rows = rate_table(rates, measured).splitlines()
    assert rows[2].endswith("| 0.980 | ≥ 0.99 | **no** |")
    assert rows[3].endswith("| 1.200 | ≤ 1.2 | yes |")


def test_settings_take_turns() -> None:
    assert list(in_turns(["a", "b"], 3)) == [["a", "b"], ["b", "a"], ["a", "b"]]
    assert parse_setting("--max-step-ms 0 --threads 1") == {"max_step_ms": "0", "threads": "1"}
    assert parse_setting("") == {}
    with pytest.raises(SystemExit, match="a value each"):
        parse_setting("--batch-invariant")


def test_no_two_requests_begin_alike() -> None:
    turns = count()
    prompts = [MIXES[name].asked("base", turns)["prompt"] for name in ("long", "long", "batch", "activated")]
    heads = [text[:3] for texts in prompts for text in texts]
    assert len(heads) == len(set(heads)) == 7
    assert prompts[-1][0].endswith(INVOCATION)


def test_mixes_ask_in_their_dialects() -> None:
    turns = count(100)
    asked = {name: MIXES[name].asked("base", turns) for name in (*EIGHT, "embeddings")}
    assert {name for name, body in asked.items() if "input" in body} == {"means", "embeddings"}
    assert {name for name, body in asked.items() if body.get("stream")} == EIGHT.keys() - {"means", "scores"}
    assert asked["activated"]["model"] == "activated"
    assert asked["long"]["model"] == "base"
    assert len(asked["embeddings"]["input"]) == 1024
