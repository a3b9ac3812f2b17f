"""Every log call of the sources fits the schema, and what Python writes by itself does too."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import markdown
from support.http.log_schema import check_lines, log_schema

ROOT = Path(__file__).resolve().parents[2]
METHODS = {"debug", "info", "warning", "error", "exception", "critical", "log", "_log"}
PASSED_ON = {"exc_info", "level"}
"""Arguments of the call that are no fields of the line."""
NAMED_ELSEWHERE = {
    "log",
    "request",
    "admin_request",
    "storage_full",
    "storage_unavailable",
    "grammar_process_failed",
    "template_process_failed",
}
"""Events whose call does not name them as text."""


def log_calls() -> Iterator[tuple[str, str, set[str]]]:
    """File, event and fields of each call that names its event."""
    for portion in ("server", "admin", "adapters", "kernels", "migrations"):
        for path in (ROOT / portion).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if not isinstance(node, ast.Call) or not node.args:
                    continue
                called = node.func
                name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
                event = node.args[0].value if isinstance(node.args[0], ast.Constant) else None
                if name not in METHODS | {"report"} or not isinstance(event, str):
                    continue
                if re.fullmatch(r"[a-z]+(_[a-z]+)*", event):
                    fields = {keyword.arg for keyword in node.keywords if keyword.arg}
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", event, fields - PASSED_ON


def test_each_log_call_has_a_known_event_and_known_fields() -> None:
    properties = log_schema()["properties"]
    calls = list(log_calls())
    assert len(calls) > 60
    events = {event for _, event, _ in calls}
    assert events | NAMED_ELSEWHERE == set(properties["event"]["enum"])
    unknown = [
        (where, fields - properties.keys()) for where, _, fields in calls if fields - properties.keys()
    ]
    assert unknown == []
    used = set().union(*(fields for _, _, fields in calls))
    of_requests = {"tenant", "key", "status", "outcome", "param", "ms", "version", "trace_id"}
    of_requests |= {"prompt_tokens", "completion_tokens"}
    always = {"timestamp", "process", "logger", "event", "level", "message", "exception"}
    assert properties.keys() == used | of_requests | always


def test_each_event_is_in_the_docs() -> None:
    page = (ROOT / "docs/logs.md").read_text("utf-8")
    documented = {
        name
        for row in markdown.rows(page, "event", "fields worth knowing")
        for name in re.findall(r"`([a-z_]+)`", row[0])
    }
    named_in_text = set(re.findall(r"`([a-z_]+)`", page))
    events = set(log_schema()["properties"]["event"]["enum"])
    assert events <= named_in_text
    assert documented <= events


BY_ITSELF = """
import sys, threading, warnings, logging
{configure}
warnings.warn("deprecated\\nfor long")
logging.getLogger("a.library").error("it %s", "broke", exc_info=ValueError("why"))
thread = threading.Thread(target=lambda: 1 / 0, name="worker")
thread.start(); thread.join()
class Bad:
    def __del__(self): raise RuntimeError("in __del__")
Bad()
raise KeyError("at the end")
"""
CONFIGURE = {
    "server": "from loraplex.app.logs import configure_logging, log_everything\n"
    "configure_logging('info'); log_everything()",
    "engine": "from loraplex.engine.ipc.log_lines import JsonLogs, report\n"
    "from loraplex.engine.log_hooks import install_log_hooks\n"
    "logging.basicConfig(handlers=[JsonLogs()], level=logging.WARNING); install_log_hooks(report)",
}


@pytest.mark.parametrize("process", CONFIGURE)
def test_what_python_writes_by_itself_is_a_line_too(process: str) -> None:
    program = BY_ITSELF.format(configure=CONFIGURE[process])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    lines = check_lines(done.stderr.splitlines())
    assert {line["process"] for line in lines} == {process}
    assert [(line["event"], line["level"]) for line in lines] == [
        ("log", "warning"),
        ("log", "error"),
        ("thread_failed", "error"),
        ("exception_ignored", "error"),
        ("uncaught_exception", "error"),
    ]
    warned, library, thread, ignored, last = lines
    assert "deprecated\nfor long" in warned["message"]
    assert (library["message"], library["logger"]) == ("it broke", "a.library")
    assert "ValueError: why" in library["exception"]
    assert thread["thread"] == "worker"
    assert "ZeroDivisionError" in thread["exception"]
    assert "in __del__" in ignored["exception"]
    assert "KeyError: 'at the end'" in last["exception"]


ONE_WRITE = """
import io, json, logging, sys, structlog
from loraplex.app.logs import configure_logging
out, writes = sys.stdout, []
class Stream(io.StringIO):
    def write(self, text): writes.append(text); return len(text)
sys.stderr = Stream()
configure_logging("info")
structlog.get_logger("loraplex").info("drained", finished=True, cut=0)
logging.getLogger("a.library").warning("text")
json.dump(writes, out)
"""


def test_a_line_is_one_write() -> None:
    """Threads and processes share standard error: a line in two parts would be torn by another."""
    done = subprocess.run([sys.executable, "-c", ONE_WRITE], capture_output=True, text=True, check=True)
    writes = json.loads(done.stdout)
    assert len(writes) == 2
    assert all(text.endswith("}\n") for text in writes)
    assert [line["event"] for line in check_lines(writes)] == ["drained", "log"]
