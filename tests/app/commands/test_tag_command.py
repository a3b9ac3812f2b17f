"""`loraplex adapter tag`."""

from __future__ import annotations

from pathlib import Path

from support.servers.shell import shell_in


def test_tags_take_the_place_of_those_before(tmp_path: Path) -> None:
    with shell_in(tmp_path) as shell:
        shell.ok("tenant", "create", "acme")
        shell.ok("adapter", "push", "support", shell.adapter(), "-t", "acme")
        assert "tags" not in shell.ok("adapter", "show", "support", "-t", "acme")
        assert "support: beta eu" in shell.ok("adapter", "tag", "support", "eu", "beta", "-t", "acme")
        assert "beta eu" in shell.ok("adapter", "show", "support", "-t", "acme")
        assert "Tag 2, 'B'" in shell.fails("adapter", "tag", "support", "a", "B", "-t", "acme")
        assert shell.json("adapter", "tag", "support", "-t", "acme")["tags"] == []


def test_a_push_adds_tags_to_those_that_are_there(tmp_path: Path) -> None:
    with shell_in(tmp_path) as shell:
        shell.ok("tenant", "create", "acme")
        push = ("adapter", "push", "support", shell.adapter(), "-t", "acme")
        assert "support: tagged eu" in shell.ok(*push, "--tag", "eu")
        assert "support: tagged beta eu" in shell.ok(*push, "--tag", "beta", "--tag", "eu")
        assert "Tag 1, 'B'" in shell.fails(*push, "--tag", "B")
        assert "Tag 1, 'a,b'" in shell.fails(*push, "--tag", "a,b")
        assert "beta eu" in shell.ok("adapter", "show", "support", "-t", "acme")
