"""A tenant's commands with no more than an address and a key, both from the environment."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import update
from starlette.applications import Starlette
from starlette.routing import Mount
from typer.testing import CliRunner, Result

from loraplex.app.cli import create_cli
from loraplex.control.db.tables import ApiKey
from loraplex.control.types import SCOPES
from support.http.admin_plane import ADMIN_TOKEN
from support.http.api_server import serve_app
from support.servers.shell import Shell, shell_in


class Engineer:
    """Runs commands at a server whose data port is at `url`; `admin` has the admin port."""

    def __init__(self, admin: Shell, url: str) -> None:
        self.admin = admin
        self.url = url
        self.environment: dict[str, str | None] = {
            "LORAPLEX_URL": url,
            "LORAPLEX_API_KEY": admin.plane.make_key("acme", *SCOPES),
            "LORAPLEX_ADMIN_URL": "http://127.0.0.1:9",
            "LORAPLEX_ADMIN_TOKEN": None,
            "LORAPLEX_DATA_DIR": None,
            "COLUMNS": "200",
        }

    def run(self, *args: str, **environment: str | None) -> Result:
        return CliRunner().invoke(create_cli(), list(args), env={**self.environment, **environment})

    def ok(self, *args: str, **environment: str | None) -> str:
        done = self.run(*args, **environment)
        assert done.exit_code == 0, done.output
        return done.stdout

    def fails(self, *args: str, code: int = 1, **environment: str | None) -> str:
        done = self.run(*args, **environment)
        assert (done.exit_code, done.stdout) == (code, ""), done.output
        assert done.stderr.count("\n") == 1
        return done.stderr

    @property
    def key_id(self) -> str:
        return str(self.environment["LORAPLEX_API_KEY"]).split("_")[1]


@pytest.fixture
def engineer(tmp_path: Path) -> Iterator[Engineer]:
    with shell_in(tmp_path) as admin:
        admin.plane.make_tenant()
        with serve_app(Starlette(routes=[Mount("/admin/v1", admin.plane.tenant_app)])) as data:
            yield Engineer(admin, data.url)


def test_from_a_push_to_a_release_and_its_usage(engineer: Engineer) -> None:
    first, second = engineer.admin.adapter("a"), engineer.admin.adapter("b", seed=2)
    said = engineer.ok("adapter", "push", "support", first).splitlines()[-1]
    assert said == "v1 serves now: it takes 100% of the traffic of support. Nothing is left to do."
    said = engineer.ok("adapter", "push", "support", second).splitlines()[-1]
    command = "loraplex release set support v1=90 v2=10"
    assert said == f"v2 takes no traffic yet; v1=100 serves. To release it: {command}"
    assert "90.0%" in engineer.ok(*command.split()[1:])
    assert "support" in engineer.ok("adapter", "list")
    assert "v2" in engineer.ok("adapter", "show", "support")
    assert "promote" in engineer.ok("release", "promote", "support", "v2")
    assert "2 " in engineer.ok("release", "history", "support")
    pulled = engineer.admin.root / "pulled"
    assert "support@v2" in engineer.ok("adapter", "pull", "support", str(pulled))
    assert json.loads(engineer.ok("usage", "--json"))["tenant"] == "acme"
    engineer.ok("adapter", "delete", "support")


def test_a_key_shows_what_it_is_and_nothing_of_others(engineer: Engineer) -> None:
    engineer.admin.ok("key", "create", "-t", "acme", "--name", "another")
    shown = json.loads(engineer.ok("key", "show", "--json"))
    assert (shown["id"], shown["tenant_id"], shown["state"]) == (engineer.key_id, "acme", "valid")
    assert shown["scopes"] == sorted(SCOPES)
    assert "secret" not in shown
    assert [row["id"] for row in json.loads(engineer.ok("key", "list", "--json"))["data"]] == [
        engineer.key_id
    ]
    assert "the tenant 'acme' has no key 'another'" in engineer.fails("key", "show", "another")


@pytest.mark.parametrize(
    "line", ["key create", "key rotate KEY", "key revoke KEY", "key update KEY --scope inference"]
)
def test_what_operators_alone_do_says_so(engineer: Engineer, line: str) -> None:
    said = engineer.fails(*line.replace("KEY", engineer.key_id).split())
    assert "needs the admin token, and LORAPLEX_API_KEY is a tenant's key" in said
    assert "'loraplex key show'" in said


def test_another_tenant_is_refused_with_the_keys_own(engineer: Engineer) -> None:
    said = engineer.fails("adapter", "list", "--tenant", "rival")
    assert "There is no tenant 'rival'." in said
    assert "LORAPLEX_API_KEY is a key of the tenant 'acme'." in said
    assert "support" not in engineer.ok("adapter", "list", "--tenant", "acme")


def test_a_missing_scope_says_who_can_give_it(engineer: Engineer) -> None:
    poor = engineer.admin.plane.make_key("acme", "inference")
    said = engineer.fails("adapter", "list", LORAPLEX_API_KEY=poor)
    assert "This key lacks the scope adapters:read." in said
    command = (
        f"loraplex key update {poor.split('_')[1]} --tenant acme --scope inference --scope adapters:read"
    )
    assert said.rstrip().endswith(command)
    engineer.admin.ok(*command.split()[1:])
    engineer.ok("adapter", "list", LORAPLEX_API_KEY=poor)
    assert "lacks the scope usage:read." in engineer.fails("usage", LORAPLEX_API_KEY=poor)
    at_operators = {"LORAPLEX_ADMIN_URL": engineer.admin.server.url, "LORAPLEX_ADMIN_TOKEN": poor}
    assert "--scope usage:read" in engineer.fails("usage", LORAPLEX_API_KEY=None, **at_operators)


class TestWithBoth:
    """A machine that has an admin token and a key."""

    def test_the_admin_token_goes_first_and_needs_a_tenant(self, engineer: Engineer) -> None:
        both = {"LORAPLEX_ADMIN_TOKEN": ADMIN_TOKEN, "LORAPLEX_ADMIN_URL": engineer.admin.server.url}
        engineer.ok("adapter", "list", "--tenant", "acme", LORAPLEX_URL="http://127.0.0.1:9", **both)
        said = engineer.fails("adapter", "list", code=2, **both)
        assert "the admin token of LORAPLEX_ADMIN_TOKEN is no tenant's" in said
        assert "LORAPLEX_API_KEY is not used beside it" in said
        assert json.loads(engineer.ok("usage", "--json", **both)) == {"data": []}

    def test_an_option_goes_before_a_variable(self, engineer: Engineer) -> None:
        key = str(engineer.environment["LORAPLEX_API_KEY"])
        engineer.ok("adapter", "list", "--api-key", key, LORAPLEX_ADMIN_TOKEN="wrong", LORAPLEX_API_KEY=None)
        given = ("--admin-token", ADMIN_TOKEN, "--admin-url", engineer.admin.server.url)
        engineer.ok("adapter", "list", "--tenant", "acme", *given)
        said = engineer.fails("adapter", "list", "--api-key", key, *given)
        assert "--api-key and --admin-token are two callers" in said

    def test_a_wrong_secret_says_where_it_is_from(self, engineer: Engineer) -> None:
        assert "This one is from LORAPLEX_API_KEY." in engineer.fails(
            "adapter", "list", "--tenant", "acme", LORAPLEX_API_KEY="lpx_0_x"
        )
        assert "[invalid_api_key]" in engineer.fails("adapter", "list", LORAPLEX_API_KEY="no key")
        assert "give --url" in engineer.fails("adapter", "list", LORAPLEX_URL="http://127.0.0.1:9")


class TestKeysOfAnOperator:
    def test_every_scope_in_one_word(self, engineer: Engineer) -> None:
        made = engineer.admin.json("key", "create", "-t", "acme", "--scope", "all")
        assert made["scopes"] == sorted(SCOPES)

    def test_a_key_is_named_by_its_name_too(self, engineer: Engineer) -> None:
        shell = engineer.admin
        made = shell.json("key", "create", "-t", "acme", "--name", "ci")
        assert shell.json("key", "show", "ci", "-t", "acme")["id"] == made["id"]
        rotated = shell.json("key", "rotate", "ci", "-t", "acme")
        assert (rotated["id"], rotated["secret"] == made["secret"]) == (made["id"], False)
        second = shell.json("key", "create", "-t", "acme", "--name", "ci")
        said = shell.fails("key", "rotate", "ci", "-t", "acme")
        assert "2 keys have the name 'ci': give the id of one of them" in said
        assert made["id"] in said
        assert second["id"] in said
        shell.ok("key", "revoke", second["id"], "-t", "acme")
        assert shell.json("key", "update", "ci", "-t", "acme", "--scope", "all")["id"] == made["id"]
        assert "no key 'cd'" in shell.fails("key", "revoke", "cd", "-t", "acme")
        shell.ok("key", "revoke", "ci", "-t", "acme")
        assert "no key 'ci'" in shell.fails("key", "rotate", "ci", "-t", "acme")

    def test_an_expired_key_is_shown_as_expired(self, engineer: Engineer) -> None:
        shell = engineer.admin
        with shell.plane.database.write() as session:
            past = datetime.now(UTC) - timedelta(seconds=5)
            session.execute(update(ApiKey).where(ApiKey.id == engineer.key_id).values(expires_at=past))
        assert "expired 20" in shell.ok("key", "list", "-t", "acme")
        (row,) = shell.json("key", "list", "-t", "acme")["data"]
        assert row["state"] == "expired"
        rotated = shell.run("key", "rotate", engineer.key_id, "-t", "acme").stderr
        assert f"loraplex key update {engineer.key_id} --tenant acme --expires-at none" in rotated
        shell.ok("key", "update", engineer.key_id, "-t", "acme", "--expires-at", "2099-01-01")
        assert "until 2099-01-01" in shell.ok("key", "list", "-t", "acme")
        assert "expired" not in shell.run("key", "rotate", engineer.key_id, "-t", "acme").stderr


def test_a_misspelt_variable_is_named_where_the_secret_is_missing(engineer: Engineer) -> None:
    said = engineer.fails("adapter", "list", LORAPLEX_API_KEY=None, LORAPLEX_API_KYE="lpx_x")
    assert "LORAPLEX_API_KYE is no setting, did you mean 'LORAPLEX_API_KEY'?" in said
    assert "lpx_x" not in said
