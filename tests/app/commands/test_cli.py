"""The command line's admin commands against a real admin server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import insert
from structlog.testing import capture_logs
from typer.testing import Result

from loraplex.app.cli import create_cli
from loraplex.control.db.tables import Usage
from loraplex.migrations.run import upgrade
from loraplex.serving.errors import EngineDraining
from support.adapters.drafts import draft_adapter
from support.control.usage import ended
from support.http.admin_plane import ADMIN_TOKEN, ARCH, AdminPlane
from support.http.api_server import serve_app
from support.servers.shell import Shell, shell_in


@pytest.fixture(autouse=True)
def _quiet_server() -> Iterator[None]:
    """The server shares this process: its log lines must not land in what a command prints."""
    with capture_logs():
        yield


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    with shell_in(tmp_path) as shell:
        yield shell


def test_tenants(shell: Shell) -> None:
    made = shell.json(
        "tenant",
        "create",
        "acme",
        "--display-name",
        "Acme",
        "--weight",
        "2",
        "--limit",
        "requests-per-minute=60",
        "--limit",
        "token_budget=5000",
        "--limit",
        "budget_period=month",
    )
    assert (made["id"], made["weight"], made["limits"]["requests_per_minute"]) == ("acme", 2.0, 60)
    assert (made["budget"]["period"], made["budget"]["left"]) == ("month", 5000)
    assert "month" in shell.ok("tenant", "show", "acme")
    assert "key create --tenant other" in shell.ok("tenant", "create", "other")
    table = shell.ok("tenant", "list")
    assert "acme" in table
    assert "requests_per_minute=60" in table
    assert [row["id"] for row in shell.json("tenant", "list")["data"]] == ["acme", "other"]
    assert shell.json("tenant", "show", "acme") == made
    assert "Acme" in shell.ok("tenant", "show", "acme")
    changed = shell.json(
        "tenant", "update", "acme", "--weight", "3", "--limit", "token_budget=none", "--display-name", ""
    )
    assert (changed["weight"], changed["display_name"], changed["budget"]) == (3.0, None, None)
    assert changed["limits"]["requests_per_minute"] == 60
    assert "requests_per_minute=70" in shell.ok(
        "tenant", "update", "acme", "--limit", "requests_per_minute=70"
    )
    assert "nothing to change" in shell.fails("tenant", "update", "acme")
    assert "no tenant" in shell.fails("tenant", "update", "nobody", "--weight", "2")
    shell.ok("key", "create", "--tenant", "acme", "--name", "ci")
    told = shell.ok("tenant", "delete", "acme")
    assert "tenant acme deleted; its id is not given again" in told
    assert "erased: 1 keys, 0 adapters (0 versions, 0 B freed), 3 texts in the audit log" in told
    assert "kept: 5 audit rows, without texts" in told
    assert shell.json("tenant", "delete", "other")["deleted"] is True
    assert "no tenant" in shell.fails("tenant", "show", "acme")


def test_lists_follow_every_page(shell: Shell) -> None:
    for number in range(120):
        shell.plane.make_tenant(f"t{number:03d}")
    assert len(shell.json("tenant", "list")["data"]) == 120


def test_keys(shell: Shell) -> None:
    shell.ok("tenant", "create", "acme")
    lines = shell.ok("key", "create", "--tenant", "acme", "--name", "ci").splitlines()
    assert lines[-1].startswith("lpx_")
    made = shell.json(
        "key",
        "create",
        "-t",
        "acme",
        "--scope",
        "adapters:read",
        "--scope",
        "adapters:write",
        "--model",
        "support",
    )
    assert (made["scopes"], made["models"]) == (["adapters:read", "adapters:write"], ["support"])
    listed = shell.ok("key", "list", "--tenant", "acme")
    assert made["id"] in listed
    assert made["secret"] not in listed
    of_acme = ("key", "update", made["id"], "--tenant", "acme")
    changed = shell.json(*of_acme, "--limit", "max-concurrency=2", "--limit", "requests_per_minute=9")
    assert (changed["limits"]["max_concurrency"], changed["models"]) == (2, ["support"])
    end = "2099-01-01T00:00:00Z"
    changed = shell.json(
        *of_acme, "--limit", "max_concurrency=none", "--all-models", "--name", "ci", "--expires-at", end
    )
    limits = {name: value for name, value in changed["limits"].items() if value is not None}
    assert (limits, changed["models"]) == ({"requests_per_minute": 9}, None)
    assert (changed["name"], changed["expires_at"]) == ("ci", end)
    shown = shell.ok(*of_acme, "--expires-at", "none", "--name", "", "--scope", "adapters:read")
    assert "requests_per_minute=9" in shown
    (changed,) = (row for row in shell.json("key", "list", "-t", "acme")["data"] if row["id"] == made["id"])
    assert (changed["name"], changed["expires_at"], changed["scopes"]) == (None, None, ["adapters:read"])
    assert "nothing to change" in shell.fails(*of_acme)
    assert "contradict" in shell.fails(*of_acme, "--all-models", "--model", "support")
    assert "[invalid_value]" in shell.fails(*of_acme, "--limit", "max_concurrency=0")
    bounded = shell.json(*of_acme, "--limit", "max_sequences=8")
    assert bounded["limits"]["max_sequences"] == 8
    rotated = shell.json("key", "rotate", made["id"], "--tenant", "acme", "--grace-seconds", "60")
    assert rotated["secret"] != made["secret"]
    assert "revoked" in shell.ok("key", "revoke", made["id"], "--tenant", "acme")
    assert "[invalid_api_key]" in shell.fails("adapter", "list", "-t", "acme", token=rotated["secret"])


def test_adapters(shell: Shell) -> None:
    shell.ok("tenant", "create", "acme")
    pushed = shell.ok("adapter", "push", "support", shell.adapter(), "--tenant", "acme")
    assert "accepted as v1" in pushed
    assert "q_proj" in pushed
    assert "already" in shell.ok("adapter", "push", "support", shell.adapter(), "--tenant", "acme")
    assert (
        shell.json("adapter", "push", "support", shell.adapter("b", seed=2), "-t", "acme")["version"] == "v2"
    )
    assert "v1=100" in shell.ok("adapter", "list", "-t", "acme")
    shown = shell.json("adapter", "show", "support", "-t", "acme")
    assert [v["version"] for v in shown["versions"]] == ["v1", "v2"]
    assert "v2" in shell.ok("adapter", "show", "support", "-t", "acme")
    version = shell.ok("adapter", "show", "support@v2", "-t", "acme")
    assert "modules_matched" in version
    assert "q_proj 4 (2 modules)" in version
    assert "ok config: plain LoRA" in version
    assert "model.layers.0.self_attn.q_proj=" not in version  # not a line a module
    shell.ok("adapter", "pin", "support@v1", "-t", "acme")
    assert len(shell.plane.engine.pins) == 1
    shell.ok("adapter", "unpin", "support@v1", "-t", "acme")
    assert shell.plane.engine.pins == {}
    assert "which version" in shell.fails("adapter", "pin", "support", "-t", "acme")
    shell.ok("adapter", "delete", "support@v2", "-t", "acme")
    states = {
        v["version"]: v["state"] for v in shell.json("adapter", "show", "support", "-t", "acme")["versions"]
    }
    assert states == {"v1": "ready", "v2": "deleted"}
    shell.ok("adapter", "delete", "support", "-t", "acme")
    assert shell.json("adapter", "list", "-t", "acme") == {"data": []}


def test_a_push_tells_of_a_base_in_another_form(shell: Shell) -> None:
    shell.ok("tenant", "create", "acme")
    draft_adapter(ARCH, base_model_name_or_path="org/base-bnb-4bit").write(shell.root / "qlora")
    forms = (
        "trained on bitsandbytes nf4, served over full precision: 0.25 nat a token, top-1 75.0% of 256 tokens"
    )
    pushed = shell.ok("adapter", "push", "support", str(shell.root / "qlora"), "-t", "acme")
    for said in (pushed, shell.ok("adapter", "show", "support@v1", "-t", "acme")):
        assert forms in " ".join(said.split())
        assert "base_form: warning: the adapter was trained on bitsandbytes nf4" in " ".join(said.split())


def test_a_push_tells_of_the_check_of_its_numbers(shell: Shell) -> None:
    shell.plane.make_tenant()
    push = ("adapter", "push", "support", shell.adapter(), "-t", "acme")
    shell.plane.measure.scale = 1.02
    said = shell.fails(*push)
    assert "support@v1 was rejected: " in said
    assert "[numerical_mismatch]" in said
    shown = shell.ok("adapter", "show", "support@v1", "-t", "acme")
    assert "rejected" in shown
    assert "verdict mismatch, max " in shown
    assert "code numerical_mismatch" in shown
    assert "norms" not in shown  # not a number a module
    shell.plane.measure.scale = 1.0
    shell.plane.measure.hold()
    waiting = shell.ok(*push, "--no-wait")
    assert "support: stored as v2; its numbers are being checked" in waiting
    assert "loraplex adapter show support@v2 --tenant acme" in waiting
    shell.plane.measure.release()
    assert "v2 serves now: it takes 100% of the traffic" in shell.ok(*push)
    assert "verdict equal, max " in shell.ok("adapter", "show", "support@v2", "-t", "acme")


def test_a_push_that_cannot_be_checked_says_what_becomes_of_it(shell: Shell) -> None:
    shell.plane.make_tenant()
    shell.plane.measure.error = EngineDraining("the engine is shutting down")
    said = shell.fails("adapter", "push", "support", shell.adapter(), "-t", "acme")
    assert "support@v1 is stored, and its numbers are not checked yet: the engine is shutting down." in said
    assert "[numbers_unchecked]" in said
    assert "validating" in shell.ok("adapter", "show", "support@v1", "-t", "acme")


def test_a_command_at_the_wrong_address_says_which_is_meant(shell: Shell) -> None:
    said = shell.fails("tenant", "list", url=f"{shell.server.url}/elsewhere")
    assert "[not_found]" in said
    assert "--admin-url" in said
    assert "--admin-url" not in shell.fails("tenant", "show", "nobody")


def test_a_refused_adapter_says_why(shell: Shell) -> None:
    shell.ok("tenant", "create", "acme")
    draft_adapter(ARCH, lora_bias=True).write(shell.root / "biased")
    said = shell.fails("adapter", "push", "support", str(shell.root / "biased"), "-t", "acme")
    assert "[unsupported_feature]" in said
    draft = draft_adapter(ARCH)
    draft.tensors = {
        name: array[:, :-1] if "lora_A" in name else array for name, array in draft.tensors.items()
    }
    draft.write(shell.root / "narrow")
    said = shell.fails("adapter", "push", "support", str(shell.root / "narrow"), "-t", "acme")
    assert "another model" in said
    assert "checks: ok names" in said
    assert "checks: !  shapes" in said
    assert "{" not in said
    (shell.root / "empty").mkdir()
    assert "adapter_config.json" in shell.fails(
        "adapter", "push", "x", str(shell.root / "empty"), "-t", "acme"
    )


def test_a_large_push_is_refused_in_words(tmp_path: Path) -> None:
    plane = AdminPlane(tmp_path, max_upload_bytes=100_000)
    plane.make_tenant()
    with serve_app(plane.app) as server:
        shell = Shell(plane, server, tmp_path)
        folder = Path(shell.adapter())
        with open(folder / "adapter_model.safetensors", "ab") as file:
            file.truncate(30_000_000)
        assert "too_large" in shell.fails("adapter", "push", "support", str(folder), "-t", "acme")
    plane.close()


def test_releases(shell: Shell) -> None:
    shell.plane.make_tenant()
    shell.plane.make_adapter(seed=1)
    shell.plane.make_adapter(seed=2)
    made = shell.json("release", "set", "support", "v1=90", "v2=10", "-t", "acme", "--sticky", "user")
    assert made["targets"] == [{"version": "v1", "weight": 90}, {"version": "v2", "weight": 10}]
    assert "90.0%" in shell.ok("release", "show", "support", "-t", "acme")
    assert shell.json("release", "promote", "support", "-t", "acme")["targets"][0]["version"] == "v2"
    assert shell.json("release", "promote", "support", "v1", "-t", "acme")["targets"][0]["version"] == "v1"
    assert shell.json("release", "rollback", "support", "-t", "acme")["targets"][0]["version"] == "v2"
    assert "VERSION=WEIGHT" in shell.fails("release", "set", "support", "v1=much", "-t", "acme")
    assert "v9" in shell.fails("release", "set", "support", "v9=1", "-t", "acme")
    assert shell.run("release", "set", "support", "-t", "acme").exit_code == 2


def test_a_tenants_own_key_on_the_data_port(shell: Shell) -> None:
    from starlette.applications import Starlette
    from starlette.routing import Mount

    shell.plane.make_tenant()
    key = shell.plane.make_key()
    with serve_app(Starlette(routes=[Mount("/admin/v1", shell.plane.tenant_app)])) as data:
        pushed = shell.ok("adapter", "push", "mine", shell.adapter(), "-t", "acme", url=data.url, token=key)
        assert "accepted as v1" in pushed
        assert "no tenant" in shell.fails("adapter", "list", "-t", "other", url=data.url, token=key)
        shell.fails("tenant", "list", url=data.url, token=key)
    assert "Only the admin token" in shell.fails("tenant", "list", token=key)


class TestConnecting:
    def test_the_token_comes_from_the_data_directory(self, shell: Shell) -> None:
        (shell.root / "admin-token").write_text(ADMIN_TOKEN + "\n")
        assert shell.ok("tenant", "list", "--data-dir", str(shell.root), token=None)
        missing = shell.fails("tenant", "list", "--data-dir", str(shell.root / "nowhere"), token=None)
        assert "admin-token" in missing
        none = shell.fails("tenant", "list", token=None)
        assert "--data-dir" in none
        assert "LORAPLEX_ADMIN_TOKEN" in none
        either = shell.fails("adapter", "list", token=None)
        assert "a tenant sets LORAPLEX_API_KEY to its key and LORAPLEX_URL to the data port" in either
        assert len(none.splitlines()) == 1

    def test_wrong_token_no_server_no_url(self, shell: Shell) -> None:
        assert "--admin-token" in shell.fails("tenant", "list", token="wrong")
        assert "copied whole" in shell.fails("tenant", "list", token="wröng")
        assert "loraplex serve" in shell.fails("tenant", "list", url="http://127.0.0.1:9")
        assert "no URL" in shell.fails("tenant", "list", url="127.0.0.1:8001")
        assert "no name" in shell.fails("tenant", "show", "..")

    def test_options_go_before_the_environment(self, shell: Shell) -> None:
        arguments = ["tenant", "list", "--admin-url", shell.server.url, "--admin-token", ADMIN_TOKEN]
        assert shell.run(*arguments, token="wrong", url="http://127.0.0.1:9").exit_code == 0

    def test_a_given_data_directory_goes_before_the_environments_token(
        self, shell: Shell, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (shell.root / "admin-token").write_text(ADMIN_TOKEN + "\n")
        of_directory = ("tenant", "list", "--data-dir", str(shell.root))
        assert shell.run(*of_directory, token="wrong").exit_code == 0
        assert "--admin-token" in shell.fails(*of_directory, "--admin-token", "wrong")
        monkeypatch.setenv("LORAPLEX_DATA_DIR", str(shell.root))
        assert "--admin-token" in shell.fails("tenant", "list", token="wrong")

    def test_the_address_may_have_the_path_of_the_routes(self, shell: Shell) -> None:
        for path in ("/admin/v1", "/admin/v1/", "/"):
            assert shell.run("tenant", "list", url=shell.server.url + path).exit_code == 0, path


def test_wrong_usage_is_2(shell: Shell) -> None:
    for arguments in (
        ["nonsense"],
        ["tenant", "create"],
        ["key", "list"],
        ["adapter", "push", "x", "-t", "acme"],
    ):
        assert shell.run(*arguments).exit_code == 2, arguments


def test_unsendable_arguments_are_refused_in_words(shell: Shell) -> None:
    """Numbers that JSON has not, and what a terminal of another encoding passes on."""
    shell.ok("tenant", "create", "acme")
    for weight in ("nan", "inf", "-inf", "1e999"):
        assert "not finite" in shell.fails("tenant", "update", "acme", "--weight", weight)
        assert "not finite" in shell.fails("tenant", "create", "other", "--weight", weight)
    for arguments in (
        ["tenant", "update", "acme", "--display-name", "\udcff"],
        ["tenant", "show", "\udcff"],
        ["key", "update", "\udcff", "--tenant", "acme", "--name", "x"],
        ["usage", "--start", "\udcff"],
        ["audit", "list", "--actor", "\udcff"],
        ["chat", "--model", "\udcff", "--api-key", "lpx_x", "--url", shell.server.url, "hello"],
    ):
        assert "not UTF-8" in shell.fails(*arguments)
    assert shell.json("tenant", "show", "acme")["weight"] == 1.0


def test_stored_text_cannot_command_the_terminal(shell: Shell) -> None:
    shell.ok("tenant", "create", "acme", "--display-name", "[red]markup[/] 😀")
    assert "[red]markup[/] 😀" in shell.ok("tenant", "list")


@pytest.mark.parametrize(
    ("start", "foreign"),
    [
        # A command that only asks a server waits for no database's library.
        (
            "from loraplex.app.cli import create_cli; create_cli()",
            {"torch", "numpy", "sqlalchemy", "alembic", "starlette"},
        ),
        ("import loraplex.app.serve", {"torch", "transformers", "huggingface_hub", "psycopg", "redis"}),
    ],
)
def test_the_program_starts_without_what_it_has_no_use_for(start: str, foreign: set[str]) -> None:
    code = f"import sys; {start}; print(*{foreign} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == []


def test_the_audit_log_is_listed_and_checked(shell: Shell) -> None:
    shell.ok("tenant", "create", "acme", "--display-name", "Acme")
    shell.fails("tenant", "create", "acme")
    table = shell.ok("audit", "list")
    assert "refused (conflict)" in table
    assert "tenants/acme" in table
    rows = shell.json("audit", "list", "--outcome", "done", "--limit", "1")["data"]
    assert [(row["action"], row["actor"]) for row in rows] == [("tenant.create", "admin")]
    database = f"sqlite:///{shell.plane.root / 'control.db'}"

    def check(*options: str) -> Result:
        return shell.run("audit", "verify", "--database-url", database, *options)

    told = check()
    assert (told.exit_code, told.stdout.splitlines()[0]) == (0, "the audit log is whole: 2 rows")
    anchor = told.stdout.splitlines()[1].removeprefix("anchor ")
    found = json.loads(check("--json", "--anchor", anchor).stdout)
    assert found == {"whole": True, "rows": 2, "anchor": anchor, "broken_at": None, "reason": None}
    assert "SEQ:HASH" in check("--anchor", "nonsense").stderr
    with shell.plane.database.write() as session:
        session.connection().exec_driver_sql("DROP TRIGGER audit_log_update")
        session.connection().exec_driver_sql("UPDATE audit_log SET actor = 'key' WHERE seq = 2")
    told = check()
    assert (told.exit_code, told.stdout) == (1, "")
    assert "row 2: its content was changed. 1 rows before it are as they were written" in told.stderr
    told = check("--json")
    assert (told.exit_code, json.loads(told.stdout)["broken_at"]) == (1, 2)


def test_a_check_of_no_database_makes_none(shell: Shell, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    told = shell.fails("audit", "verify", "--data-dir", str(missing))
    assert "there is no database at" in told
    assert not missing.exists()
    old = tmp_path / "old.db"
    upgrade(f"sqlite:///{old}", "0002")
    assert "has the schema 0002" in shell.fails("audit", "verify", "--database-url", f"sqlite:///{old}")


def test_every_command_of_the_interface_is_there() -> None:
    app = create_cli()
    names = {command.name for command in app.registered_commands} | {
        f"{group.name} {command.name}"
        for group in app.registered_groups
        for command in (group.typer_instance.registered_commands if group.typer_instance else ())
    }
    wanted = {"quickstart", "serve", "migrate", "doctor", "chat"}
    wanted |= {f"tenant {verb}" for verb in ("create", "list", "show", "update", "delete")}
    wanted |= {f"key {verb}" for verb in ("create", "list", "update", "rotate", "revoke")}
    wanted |= {f"adapter {verb}" for verb in ("push", "list", "show", "tag", "delete", "pin", "unpin")}
    wanted |= {f"audit {verb}" for verb in ("list", "verify")}
    wanted |= {f"release {verb}" for verb in ("set", "show", "promote", "rollback")}
    assert wanted <= names


def test_usage(shell: Shell) -> None:
    shell.plane.make_tenant("acme")
    when = datetime(2026, 3, 1, 7, 30, tzinfo=UTC)
    rows = [ended(at=when, adapter="json", version=2, completion_tokens=n) for n in (3, 4)]
    with shell.plane.database.write() as session:
        session.execute(insert(Usage), [msgspec.structs.asdict(row) for row in rows])
    period = ["--start", "2026-03-01", "--end", "2026-03-02T00:00:00Z"]
    (row,) = shell.json("usage", *period, "--group-by", "tenant,adapter,version")["data"]
    assert (row["tenant"], row["adapter"], row["version"], row["completion_tokens"]) == (
        "acme",
        "json",
        "v2",
        7,
    )
    table = shell.ok("usage", *period, "--tenant", "acme", "--bucket", "hour")
    assert "2026-03-01T07:00:00Z" in table
    assert "completion tokens" in table
    printed = shell.ok("usage", *period, "--csv", "--bucket", "none", "--group-by", "status")
    columns = "status,requests,prompt_tokens,cached_tokens,completion_tokens"
    assert printed.splitlines() == [columns, "stop,2,20,0,7"]
    assert "bucket" in shell.fails("usage", "--bucket", "week")
    assert "not both" in shell.fails("usage", "--csv", "--json")
    own = shell.plane.make_key("acme", "usage:read")
    assert shell.json("usage", *period, "--tenant", "acme", token=own)["data"][0]["requests"] == 2
