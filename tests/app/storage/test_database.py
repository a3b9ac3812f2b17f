"""`--database-url`: what it may be, what is said of it, and that no password is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from loraplex.app.cli import create_cli
from loraplex.app.settings import Settings, SettingsInvalid, load_settings
from loraplex.app.storage.database import database_url, describe_database, shown_database, upgrade_database
from loraplex.control.db.clock import database_now
from loraplex.control.db.database import Database
from loraplex.control.db.tables import Tenant
from loraplex.control.tenancy.keys import Keys
from loraplex.control.tenancy.secrets import load_pepper
from loraplex.migrations.errors import DatabaseTooNew
from support.servers.postgres import need_programs, postgres_server

PASSWORD = "hunter2-and-more"


def settings(tmp_path: Path, url: str = "") -> Settings:
    return load_settings({"data_dir": str(tmp_path / "data"), "database_url": url})


@pytest.fixture
def postgres_url() -> str:
    need_programs()
    return postgres_server().create_database()


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("postgresql://u:p%40ss@h:5433/db", "postgresql+psycopg://u:p%40ss@h:5433/db"),
        ("postgresql+psycopg://u@h/db?sslmode=require", "postgresql+psycopg://u@h/db?sslmode=require"),
        ("postgresql:///db?host=/var/run/postgresql", "postgresql+psycopg:///db?host=/var/run/postgresql"),
        ("sqlite:////x/y.db", "sqlite:////x/y.db"),
    ],
)
def test_accepted_database_urls(tmp_path: Path, given: str, used: str) -> None:
    assert database_url(settings(tmp_path, given)).replace("%2F", "/") == used


@pytest.mark.parametrize(
    "given",
    [
        "mysql://u:{0}@h/db",
        "postgresql+asyncpg://u:{0}@h/db",
        "postgresql://u:{0}@h",
        "postgresql://u:{0}@h:port/db",
        "postgres://u:{0}@h/db",
        "u:{0}@h/db",
        "sqlite://",
        " ",
    ],
)
def test_refused_database_urls_do_not_show_their_password(tmp_path: Path, given: str) -> None:
    with pytest.raises(SettingsInvalid, match="--database-url") as caught:
        database_url(settings(tmp_path, given.format(PASSWORD)))
    assert PASSWORD not in caught.value.message


def test_a_database_is_shown_without_secrets() -> None:
    shown = {
        f"postgresql+psycopg://me:{PASSWORD}@db.example:5433/lora": "postgresql://db.example:5433/lora",
        f"postgresql+psycopg://h/lora?password={PASSWORD}": "postgresql://h/lora",
        "sqlite:////x/y.db": "sqlite:////x/y.db",
    }
    assert {url: shown_database(url) for url in shown} == shown


def test_a_database_that_cannot_be_reached_is_one_line(tmp_path: Path, postgres_url: str) -> None:
    wrong = postgres_url.replace("loraplex@", f"nobody:{PASSWORD}@")
    nowhere = f"postgresql://u:{PASSWORD}@127.0.0.1:1/db"
    missing = postgres_url + "-that-is-not-there"
    for url in (wrong, nowhere, missing):
        with pytest.raises(SettingsInvalid, match="cannot be used") as caught:
            upgrade_database(settings(tmp_path, url))
        assert PASSWORD not in caught.value.message
        assert "\n" not in caught.value.message


def command(*arguments: str) -> Any:
    return CliRunner().invoke(create_cli(), list(arguments))


def test_migrate_says_what_it_did(tmp_path: Path, postgres_url: str) -> None:
    options = (
        "--data-dir",
        str(tmp_path / "data"),
        "--database-url",
        postgres_url.replace("@", f":{PASSWORD}@"),
    )
    first, second = command("migrate", *options), command("migrate", *options)
    assert (first.exit_code, second.exit_code) == (0, 0)
    assert ", ".join(f"{number:04}" for number in range(1, 21)) in first.output
    assert "migrations made" not in second.output
    assert "its database is new and empty" in first.output
    assert "new and empty" not in second.output
    assert PASSWORD not in first.output


def test_migrate_takes_a_new_pepper_when_told_to(tmp_path: Path, postgres_url: str) -> None:
    upgrade_database(settings(tmp_path, postgres_url))
    database = Database(postgres_url)
    with database.write() as session:
        session.add(Tenant(id="acme", weight=1.0, limits={}, created_at=database_now(session)))
    Keys(database, load_pepper(tmp_path / "lost")).create("acme")
    options = ("--data-dir", str(tmp_path / "data"), "--database-url", postgres_url)
    done = command("migrate", "--accept-new-pepper", *options)
    assert done.exit_code == 0
    assert "rotate every key" in done.output
    database.close()


def test_doctor_looks_at_the_schema(tmp_path: Path, postgres_url: str) -> None:
    chosen = settings(tmp_path, postgres_url)
    assert "no schema yet" in describe_database(chosen)
    upgrade_database(chosen)
    assert describe_database(chosen).startswith("PostgreSQL ")
    assert "schema 0020, this version's is 0020" in describe_database(chosen)
    database = Database(postgres_url)
    with database.write() as session:
        session.connection().exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    database.close()
    with pytest.raises(DatabaseTooNew, match="a newer version has used it"):
        describe_database(chosen)
    with pytest.raises(SettingsInvalid, match="cannot be used"):
        describe_database(settings(tmp_path, "postgresql://u@127.0.0.1:1/db"))
