"""The GPU bench of attention tilings over KV codes runs anywhere, and notices what is wrong."""

from __future__ import annotations

import pytest
import torch

from bench.gpu.kv import tilings
from bench.gpu.kv.codes import attention_cases
from loraplex.kernels.attention import triton_attention

pytestmark = [
    pytest.mark.usefixtures("quick_interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
CPU = torch.device("cpu")
CASE = attention_cases(small=True)[0]


def test_small_steps_are_right_and_cut_when_the_time_is_spent() -> None:
    rows = list(tilings.run_all([CASE], CPU, 600.0, small=True))
    assert [row["ok"] for row in rows] == [True] * 3
    assert len({(row["block_m"], row["block_n"], row["min_split"]) for row in rows}) == 3
    first, cut = tilings.run_all([CASE], CPU, 0.0, small=True)
    assert first["ok"]
    assert cut == {"case": CASE.name, "left": 2}


def test_a_wrong_number_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    true = triton_attention.paged_attention
    monkeypatch.setattr(
        triton_attention, "paged_attention", lambda *args, **options: true(*args, **options) * 1.05
    )
    assert not next(tilings.run_all([CASE], CPU, 0.0, small=True))["ok"]


def test_the_table_has_the_served_tiling_and_the_best() -> None:
    def row(columns: int, ms: float | None, **more: object) -> dict[str, object]:
        sizes = {"block_m": 16, "block_n": columns, "num_warps": 4, "num_stages": 3, "min_split": 256}
        return {"case": "decode", "ok": True, "ms": ms, **sizes, **more}

    rows = [row(64, 0.2, plain_ms=0.1), row(32, 0.3), row(128, 0.1), row(16, 0.05, ok=False)]
    lines = tilings.table([*rows, {"case": "decode", "left": 4}]).splitlines()[2:]
    assert lines == [
        "| decode | 0.1000 | 16, 64, 4, 3, 256 | 0.2000 | 1.00 |",
        "| decode |  | 16, 128, 4, 3, 256 | 0.1000 | 0.50 |",
        "| decode |  | 16, 32, 4, 3, 256 | 0.3000 | 1.50 |",
    ]


@pytest.mark.parametrize("case", attention_cases(small=False), ids=lambda case: case.name)
def test_no_tiling_is_one_that_hopper_miscompiles(case) -> None:
    tried = tilings.forms(case, CPU)
    assert len(tried) == len(set(tried)) > 10
    for one in tried:
        for side in (one.decode, one.prefill):
            side.check((9, 0))
