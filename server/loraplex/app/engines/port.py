"""The port that engines dial (`--engine-port`), with its token and its probe in the artifact store."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from pathlib import Path

import structlog

from loraplex.adapters.errors import StoreFailed
from loraplex.adapters.store.interface import Store
from loraplex.adapters.store.probe import Probe, write_probe
from loraplex.app.engines.logs import log_engine
from loraplex.app.engines.tls import port_tls
from loraplex.app.settings import Settings, SettingsInvalid
from loraplex.control.tenancy.secrets import load_or_create
from loraplex.serving.demand import Demand
from loraplex.serving.dialling.hello import Expected
from loraplex.serving.dialling.members import Members, OnJoin, OnLeave

RENEW_S = 6 * 3600.0
"""Age of a probe that is replaced: a server that starts sweeps what no version has from a bucket after a day."""


def engine_token_path(settings: Settings) -> Path:
    """The file of the token that engines and server share."""
    return Path(settings.engine_token_file or settings.data_dir / "engine-token")


def load_engine_token(settings: Settings) -> bytes:
    """The token of an engine that dials. Raises SettingsInvalid."""
    path = engine_token_path(settings)
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise SettingsInvalid(
            f"the engine token {path} cannot be read ({reason}); copy the server's, which 'loraplex serve "
            "--engine-port' keeps in its data directory, and name it with --engine-token-file."
        ) from error
    if not token:
        raise SettingsInvalid(f"the engine token {path} is empty; copy the server's.")
    return token.encode()


@contextlib.asynccontextmanager
async def listen_for_engines(
    settings: Settings,
    sockets: Sequence[socket.socket],
    store: Store,
    base_fingerprint: str,
    *,
    on_join: OnJoin,
    on_leave: OnLeave,
    on_damaged: Callable[[tuple[str, ...]], None] = lambda digests: None,
    taken: Collection[str] = (),
    demand: Demand | None = None,
) -> AsyncIterator[Members]:
    """Take engines on these bound sockets for the length of the context. The token is made at the first start. Raises
    SettingsInvalid, SecretUnusable, StoreFull, StoreFailed."""
    path = engine_token_path(settings)
    tls = port_tls(settings)
    try:
        token, _ = load_or_create(path, secrets.token_urlsafe(32))
        probes = [await asyncio.to_thread(write_probe, store)]
    except OSError as error:
        raise SettingsInvalid(f"--engine-port cannot be served: {error}.") from error
    members = Members(
        Expected(
            token.encode(),
            base_fingerprint,
            probes[0].content,
            settings.max_model_len,
            settings.max_adapter_rank,
        ),
        probes[0].digest,
        on_join=on_join,
        on_leave=on_leave,
        log=log_engine,
        taken=taken,
        on_damaged=on_damaged,
        demand=demand,
        tls=tls,
    )
    log = structlog.get_logger("loraplex")
    addresses = [bound.getsockname()[:2] for bound in sockets]
    await members.listen(sockets)
    log.info("engine_port_open", addresses=addresses, token_file=str(path.resolve()), tls=tls is not None)
    renewing = asyncio.create_task(_renew(members, store, probes))
    try:
        yield members
    finally:
        renewing.cancel()
        await asyncio.gather(renewing, return_exceptions=True)
        await members.close()
        for probe in probes:
            await asyncio.to_thread(_delete, store, probe)


async def _renew(members: Members, store: Store, probes: list[Probe]) -> None:
    """Replace the last of `probes` from time to time. The one before it stays for handshakes that have begun."""
    while True:
        await asyncio.sleep(RENEW_S)
        try:
            probes.append(await asyncio.to_thread(write_probe, store))
        except (StoreFailed, OSError) as error:
            structlog.get_logger("loraplex").warning("probe_not_written", reason=str(error))
            continue
        members.expect(probes[-1].digest, probes[-1].content)
        while len(probes) > 2:
            await asyncio.to_thread(_delete, store, probes[0])
            del probes[0]


def _delete(store: Store, probe: Probe) -> None:
    with contextlib.suppress(StoreFailed, OSError):  # a sweep removes it
        store.delete(probe.digest)
