"""An installation of the last release (0.1.0), taken over by this version; and one of a later version, refused."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import make_url

from loraplex.adapters.admission.base_model import load_base_spec
from loraplex.adapters.store.files import CONFIG_NAME, TENSORS_NAME, digest_upload
from loraplex.migrations.run import examine_schema, upgrade
from support.servers.live_server import TINY_TORCH, LiveServer, checked, write_tiny_adapter
from support.servers.postgres import postgres_server
from support.servers.run_here import run_here

pytestmark = pytest.mark.slow

DUMP = Path(__file__).with_name("installation_of_0_1_0.sql")
KEY = "lpx_2a39b15c45e7e96c_l4wcwEx0r3cmpFtQjpuoLFMWO4RS3kQJBl1_TIzyTwQ"
PEPPER = b"p" * 32
TABLES = ("tenants", "api_keys", "adapters", "adapter_versions", "releases")


def write_installation(data: Path, model: Path) -> list[Path]:
    """The data directory that 0.1.0 left, on SQLite; its two adapters' folders."""
    data.mkdir(mode=0o700)
    text = DUMP.read_text().replace("@FINGERPRINT@", load_base_spec(model).fingerprint)
    folders = []
    for seed in (1, 2):
        made = write_tiny_adapter(data.with_name(f"adapter-{seed}"), seed=seed)
        digest = digest_upload(made / CONFIG_NAME, made / TENSORS_NAME)
        shutil.copytree(made, data / "artifacts" / "sha256" / digest[:2] / digest)
        text = text.replace(f"@DIGEST-{seed}@", digest)
        folders.append(made)
    with contextlib.closing(sqlite3.connect(data / "loraplex.db")) as connection:
        connection.executescript(text)
    (data / "key-pepper").write_text(PEPPER.hex() + "\n")
    (data / "admin-token").write_text("lpx-admin-of-0-1-0\n")
    for name in ("loraplex.db", "key-pepper", "admin-token"):
        (data / name).chmod(0o600)
    return folders


def move_to_postgres(file: Path) -> str:
    """A database of the same schema with the same rows; its URL."""
    url = postgres_server().create_database()
    upgrade(url, "0001")
    plain = make_url(url).set(drivername="postgresql").render_as_string()
    with contextlib.closing(sqlite3.connect(file)) as old, psycopg.connect(plain) as new:
        for table in TABLES:
            rows = old.execute(f"SELECT * FROM {table}")
            names = [column[0] for column in rows.description]
            insert = sql.SQL("INSERT INTO {} ({}) VALUES ({})").format(
                sql.Identifier(table),
                sql.SQL(", ").join(map(sql.Identifier, names)),
                sql.SQL(", ").join(sql.SQL("%s::boolean" if name == "pinned" else "%s") for name in names),
            )
            for row in rows:
                values = [str(v) if name == "pinned" else v for name, v in zip(names, row, strict=True)]
                new.execute(insert, values)
    file.unlink()
    return url


@pytest.mark.parametrize("backend", ["sqlite", "postgresql"])
def test_this_version_takes_over_an_installation_of_the_last(
    backend: str, tiny_model: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    first, second = write_installation(data, tiny_model)
    url = f"sqlite:///{data}/loraplex.db"
    if backend == "postgresql":
        url = move_to_postgres(data / "loraplex.db")
    assert examine_schema(url).found == "0001"
    with LiveServer(tiny_model, data, dtype="float32", database_url=url, **TINY_TORCH) as server:
        schema = examine_schema(url)
        assert schema.found == schema.newest
        tenant = checked(server.admin.get("tenants/acme"))
        assert (tenant["display_name"], tenant["weight"]) == ("Acme Ltd", 2.0)
        assert tenant["limits"]["requests_per_minute"] == 600
        versions = checked(server.admin.get("tenants/acme/adapters/support/versions"))["data"]
        assert sorted((row["version"], row["state"]) for row in versions) == [
            ("v1", "ready"),
            ("v2", "ready"),
        ]
        release = checked(server.admin.get("tenants/acme/adapters/support/release"))
        assert {part["version"]: part["weight"] for part in release["targets"]} == {"v1": 90, "v2": 10}
        assert len(checked(server.admin.get("tenants/acme/keys"))["data"]) == 2
        # What the old versions answer is what the same bytes answer under a new name.
        for version, folder in (("v1", first), ("v2", second)):
            server.upload("acme", f"again-{version}", folder)
            assert say(server, f"support@{version}") == say(server, f"again-{version}")
        assert say(server, "support")
        server.create_key("rival")
        server.wait(lambda: usage_of(server) >= 5)
        assert server.stop() == 0
    verified = run_here("audit", "verify", "--data-dir", str(data), "--database-url", url)
    assert verified.code == 0, verified.stderr


def say(server: LiveServer, model: str) -> str:
    body = {"model": model, "prompt": "one", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    with server.client(KEY) as client:
        return str(checked(client.post("/v1/completions", json=body))["choices"][0]["text"])


def usage_of(server: LiveServer) -> int:
    return sum(row["requests"] for row in checked(server.admin.get("usage"))["data"])


def test_a_database_of_a_later_version_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    """As this version's successor leaves it; the way back is in docs/operations.md."""
    data = tmp_path / "data"
    write_installation(data, tiny_model)
    url = f"sqlite:///{data}/loraplex.db"
    upgrade(url)
    with contextlib.closing(sqlite3.connect(data / "loraplex.db")) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '0999'")
        connection.commit()
    for command in (
        ("serve", "--model", str(tiny_model)),
        ("migrate",),
        ("backup", str(tmp_path / "backup")),
    ):
        refused = run_here(*command, "--data-dir", str(data))
        assert (refused.code, refused.stdout) == (1, "")
        (line,) = [line for line in refused.said if line.startswith("loraplex: ")]
        assert "the database has the schema '0999'" in line
        assert "Install that version, or restore a back-up from before" in line
    assert not (tmp_path / "backup").exists()
    doctor = run_here("doctor", "--data-dir", str(data), "--device", "cpu", "--kernels", "torch")
    assert doctor.code == 1
    assert "wrong database: the database has the schema '0999'" in doctor.stdout
