"""What the commands say: secrets alone on stdout, mistakes in the command's own words, next steps, tables that fit."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import insert

from loraplex.app.output import PIPE_WIDTH
from loraplex.control.db.tables import Usage
from loraplex.control.types import SCOPES, Limits
from support.control.usage import ended
from support.http.admin_plane import ADMIN_TOKEN
from support.servers.shell import Shell, shell_in

LONG_TENANT, LONG_ADAPTER = "q" * 63, "x" * 63
OF_TENANT = {
    "max_adapters",
    "max_adapter_bytes",
    "device_bytes_reserved",
    "device_bytes_max",
    "host_bytes_max",
    "batch_tokens",
    "batch_percent",
    "file_days",
}
OF_KEY = [name for name in Limits.__dataclass_fields__ if name not in OF_TENANT]
LIMIT_VALUES = {"budget_period": "month", "device_bytes_reserved": 1 << 20}
EVERY_LIMIT = [
    # No more than half of the device can be reserved.
    f"{name}={LIMIT_VALUES.get(name, 2**53 - 1)}"
    for name in Limits.__dataclass_fields__
]


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    with shell_in(tmp_path) as made:
        yield made


@pytest.fixture
def acme(shell: Shell) -> Shell:
    shell.plane.make_tenant()
    return shell


class TestSecrets:
    def test_a_created_keys_secret_is_alone_on_stdout(self, acme: Shell) -> None:
        done = acme.run("key", "create", "-t", "acme")
        secret = done.stdout.removesuffix("\n")
        assert secret.startswith("lpx_")
        assert secret.isprintable()
        assert " " not in secret
        assert secret not in done.stderr
        assert secret.split("_")[1] in done.stderr
        assert "cannot be shown again" in done.stderr

    def test_a_rotation_says_what_becomes_of_the_old_secret(self, acme: Shell) -> None:
        secret = acme.ok("key", "create", "-t", "acme", "--scope", "adapters:read").strip()
        key = secret.split("_")[1]
        done = acme.run("key", "rotate", key, "-t", "acme")
        assert done.stdout.startswith("lpx_")
        assert done.stdout.count("\n") == 1
        assert "The old secret no longer works" in done.stderr
        assert "--grace-seconds" in done.stderr
        acme.fails("adapter", "list", "-t", "acme", token=secret)
        done = acme.run("key", "rotate", key, "-t", "acme", "--grace-seconds", "3600")
        assert "The old secret works until 20" in done.stderr
        shown = acme.run("key", "rotate", key, "-t", "acme", "--json")
        assert shown.stderr == ""
        assert json.loads(shown.stdout)["previous_valid_until"] is None
        assert "stops at once" in acme.ok("key", "rotate", "--help")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("release set support v1:90 -t acme", "'v1:90': write a target as VERSION=WEIGHT, such as v1=90"),
        ("release set support v1=90.5 -t acme", "VERSION=WEIGHT, such as v1=90; weights are whole numbers"),
        ("release set support v1=1000001 -t acme", "'v1=1000001': a weight is at most 1000000."),
        ("release set support v1=99999999999999999999 -t acme", "9': a weight is at most 1000000."),
        ("release set v1=90 support -t acme", "'v1=90' is no name: write NAME first"),
        ("release promote support 2 -t acme", "'2' is no version; versions are named v1, v2"),
        (
            "tenant create b --limit request_per_minute=5",
            f"there are {', '.join(Limits.__dataclass_fields__)}.",
        ),
        ("tenant update acme --limit requests_per_minute=many", "is a whole number above 0, or none"),
        ("tenant update acme --limit budget_period=week", "one of hour, day, month, forever"),
        ("tenant create B", "A tenant's id is 1 to 63 of"),
        ("tenant show ../x", "'../x' is no name: it has a '/'."),
        ("adapter show ../../x -t acme", "'../../x' is no name: it has a '/'."),
        (
            "key create -t acme --limit max_concurency=3",
            "'max_concurency', did you mean 'max_concurrency'?; there are",
        ),
        (
            "key create -t acme --scope adapter:read",
            "no such scope, did you mean 'adapters:read'?; there are",
        ),
        ("key create -t acme --limit rpm=3", f"there is no limit 'rpm'; there are {', '.join(OF_KEY)}."),
        ("key create -t acme --limit max_adapters=3", "a key has no limit 'max_adapters', only a tenant has"),
        (
            "key update k -t acme --limit max-adapters=3",
            "a key has no limit 'max_adapters', only a tenant has",
        ),
        ("key create -t acme --scope infer", f"there are {', '.join(SCOPES)}, and all."),
        (
            "key create -t acme --expires-at tomorrow",
            "--expires-at 'tomorrow': write a day, such as 2030-01-31",
        ),
        ("key create -t acme --expires-at 2030-01-31T00:00:00", "a time with its zone"),
        ("usage --start yesterday", "--start 'yesterday': write a day"),
        ("audit list --end 2030-13-01", "--end '2030-13-01': write a day"),
        ("key list -t nobody", "There is no tenant 'nobody'."),
        ("adapter push support /nowhere -t acme", "/nowhere does not exist; DIR is a directory with"),
        ("adapter push support /etc/passwd -t acme", "/etc/passwd is a file; DIR is a directory with"),
        ("adapter push /tmp support -t acme", "'/tmp' is a directory: write NAME first, then DIR"),
        ("adapter show support@ -t acme", "write an adapter as NAME or NAME@v1"),
        ("adapter pin support -t acme", "say which version"),
    ],
)
def test_a_mistake_is_one_line_in_the_commands_words(acme: Shell, line: str, said: str) -> None:
    assert said in (told := acme.fails(*line.split()))
    assert told.count("\n") == 1
    failed = acme.run(*line.split(), "--json")
    assert failed.exit_code == 1
    error = json.loads(failed.stdout)["error"]
    assert said in error["message"]
    assert failed.stderr == told


def test_json_of_a_refusal_holds_the_servers_answer(acme: Shell) -> None:
    failed = acme.run("tenant", "show", "nobody", "--json")
    error = json.loads(failed.stdout)["error"]
    assert error["code"] == error["answer"]["code"] == "tenant_not_found"
    assert error["answer"]["status"] == 404
    gone = acme.run("tenant", "list", "--json", url="http://127.0.0.1:9")
    assert json.loads(gone.stdout)["error"]["code"] == "command_failed"


def test_a_question_at_the_admin_port_is_told_of_the_data_port(acme: Shell) -> None:
    told = acme.fails("chat", "-m", "support", "hello", "--api-key", "lpx_x", "--url", acme.server.url)
    assert "Give the data port with --url." in told
    assert "--admin-url" not in told


def test_a_deletion_asks_at_a_terminal_only(acme: Shell) -> None:
    environment = os.environ | {"LORAPLEX_ADMIN_URL": acme.server.url, "LORAPLEX_ADMIN_TOKEN": ADMIN_TOKEN}
    command = [sys.executable, "-m", "loraplex.app.cli", "tenant", "delete", "acme"]
    ours, theirs = pty.openpty()
    os.write(ours, b"n\n")
    asked = subprocess.run(
        command, stdin=theirs, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    os.close(theirs)
    os.close(ours)
    assert "Delete tenant acme with all its keys and adapters?" in asked.stdout
    assert asked.returncode == 1
    assert acme.json("tenant", "show", "acme")["id"] == "acme"
    assert "tenant acme deleted" in acme.ok("tenant", "delete", "acme")


def test_help_of_a_key_lists_the_limits_of_keys(shell: Shell) -> None:
    for command in ("create", "update"):
        assert "max_adapters" in shell.ok("tenant", command, "--help")
        shown = shell.ok("key", command, "--help")
        assert "max_sequences" in shown
        assert not [name for name in OF_TENANT if name in shown]


def test_a_day_is_a_time(acme: Shell) -> None:
    secret = acme.json("key", "create", "-t", "acme", "--expires-at", "2099-01-31")
    assert secret["expires_at"] == "2099-01-31T00:00:00Z"
    changed = acme.json(
        "key", "update", secret["id"], "-t", "acme", "--expires-at", "2098-01-31T01:00:00+01:00"
    )
    assert changed["expires_at"] == "2098-01-31T00:00:00Z"
    assert acme.json("audit", "list", "--start", "2020-01-01", "--end", "2020-01-02")["data"] == []


class TestPush:
    def push(self, shell: Shell, seed: int, **options: Any) -> str:
        folder = shell.adapter(f"seed{seed}", seed=seed)
        return shell.ok("adapter", "push", "support", folder, "-t", "acme", **options).splitlines()[-1]

    def test_push_reports_traffic_and_the_next_command(self, acme: Shell) -> None:
        assert self.push(acme, 1) == (
            "v1 serves now: it takes 100% of the traffic of support. Nothing is left to do."
        )
        told = self.push(acme, 2)
        command = "loraplex release set support v1=90 v2=10 --tenant acme"
        assert told == f"v2 takes no traffic yet; v1=100 serves. To release it: {command}"
        acme.ok(*command.split()[1:])
        assert self.push(acme, 2) == "v2 serves now: it takes 10% of the traffic of support."
        assert self.push(acme, 3).endswith("loraplex release set support v1=81 v2=9 v3=10 --tenant acme")
        acme.ok("release", "set", "support", "v1=1", "v2=6", "-t", "acme")
        assert self.push(acme, 3).endswith("set support v1=9 v2=54 v3=7 --tenant acme")

    def test_a_key_that_may_only_push_is_told_too(self, acme: Shell) -> None:
        from starlette.applications import Starlette
        from starlette.routing import Mount

        from support.http.api_server import serve_app

        key = acme.plane.make_key("acme", "adapters:write")
        with serve_app(Starlette(routes=[Mount("/admin/v1", acme.plane.tenant_app)])) as data:
            told = self.push(acme, 1, token=key, url=data.url)
        assert told.endswith("loraplex release promote support v1")

    def at_a_terminal(self, shell: Shell, *arguments: str) -> tuple[str, str]:
        """stdout, and what the terminal that stderr is was written."""
        environment = os.environ | {
            "LORAPLEX_ADMIN_URL": shell.server.url,
            "LORAPLEX_ADMIN_TOKEN": ADMIN_TOKEN,
            "TERM": "xterm",
        }
        ours, theirs = pty.openpty()
        done = subprocess.run(
            [sys.executable, "-m", "loraplex.app.cli", *arguments],
            stdout=subprocess.PIPE,
            stderr=theirs,
            env=environment,
            text=True,
            timeout=60,
            check=True,
        )
        os.write(theirs, b"|")
        os.close(theirs)
        shown = b""
        while not shown.endswith(b"|"):
            shown += os.read(ours, 1 << 16)
        os.close(ours)
        return done.stdout, shown.decode(errors="replace")

    def test_a_bar_is_shown_at_a_terminal_only(self, acme: Shell) -> None:
        push = ("adapter", "push", "support", acme.adapter(), "-t", "acme")
        out, terminal = self.at_a_terminal(acme, *push)
        assert "uploaded; the server is checking it" in terminal
        assert "upload" not in out
        out, terminal = self.at_a_terminal(acme, *push, "--json")
        assert json.loads(out)["version"] == "v1"
        assert terminal == "|"
        assert acme.run(*push).stderr == ""

    def test_the_size_of_the_files_does_not_matter_to_memory(self, acme: Shell) -> None:
        folder = Path(acme.adapter())
        os.truncate(folder / "adapter_model.safetensors", 2 << 30)
        # Not getrusage: its peak goes back to before the exec, to this process.
        code = (
            "import atexit, sys\n"
            "peak = lambda: next(line for line in open('/proc/self/status') if line.startswith('VmHWM'))\n"
            "atexit.register(lambda: print(peak(), file=sys.stderr))\n"
            "from loraplex.app.cli import main\n"
            "main()"
        )
        arguments = ("adapter", "push", "support", str(folder), "-t", "acme", "--admin-url", acme.server.url)
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments, "--admin-token", ADMIN_TOKEN],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert "[too_large]" in done.stderr
        assert int(done.stderr.split()[-2]) < 200 << 10  # KiB


class TestTables:
    @pytest.fixture
    def long(self, shell: Shell) -> Shell:
        """A server where everything has the longest name that it may have."""
        limits = [part for limit in EVERY_LIMIT for part in ("--limit", limit)]
        shell.ok("tenant", "create", LONG_TENANT, "--display-name", "é" * 200, "--weight", "0.12345", *limits)
        models = [part for number in range(3) for part in ("--model", f"{number}" + "ü" * 199)]
        scopes = [part for scope in SCOPES for part in ("--scope", scope)]
        key = ("key", "create", "-t", LONG_TENANT, "--name", "ñ" * 200, "--expires-at", "2099-01-01")
        of_key = [
            part for limit in EVERY_LIMIT if limit.split("=")[0] in OF_KEY for part in ("--limit", limit)
        ]
        shell.ok(*key, *models, *scopes, *of_key)
        for seed in (1, 2):
            folder = shell.adapter(f"seed{seed}", seed=seed)
            shell.ok("adapter", "push", LONG_ADAPTER, folder, "-t", LONG_TENANT)
        shell.ok("release", "set", LONG_ADAPTER, "v1=900000", "v2=100000", "-t", LONG_TENANT)
        row = ended(
            tenant_id=LONG_TENANT, adapter=LONG_ADAPTER, version=2, at=datetime(2026, 3, 1, tzinfo=UTC)
        )
        with shell.plane.database.write() as session:
            session.execute(insert(Usage), [msgspec.structs.asdict(row)])
        return shell

    def test_in_a_pipe_they_fit_and_nothing_is_cut(self, long: Shell) -> None:
        period = "usage --start 2026-03-01 --end 2026-03-02"
        for line, whole in (
            ("tenant list", ["é" * 200, "q" * 63]),
            ("tenant show TENANT", ["é" * 200, "q" * 63]),
            ("key list -t TENANT", ["ñ" * 200, "ü" * 597]),
            ("adapter list -t TENANT", ["x" * 63]),
            ("adapter show ADAPTER -t TENANT", ["x" * 63]),
            ("adapter show ADAPTER@v2 -t TENANT", ["x" * 63]),
            ("release show ADAPTER -t TENANT", []),
            ("release history ADAPTER -t TENANT", []),
            ("audit list", ["x" * 63, "q" * 63]),
            (f"{period} --group-by tenant,key,adapter,version,status", ["q" * 63, "x" * 63]),
            (f"{period} --tenant TENANT --bucket hour", []),
        ):
            words = line.replace("TENANT", LONG_TENANT).replace("ADAPTER", LONG_ADAPTER).split()
            shown = long.ok(*words)
            assert max(map(len, shown.splitlines())) <= PIPE_WIDTH == 100, line
            assert "…" not in shown, line
            for text in whole:
                assert shown.count(text[0]) >= len(text), line

    def test_the_keys_of_a_list_stay_on_one_line(self, long: Shell) -> None:
        (key,) = (row["id"] for row in long.json("key", "list", "-t", LONG_TENANT)["data"])
        assert key in long.ok("key", "list", "-t", LONG_TENANT)
        digest = long.json("adapter", "show", f"{LONG_ADAPTER}@v1", "-t", LONG_TENANT)["digest"]
        assert digest[:12] in long.ok("adapter", "show", LONG_ADAPTER, "-t", LONG_TENANT)


def test_usage_names_its_tenant(acme: Shell) -> None:
    asked = ("usage", "--start", "2026-03-01", "--end", "2026-03-02", "--bucket", "none")
    with acme.plane.database.write() as session:
        row = ended(at=datetime(2026, 3, 1, tzinfo=UTC))
        session.execute(insert(Usage), [msgspec.structs.asdict(row)])
    shown = acme.json(*asked, "--tenant", "acme")
    assert shown["tenant"] == "acme"
    assert [row["tenant"] for row in shown["data"]] == ["acme"]
    assert "tenant" not in acme.json(*asked)


def test_usage_of_a_tenant_that_is_not_there_says_so(acme: Shell) -> None:
    hint = "there is no tenant 'nope', and no usage of one from these days\n"
    for form in ([], ["--csv"], ["--json"]):
        told = acme.run("usage", "--tenant", "nope", *form)
        assert (told.exit_code, told.stderr) == (0, hint)
    assert acme.run("usage", "--tenant", "acme").stderr == ""
    own = acme.plane.make_key("acme", "usage:read")
    assert acme.run("usage", "--tenant", "acme", token=own).stderr == ""
    with acme.plane.database.write() as session:
        row = ended(tenant_id="gone", at=datetime(2026, 3, 1, tzinfo=UTC))
        session.execute(insert(Usage), [msgspec.structs.asdict(row)])
    period = ("--start", "2026-03-01", "--end", "2026-03-02")
    assert acme.run("usage", "--tenant", "gone", *period).stderr == ""
