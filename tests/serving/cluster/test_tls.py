"""Engines that dial by TLS: which are let in, and that strangers without it disturb nobody."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from loraplex.app.engines.tls import engine_tls, port_tls
from loraplex.app.settings import Settings, SettingsInvalid
from loraplex.serving.dialling import hello as handshake
from loraplex.serving.dialling import members as members_module
from support.engine.dialled import dialling, listening
from support.engine.fake_core import fake_tokens
from support.engine.fake_processes import ask, until
from support.servers.certificates import Certificates, make_certificates


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


def server_end(made: Certificates) -> ssl.SSLContext:
    context = port_tls(Settings(engine_tls=str(made.cert.parent)))
    assert context is not None
    return context


def engine_end(ca: Path) -> ssl.SSLContext:
    context = engine_tls(Settings(engine_tls=str(ca.parent)))
    assert context is not None
    return context


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_an_engine_serves_over_tls(
    certificates: Certificates, run: Callable[[Coroutine[Any, Any, None]], None]
) -> None:
    """A server runs on uvloop, which has a TLS of its own."""

    async def story() -> None:
        async with listening(tls=server_end(certificates)) as port:
            async with dialling(port.number, tls=engine_end(certificates.ca)) as dialled:
                session = await port.session()
                requests = [ask(f"r{number}", 30, (number,) * 5000) for number in range(4)]
                streams = [session.submit(request)[0] for request in requests]
                for request, stream in zip(requests, streams, strict=True):
                    tokens = [token async for event in stream for token in event.token_ids]
                    assert tuple(tokens) == fake_tokens(request)
                await dialled.relay.drain(60)
                await until(lambda: bool(port.logged("engine_left")))
            assert port.logged("engine_left")[0]["reason"] == "it has drained"
            assert port.logged("engine_refused") == []

    run(story())


async def test_an_engine_that_trusts_another_ca_does_not_join(
    certificates: Certificates, tmp_path: Path
) -> None:
    other = make_certificates(tmp_path)
    async with listening(tls=server_end(certificates)) as port:
        async with dialling(port.number, tls=engine_end(other.ca)) as dialled:
            await until(lambda: bool(dialled.logged("server_not_joined")))
            reason = dialled.logged("server_not_joined")[0]["reason"]
            assert "CERTIFICATE_VERIFY_FAILED" in reason
            assert "--engine-tls" in reason
            assert "does not speak TLS" in await port.refusal()
        assert port.turns == []


async def test_both_ends_say_that_one_has_no_tls(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_S", 0.5)
    monkeypatch.setattr("loraplex.serving.dialling.relay.HANDSHAKE_S", 0.5)
    async with listening(tls=server_end(certificates)) as port, dialling(port.number) as plain:
        await until(lambda: bool(plain.logged("server_not_joined")))
        assert "then give --engine-tls" in plain.logged("server_not_joined")[0]["reason"]
        assert await port.refusal()
    async with listening() as port, dialling(port.number, tls=engine_end(certificates.ca)) as secured:
        await until(lambda: bool(secured.logged("server_not_joined")))
        assert "no TLS with the server" in secured.logged("server_not_joined")[0]["reason"]


async def test_connections_without_tls_are_bounded_and_keep_no_engine_out(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are counted from their first byte, before TLS is agreed on."""
    monkeypatch.setattr(members_module, "MAX_HANDSHAKES", 4)
    async with listening(tls=server_end(certificates)) as port:
        silent = [await asyncio.open_connection("127.0.0.1", port.number) for _ in range(12)]
        for reader, _ in silent[:8]:
            assert await reader.read() == b"", "nothing is said in the clear"
        async with dialling(port.number, tls=engine_end(certificates.ca)):
            await port.session()
        for _, writer in silent:
            writer.close()


def test_what_a_server_cannot_use_is_said(certificates: Certificates, tmp_path: Path) -> None:
    assert port_tls(Settings()) is None
    (tmp_path / "tls.crt").write_bytes(certificates.cert.read_bytes())
    with pytest.raises(SettingsInvalid, match=r"tls.crt with tls.key cannot be used: No such file"):
        port_tls(Settings(engine_tls=str(tmp_path)))


def test_what_an_engine_cannot_use_is_said(certificates: Certificates, tmp_path: Path) -> None:
    assert engine_tls(Settings()) is None
    (tmp_path / "ca.crt").write_bytes(certificates.key.read_bytes())
    with pytest.raises(SettingsInvalid, match="PEM files are expected"):
        engine_tls(Settings(engine_tls=str(tmp_path)))
