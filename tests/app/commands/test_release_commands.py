"""`loraplex release` against a real admin server."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import insert

from loraplex.app.commands.shared.release_view import watch
from loraplex.app.output import Output, fields_table
from loraplex.control.catalog import release_runs
from loraplex.control.db.release_tables import ShadowCount
from loraplex.control.db.tables import Usage
from loraplex.lifecycle.release_guard.course import Course, Point
from loraplex.lifecycle.release_guard.groups import Arms
from loraplex.lifecycle.release_guard.guard import Guard
from loraplex.lifecycle.release_guard.rules import parse_rules
from support.control.usage import ended
from support.releases.traffic import ended as outcome
from support.servers.shell import Shell, shell_in

NAME = ("support", "-t", "acme")


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """Of a tenant with three versions of one adapter."""
    with shell_in(tmp_path) as shell:
        shell.plane.make_tenant()
        for seed in (1, 2, 3):
            shell.plane.make_adapter(seed=seed)
        yield shell


def everything(terminal: int) -> str:
    """All that was written to a terminal whose writer has closed it: Linux hands it over in parts, then raises EIO."""
    parts = []
    with os.fdopen(terminal, "rb", buffering=0) as reader, contextlib.suppress(OSError):
        while part := reader.read(1 << 16):
            parts.append(part)
    return b"".join(parts).decode()


def lines(text: str) -> list[list[str]]:
    """The words of each line, without a table's frame."""
    return [line.replace("│", " ").replace("┃", " ").split() for line in text.splitlines()]


def test_show_names_stickiness_releaser_and_time(shell: Shell) -> None:
    key = shell.plane.make_key("acme", "adapters:write")
    shell.ok("release", "set", "support", "v1=90", "v2=10", "-t", "acme", "--sticky", "user", token=key)
    told = shell.json("release", "show", *NAME)
    assert (told["sticky"], told["revision"], told["origin"], told["actor"]) == ("user", 2, "set", "key")
    shown = lines(shell.ok("release", "show", *NAME))
    for line in (["sticky", "user"], ["revision", "2"], ["by", "key", told["actor_key_id"]], ["how", "set"]):
        assert line in shown
    assert ["since", told["created_at"]] in shown
    assert ["v1", "90", "90.0%"] in shown


def test_rolling_back_step_by_step_and_to_a_revision(shell: Shell) -> None:
    shell.ok("release", "set", "support", "v2=1", "-t", "acme")
    shell.ok("release", "set", "support", "v3=1", "-t", "acme")
    back = [shell.json("release", "rollback", *NAME)["targets"][0]["version"] for _ in range(2)]
    assert back == ["v2", "v1"]
    assert "no earlier release" in shell.fails("release", "rollback", *NAME)
    forward = shell.json("release", "rollback", *NAME, "--to", "3")
    assert (forward["targets"][0]["version"], forward["restores"]) == ("v3", 3)
    assert ["how", "rollback", "to", "2"] in lines(shell.ok("release", "rollback", *NAME, "--to", "2"))
    assert "kept are 1 to 7" in shell.fails("release", "rollback", *NAME, "--to", "9")
    assert shell.run("release", "rollback", *NAME, "--to", "x").exit_code == 2


def test_rolling_back_says_what_it_skipped(shell: Shell) -> None:
    shell.ok("release", "set", "support", "v2=1", "-t", "acme")
    shell.ok("release", "set", "support", "v3=1", "-t", "acme")
    shell.ok("adapter", "delete", "support@v2", "-t", "acme")
    assert "revision 2 skipped: v2 is deleted" in shell.ok("release", "rollback", *NAME)


def test_history_lists_every_release(shell: Shell) -> None:
    shell.ok("release", "set", "support", "v1=90", "v2=10", "-t", "acme", "--sticky", "key")
    shell.ok("release", "promote", "support", "v3", "-t", "acme")
    shell.ok("release", "rollback", *NAME)
    rows = shell.json("release", "history", *NAME)["data"]
    assert [row["revision"] for row in rows] == [4, 3, 2, 1]
    shown = lines(shell.ok("release", "history", *NAME))
    since = rows[0]["created_at"]
    assert ["4", since, "admin", "rollback", "to", "2", "v1=90", "v2=10", "key"] in shown
    assert ["1", rows[3]["created_at"], "local", "upload", "v1=100", "none"] in shown


def test_setting_a_release_that_goes_on_by_itself(shell: Shell) -> None:
    plan = (
        "--guard",
        "error_rate=0.01,ttft,min_requests=50",
        "--schedule",
        "1%:10m,10%:1h",
        "--sticky",
        "user",
    )
    made = shell.json(
        "release", "set", "support", "v1", "v2", "-t", "acme", *plan, "--shadow", "v3:0.1:keep_texts"
    )
    assert made["guard"] == {
        "metrics": [{"name": "error_rate", "margin": 0.01}, {"name": "ttft", "margin": 0.1}],
        "max_false_alarm": 0.01,
        "min_requests": 50,
    }
    assert made["schedule"] == [{"weight": 1, "for_seconds": 600}, {"weight": 10, "for_seconds": 3600}]
    assert made["shadow"] == {"version": "v3", "sample": 0.1, "keep_texts": True}
    shown = shell.ok("release", "show", *NAME)
    for words in (
        ["steps", "[1%", "10m]", ">", "10%", "1h", ">", "100%"],
        ["guard", "error_rate", "0.01,", "ttft", "0.1;", "at", "most", "0.01", "false", "alarms"],
        ["shadow", "v3,", "10%", "of", "the", "requests,", "keeps", "texts"],
        ["v2", "1", "1.0%"],
    ):
        assert words in lines(shown)


def test_a_default_guard_and_no_more(shell: Shell) -> None:
    made = shell.json("release", "set", "support", "v1=9", "v2=1", "-t", "acme", "--guard", "default")
    assert [metric["name"] for metric in made["guard"]["metrics"]][:2] == ["error_rate", "ttft"]
    assert (made["schedule"], made["shadow"], made["run"]["status"]) == (None, None, "running")


WRONG_PLANS: list[tuple[tuple[str, str], str]] = [
    (("--guard", "error_rate:0.01"), "write a metric as NAME or NAME=MARGIN"),
    (("--guard", ""), "write a metric as NAME or NAME=MARGIN"),
    (("--guard", "min_requests"), "min_requests needs a number"),
    (("--guard", "speed"), "--guard 'speed': there is no metric 'speed'; there are error_rate, ttft"),
    (("--guard", "eror_rate=0.01"), "no metric 'eror_rate', did you mean 'error_rate'?; there are"),
    (("--guard", "min_request=5"), "did you mean 'min_requests'?"),
    (("--guard", "ttft=99"), "from 0 to 10; not 99"),
    (("--schedule", "10%"), "write a step as PERCENT:TIME"),
    (("--schedule", "10%:1w"), "write a step as PERCENT:TIME"),
    (("--schedule", "10%:1h,5%:1h"), "weights rise"),
    (("--shadow", "v3"), "VERSION:SAMPLE"),
    (("--shadow", "v3:0.1:text"), "VERSION:SAMPLE:keep_texts"),
    (("--shadow", "3:0.1"), "is no version"),
    (("--shadow", "v3:2"), "shadow.sample"),
]


def test_a_wrong_plan_is_said_of_its_option(shell: Shell) -> None:
    for options, words in WRONG_PLANS:
        assert words in shell.fails("release", "set", "support", "v1", "v2", "-t", "acme", *options)
    assert shell.json("release", "show", *NAME)["revision"] == 1


def test_pausing_and_resuming(shell: Shell) -> None:
    assert "Nothing watches" in shell.fails("release", "pause", *NAME)
    shell.ok("release", "set", "support", "v1", "v2", "-t", "acme", "--schedule", "10:1d")
    assert "paused" in shell.ok("release", "pause", *NAME)
    assert "is paused; only a running one" in shell.fails("release", "pause", *NAME)
    assert shell.json("release", "resume", *NAME)["run"]["status"] == "running"


def roll_back(shell: Shell, reason: str) -> None:
    """As the guard does."""
    with shell.plane.database.write() as session:
        (run,) = release_runs.running(session)
        release_runs.roll_back(session, run, reason)


def keep(shell: Shell, guard: Guard) -> None:
    with shell.plane.database.write() as session:
        (run,) = release_runs.running(session)
        run.guard_state = guard.to_json()


def test_a_rollback_by_the_guard_is_in_history_with_its_reason(shell: Shell) -> None:
    shell.ok("release", "set", "support", "v1=1", "v2=1", "-t", "acme", "--guard", "default")
    roll_back(shell, "guard: ttft of v2")
    shown = lines(shell.ok("release", "show", *NAME))
    assert ["reason", "guard:", "ttft", "of", "v2"] in shown
    assert ["by", "guard"] in shown
    (newest, *_) = shell.json("release", "history", *NAME)["data"]
    row = ["3", newest["created_at"], "guard", "rollback", "to", "1", "v1=100", "none"]
    assert [*row, "guard:", "ttft", "of", "v2"] in lines(shell.ok("release", "history", *NAME))


def test_the_versions_are_shown_side_by_side(shell: Shell) -> None:
    assert shell.json("release", "show", *NAME)["comparison"] is None  # one version alone
    shell.ok(
        "release", "set", "support", "v1=1", "v2=1", "-t", "acme", "--guard", "error_rate,ttft,output_length"
    )
    guard = Guard(
        parse_rules({"metrics": [{"name": "error_rate"}, {"name": "ttft"}]}), Arms(1, 2, 1, 1), since=0.0
    )
    guard.observe([outcome(version=v, key=f"{v}/{n}") for v in (1, 2) for n in range(20)], [], 3.0)
    keep(shell, guard)
    told = next(line for line in lines(shell.ok("release", "show", *NAME)) if line[:2] == ["guard", "says"])
    assert told[2] == "hold,"
    assert re.search(r"; needs [0-9]+ users more, or --sticky none$", " ".join(told))
    guard.observe([outcome(version=v, key=f"{v}/{n}") for v in (1, 2) for n in range(20, 70)], [], 4.0)
    keep(shell, guard)
    course = Course()
    for evidence in (1, 5, 20):
        course.add(0, 0.0, Point(float(evidence), float(evidence), 200.0, 3, 0))
    with shell.plane.database.write() as session:
        (run,) = release_runs.running(session)
        run.course = course.to_json()
    with shell.plane.database.write() as session:
        fields = {"adapter": "support", "first_token_s": 0.5, "total_s": 2.5, "completion_tokens": 21}
        rows = [ended(version=1, **fields), ended(version=1, **fields | {"status": "internal_error"})]
        known = Usage.__table__.columns.keys()
        session.execute(
            insert(Usage),
            [{name: getattr(row, name) for name in known if hasattr(row, name)} for row in rows],
        )
    shown = lines(shell.ok("release", "show", *NAME))
    for words in (
        ["requests", "that", "ended", "v1", "control", "v2", "candidate"],
        ["requests", "2", "0"],
        ["errors", "50.00%", "(9.45", "to", "90.55)", "-"],
        ["first", "token,", "median", "500.0", "ms", "-"],
        ["between", "tokens,", "95", "%", "100.0", "ms", "-"],
        ["error_rate", "0.00%", "0.00%", "0.50%"],
        ["ttft", "200.0", "ms", "200.0", "ms", "220.0", "ms"],
    ):
        assert any(line[: len(words)] == words for line in shown), words
    assert any(line[:3] == ["guard", "says", "pass,"] for line in shown)
    assert ["evidence", "so", "far", "0.5%", ">", "2.5%", ">", "10%", "of", "its", "threshold"] in shown


def test_what_the_shadow_found_is_shown(shell: Shell) -> None:
    shell.ok("release", "set", "support", "v1", "-t", "acme", "--shadow", "v2:1")
    sums = {"samples": 8, "exact": 6, "diverged_at": 10, "dropped": 1, "failed": 2, "live_tokens": 80}
    sums |= {"shadow_tokens": 90, "scored": 40, "live_logprob": -20.0, "shadow_logprob": -30.0}
    with shell.plane.database.write() as session:
        session.add(ShadowCount(tenant_id="acme", name="support", began=2, version=2, **sums))
    shown = lines(shell.ok("release", "show", *NAME))
    assert ["shadow", "v2,", "8", "compared,", "2", "failed,", "1", "dropped"] in shown
    assert ["same", "tokens", "75.00%"] in shown
    assert ["else", "the", "same", "for", "5.0", "tokens"] in shown


class TestWatching:
    def test_what_has_ended_is_shown_once(self, shell: Shell) -> None:
        shell.ok("release", "set", "support", "v1=1", "v2=1", "-t", "acme", "--guard", "default")
        roll_back(shell, "guard: ttft of v2")
        (line,) = shell.ok("release", "show", *NAME, "--watch").splitlines()
        assert line.startswith("revision 3; v1=100; rolled_back since 20")
        assert "; guard: ttft of v2; v1: 0 requests, 0 errors; v2: 0 requests" in line

    def test_it_is_shown_until_it_ends(self) -> None:
        states = iter(["running", "running", "paused", "promoted", "running"])
        drawn: list[str] = []
        waited: list[None] = []
        watch(
            lambda: ({"run": {"status": next(states)}}, None),
            lambda release, _: drawn.append(release["run"]["status"]),
            lambda: waited.append(None),
        )
        assert drawn == ["running", "running", "paused", "promoted"]
        assert len(waited) == 3

    def test_lines_are_for_people_and_json_for_programs(self, shell: Shell) -> None:
        result = shell.run("release", "show", *NAME, "--watch", "--json")
        assert result.exit_code == 1
        assert "--watch or --json, not both" in result.stderr

    def test_a_terminal_is_drawn_over(self, monkeypatch: pytest.MonkeyPatch) -> None:
        master, slave = pty.openpty()
        with os.fdopen(slave, "w") as terminal:
            monkeypatch.setattr(sys, "stdout", terminal)
            monkeypatch.setenv("TERM", "xterm")
            with Output(as_json=False).redrawing() as draw:
                draw(fields_table({"step": "first"}))
                draw(fields_table({"step": "second"}))
            monkeypatch.undo()
        _, _, after = everything(master).partition("first")
        assert "second" in after
        assert "\x1b[2K" in after  # the line that was there is erased


def test_weights_that_are_half_given_are_refused(shell: Shell) -> None:
    assert "'v2' has no weight and others have one" in shell.fails("release", "set", *NAME, "v1=90", "v2")
