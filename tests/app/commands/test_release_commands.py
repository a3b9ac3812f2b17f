"""`loraplex release` against a real admin server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

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
