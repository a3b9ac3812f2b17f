"""What decides the tables of docs/compatibility.md: how options are read, and how outcomes are explained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clients.outside.servers import Asked, asked_for
from clients.outside.tables import page
from clients.outside.vllm_reasons import reason
from support.servers.live_server import EXAMPLE_ADAPTERS, EXAMPLES


def test_options_of_vllm_serve_are_ours_or_left(tmp_path: Path) -> None:
    module = json.dumps({"name": "b", "path": "org/b", "base_model_name": "m"})
    given = ["--max_model_len", "10100", "--dtype", "bfloat16", "--lora-modules", f"a={tmp_path}", module]
    given += ["--tool-call-parser=llama3_json", "--reasoning-parser", "openai_gptoss"]
    asked = asked_for("org/m", [*given, "--served-model-name", "x", "y"])
    assert asked == Asked(
        "x",
        {"a": tmp_path, "b": EXAMPLE_ADAPTERS / EXAMPLES[0]},
        {"max_model_len": "8192", "tool_format": "llama3"},
    )
    assert asked.left == ["--reasoning-parser openai_gptoss", "--served-model-name y"]


@pytest.mark.parametrize(
    ("test", "outcome", "text", "kind", "why"),
    [
        ("f.py::test_x", "passed", "", "passed", ""),
        ("f.py::test_x", "failed", "E  400 - Unknown field: 'logits'.", "missing", "the field `logits`"),
        (
            "f.py::test_x",
            "failed",
            "E  400 - 'echo' is not supported here",
            "missing",
            "the field `echo`",
        ),
        (
            "f.py::test_x",
            "failed",
            "E  404 - Unknown request URL: POST /v1/x. Please",
            "missing",
            "the route `/v1/x`",
        ),
        ("f.py::test_x", "failed", "E  assert 1 == 2\nE  more", "unexplained", "assert 1 == 2"),
        ("f.py::test_x", "skipped", "Skipped: wants a GPU", "not applicable", "wants a GPU"),
    ],
)
def test_outcomes_are_explained_by_what_was_said(
    test: str, outcome: str, text: str, kind: str, why: str
) -> None:
    assert reason(test, outcome, text) == (kind, why)


def test_a_page_counts_each_test_once_and_tells_what_changed() -> None:
    def results(commit: str, outcome: str) -> dict[str, object]:
        tests = {
            "test_a": {"outcome": "passed", "text": ""},
            "test_b": {"outcome": outcome, "text": "E  odd"},
        }
        files = [{"path": "x/test_f.py", "why": "", "tests": tests, "left": []}]
        return {"commit": commit, "vllm": {"version": "1", "files": files}}

    told = page(results("new", "passed"), results("old", "failed"))
    assert "| `x/test_f` | 1 → 2 |" in told
    assert "| **all** | **2** | **0** |" in told
    assert "| Unexplained | 1 | `test_f` |" not in told
    assert "| odd | 1 | `test_f` |" in page(results("old", "failed"), None)
