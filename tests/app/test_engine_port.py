"""The engines' port of a server, and the command that dials it: token, probe, address, name."""

from __future__ import annotations

import os
import re
import socket
import stat
from pathlib import Path
from typing import Any

import pytest

from loraplex.adapters.store.artifact_store import ArtifactStore
from loraplex.adapters.store.probe import read_probe
from loraplex.app.cluster.choice import cluster_spec
from loraplex.app.engines import port as engine_port
from loraplex.app.engines.port import listen_for_engines, load_engine_token
from loraplex.app.engines.process import check_name, parse_address, run_engine
from loraplex.app.ports.sockets import open_ports
from loraplex.app.settings import Settings, SettingsInvalid
from support.engine.dialled import dialling
from support.engine.fake_processes import until
from support.servers.live_server import free_ports


def settings(folder: Path, **given: Any) -> Settings:
    return Settings(data_dir=folder / "data", port=0, admin_port=0, **given)


@pytest.mark.parametrize(
    ("join", "address"),
    [
        ("127.0.0.1:8002", ("127.0.0.1", 8002)),
        ("api.example:1", ("api.example", 1)),
        ("[::1]:65535", ("::1", 65535)),
    ],
)
def test_an_address_is_read(join: str, address: tuple[str, int]) -> None:
    assert parse_address(join) == address


@pytest.mark.parametrize(
    "join", ["", "host", ":1", "host:0", "host:65536", "::1:80", "http://host:1", "host:1/x"]
)
def test_what_is_no_address_is_refused(join: str) -> None:
    with pytest.raises(SettingsInvalid, match="--join: HOST:PORT is expected"):
        parse_address(join)


@pytest.mark.parametrize("name", ["", "-x", "a b", "a/b", "é", "x" * 65, "x\n"])
def test_a_name_that_no_label_can_have_is_refused(name: str) -> None:
    with pytest.raises(SettingsInvalid, match="--replica"):
        check_name(name)


def test_an_engine_needs_the_token_of_its_server(tmp_path: Path) -> None:
    given = settings(tmp_path, model="/models/x")
    with pytest.raises(SettingsInvalid, match=r"engine-token cannot be read .*copy the server's"):
        run_engine(given, "127.0.0.1:1", None)
    given.data_dir.joinpath("engine-token").write_text("\n")
    with pytest.raises(SettingsInvalid, match="is empty"):
        run_engine(given, "127.0.0.1:1", None)


async def test_an_engine_on_the_same_store_joins_by_the_token_file(tmp_path: Path) -> None:
    given = settings(tmp_path, engine_port=free_ports(1)[0])
    store = ArtifactStore(given.data_dir / "artifacts")
    turns: list[tuple[str, str]] = []
    with open_ports(given) as ports:
        async with listen_for_engines(
            given,
            ports.engine,
            store,
            "",
            on_join=lambda replica, node, session: turns.append(("join", replica)),
            on_leave=lambda replica: turns.append(("leave", replica)),
        ) as members:
            path = given.data_dir / "engine-token"
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            same = ArtifactStore(given.data_dir / "artifacts")
            async with dialling(
                given.engine_address[1],
                token=load_engine_token(given),
                read_probe=lambda digest: read_probe(same, digest),
            ):
                await until(lambda: turns == [("join", "one")])
                assert list(members.sessions) == ["one"]
        assert turns == [("join", "one"), ("leave", "one")]
    assert list(store.digests()) == [], "the probe is gone with the port"


async def test_a_probe_is_replaced_before_a_sweep_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_port, "RENEW_S", 0.01)
    given = settings(tmp_path, engine_port=free_ports(1)[0])
    store = ArtifactStore(given.data_dir / "artifacts")
    seen: set[str] = set()

    def some_were_there() -> bool:
        seen.update(store.digests())
        return len(seen) >= 4

    with open_ports(given) as ports:
        async with listen_for_engines(
            given, ports.engine, store, "", on_join=lambda *_: None, on_leave=lambda _: None
        ):
            await until(some_were_there)
            async with dialling(
                given.engine_address[1],
                token=load_engine_token(given),
                read_probe=lambda digest: read_probe(store, digest),
            ) as dialled:
                await until(lambda: bool(dialled.logged("server_joined")))


def test_engines_that_ray_starts_are_given_the_ca_of_the_port(tmp_path: Path) -> None:
    given = settings(tmp_path, engine_tls=os.path.relpath(tmp_path))
    with pytest.raises(SettingsInvalid, match=r"needs ca\.crt too"):
        cluster_spec(given, "127.0.0.1:1")
    (tmp_path / "ca.crt").touch()
    assert cluster_spec(given, "127.0.0.1:1").settings["engine_tls"] == str(tmp_path.resolve())


def test_the_engines_port_is_taken_with_the_others(tmp_path: Path) -> None:
    with open_ports(settings(tmp_path)) as ports:
        assert ports.engine == []
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        refusal = re.escape(f"port {number} on 127.0.0.1 cannot be used") + ".*--engine-port\\."
        with (
            pytest.raises(SettingsInvalid, match=refusal),
            open_ports(settings(tmp_path, engine_port=number)),
        ):
            pass
    same = Settings(port=9000, engine_port=9000)
    with pytest.raises(SettingsInvalid, match="--port and --engine-port are both 9000"), open_ports(same):
        pass
