"""The program around its commands: version, help, completion, wrong usage, options that are on or off."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner, Result

from loraplex.app.cli import create_cli, wanted_command
from loraplex.app.settings import Settings
from loraplex.migrations.run import upgrade
from support.servers.run_here import run_here

HEAVY = {"torch", "numpy", "pydantic", "sqlalchemy", "alembic", "starlette", "httpx", "rich.table"}


def invoke(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(create_cli(), list(arguments), env=environment, prog_name="loraplex")


def program(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The real program in a process of its own; what it imported of `HEAVY` is the last line of stderr."""
    code = (
        "import atexit, sys\n"
        f"atexit.register(lambda: print(*sorted({HEAVY} & set(sys.modules)), file=sys.stderr))\n"
        "from loraplex.app.cli import main\n"
        "main()"
    )
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env=os.environ | environment, timeout=60, check=False
    )


def commands() -> Iterator[tuple[str, Any]]:
    """Every command and group by its words."""
    for name, command in get_command(create_cli()).commands.items():
        yield name, command
        for sub, inner in getattr(command, "commands", {}).items():
            yield f"{name} {sub}", inner


def test_version_imports_nothing_heavy() -> None:
    done = program("--version")
    assert (done.returncode, done.stdout) == (0, f"loraplex {version('loraplex')}\n")
    assert done.stderr.split() == []


def test_help_of_the_program_imports_nothing_heavy() -> None:
    done = program("--help")
    assert done.returncode == 0
    assert done.stderr.split() == []
    for name in ("serve", "tenant", "chat"):
        assert f"\n  {name} " in done.stdout


def test_the_program_loads_the_command_that_is_asked_for(tmp_path: Path) -> None:
    done = program("migrate", "--dry-run", "--json", "--data-dir", str(tmp_path))
    assert json.loads(done.stdout)["migrations"][0] == "0001"
    done = program("tenant", "list", "--admin-url", "http://127.0.0.1:9", "--admin-token", "x")
    assert done.returncode == 1
    assert "no server answers" in done.stderr


@pytest.mark.parametrize("words", [words for words, _ in commands()])
def test_every_command_says_what_it_does(words: str) -> None:
    shown = invoke(*words.split(), "--help")
    assert shown.exit_code == 0
    lines = shown.output.splitlines()
    assert lines[0].startswith(f"Usage: loraplex {words}")
    assert lines[2].strip().endswith(".")
    assert not any(line.endswith("...") for line in lines[1:]), "a summary is cut off"
    assert max(map(len, lines)) <= 80


def test_summaries_are_whole_and_options_have_help() -> None:
    assert not any(line.endswith("...") for line in invoke("--help").output.splitlines()[1:])
    for words, command in commands():
        for parameter in command.params:
            assert parameter.help, f"{words} {parameter.name}"


def complete(line: str) -> list[str]:
    words = line.split(" ")
    done = program(_LORAPLEX_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=str(len(words) - 1))
    assert done.returncode == 0, done.stderr
    assert not {"httpx", "sqlalchemy", "torch", "rich.table"} & set(done.stderr.split())
    return done.stdout.split()


def test_completion() -> None:
    assert complete("loraplex ten") == ["tenant"]
    assert complete("loraplex tenant ") == ["create", "list", "show", "update", "delete"]
    assert "--display-name" in complete("loraplex tenant update --d")
    assert complete("loraplex serve --admin-p") == ["--admin-port"]
    shown = program("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert "complete -o default -F _loraplex_completion loraplex" in shown.stdout


def test_the_wanted_command_is_read_from_the_line_or_from_the_shell() -> None:
    assert wanted_command(["--json", "tenant", "list"], {}) == "tenant"
    assert wanted_command([], {}) == ""
    for variable in ("COMP_WORDS", "_TYPER_COMPLETE_ARGS"):
        environment = {"_LORAPLEX_COMPLETE": "complete_zsh", variable: "loraplex key cre"}
        assert wanted_command([], environment) == "key"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("tnant list", "No such command 'tnant'. Did you mean 'tenant'?; see 'loraplex --help'."),
        ("tenant lst", "No such command 'lst'. Did you mean 'list'?; see 'loraplex tenant --help'."),
        ("tenant create", "Missing argument 'TENANT'; see 'loraplex tenant create --help'."),
        (
            "key list --admin-token x",
            "Missing option '--tenant' / '-t': the admin token of --admin-token is no tenant's; see 'loraplex key list",
        ),
        ("tenant list more", "Got unexpected extra argument(s) (more); see 'loraplex tenant list --help'."),
        ("tenant update a --limits x=1", "No such option: --limits (Possible options: --limit)"),
        ("tenant update a --weight heavy", "Invalid value for '--weight': "),
        ("--versoin", "No such option: --versoin"),
        ("migrate --dry-run --accept-new-pepper", "give one of them; see 'loraplex migrate --help'."),
    ],
)
def test_wrong_usage_is_one_line(line: str, said: str) -> None:
    done = invoke(*line.split())
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("loraplex: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("words", ["", "tenant"])
def test_a_group_without_a_command_shows_its_help(words: str) -> None:
    done = invoke(*words.split())
    assert done.exit_code == 2
    assert done.output.startswith("Usage: loraplex")
    assert "Commands:" in done.output


class TestSwitches:
    @pytest.fixture
    def served(self, monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
        seen: list[Settings] = []
        monkeypatch.setattr("loraplex.app.serve.serve", lambda settings: seen.append(settings) or 0)
        return seen

    @pytest.mark.parametrize(
        ("given", "value"),
        [
            (["--metrics-on-data-port"], True),
            (["--no-metrics-on-data-port"], False),
            (["--metrics-on-data-port", "true"], True),
            (["--metrics-on-data-port", "False"], False),
            (["--metrics-on-data-port=true"], True),
            (["--metrics-on-data-port=false"], False),
            ([], True),  # of the environment
        ],
    )
    def test_all_forms(self, served: list[Settings], given: list[str], value: bool) -> None:
        done = invoke("serve", *given, "--port", "9", LORAPLEX_METRICS_ON_DATA_PORT="true")
        assert done.exit_code == 0, done.output
        assert (served[0].metrics_on_data_port, served[0].port) == (value, 9)

    def test_another_value_is_wrong_usage(self, served: list[Settings]) -> None:
        done = invoke("serve", "--metrics-on-data-port=maybe")
        assert done.exit_code == 2
        assert "--metrics-on-data-port is true or false, and not 'maybe'" in done.stderr
        assert served == []

    def test_help_shows_both(self) -> None:
        for words in ("serve", "doctor"):
            assert "--metrics-on-data-port / --no-metrics-on-data-port" in invoke(words, "--help").output

    def test_after_two_dashes_everything_is_a_value(self) -> None:
        done = invoke("serve", "--", "--metrics-on-data-port", "true")
        assert done.exit_code == 2
        assert "extra argument" in done.stderr


class TestMigrate:
    @pytest.mark.parametrize("dry_run", [[], ["--dry-run"]])
    def test_a_directory_that_is_not_there_is_refused(self, tmp_path: Path, dry_run: list[str]) -> None:
        missing = tmp_path / "typo"
        for option, place in (("--data-dir", missing), ("--database-url", f"sqlite:///{missing}/x.db")):
            done = invoke("migrate", *dry_run, option, str(place))
            assert (done.exit_code, done.stdout) == (1, "")
            assert (
                f"there is no directory {missing} for a database; give the server's --data-dir" in done.stderr
            )
        assert list(tmp_path.iterdir()) == []

    def test_a_first_database_is_told_to_be_one(self, tmp_path: Path) -> None:
        for options in (["--data-dir", str(tmp_path)], ["--database-url", f"sqlite:///{tmp_path}/x.db"]):
            done = invoke("migrate", "--dry-run", *options)
            assert done.exit_code == 0, done.output
            assert "migrations that would be made: 0001, 0002, " in done.stdout
            assert done.stdout.endswith(": its database would be new and empty\n")
            assert "there is no installation at sqlite:///" in done.stdout
            assert json.loads(invoke("migrate", "--dry-run", "--json", *options).stdout)["new"] is True
        assert list(tmp_path.iterdir()) == []
        made = invoke("migrate", "--data-dir", str(tmp_path))
        assert made.exit_code == 0
        assert "there was no installation at sqlite:///" in made.stdout
        assert made.stdout.endswith(": its database is new and empty\n")
        again = invoke("migrate", "--data-dir", str(tmp_path))
        assert "new and empty" not in again.stdout
        assert json.loads(invoke("migrate", "--json", "--data-dir", str(tmp_path)).stdout)["new"] is False

    def test_dry_run_of_an_old_and_of_a_new_schema(self, tmp_path: Path) -> None:
        file = tmp_path / "loraplex.db"
        upgrade(f"sqlite:///{file}", "0003")
        before = file.read_bytes()
        told = invoke("migrate", "--dry-run", "--json", "--data-dir", str(tmp_path))
        asked = json.loads(told.stdout)
        assert asked["dry_run"] is True
        assert asked["migrations"][0] == "0004"
        assert file.read_bytes() == before
        made = json.loads(invoke("migrate", "--json", "--data-dir", str(tmp_path)).stdout)
        assert made == asked | {"dry_run": False}
        again = invoke("migrate", "--dry-run", "--data-dir", str(tmp_path))
        assert again.stdout.startswith("the database sqlite:///")
        assert "has this version's schema" in again.stdout

    def test_a_place_that_cannot_be_written_is_one_line(self) -> None:
        done = invoke("migrate", "--data-dir", "/proc")
        assert (done.exit_code, done.stdout) == (1, "")
        assert done.stderr.startswith("loraplex: the database sqlite:////proc/loraplex.db cannot be used: ")
        assert done.stderr.count("\n") == 1
        ended = run_here("serve", "--model", "m", "--data-dir", "/proc/nowhere")
        assert (ended.code, ended.stdout) == (1, "")
        assert ended.stderr.startswith("loraplex: the data directory /proc/nowhere cannot be used (")
        assert ended.stderr.count("\n") == 1

    def test_dry_run_of_another_file_fails(self, tmp_path: Path) -> None:
        (tmp_path / "loraplex.db").write_bytes(b"no database" * 100)
        done = invoke("migrate", "--dry-run", "--data-dir", str(tmp_path))
        assert (done.exit_code, done.stdout) == (1, "")
        assert done.stderr.startswith("loraplex: the database sqlite:///")
        assert done.stderr.count("\n") == 1
