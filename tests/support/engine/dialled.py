"""Engines that dial in, over loopback: a port for them, and a relay around the fake engine process."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from loraplex.engine.config import EngineConfig
from loraplex.serving.dialling.hello import Expected
from loraplex.serving.dialling.members import Members, OnJoin, OnLeave
from loraplex.serving.dialling.relay import DialPolicy, Door, Relay
from loraplex.serving.dialling.remote import RemoteEngine
from loraplex.serving.supervision.engine_supervisor import Supervision
from loraplex.serving.supervision.supervisor import RestartPolicy
from loraplex.serving.supervision.watchdog import WatchdogPolicy
from support.engine.fake_processes import FAKE_ENGINE, until

TOKEN = b"a token of the tests"
PROBE = "0" * 64
CONTENT = b"content of the probe"
NODE = socket.gethostname()
EXPECTED = Expected(TOKEN, "", CONTENT)
"""The fake engine has no fingerprint."""


@dataclass
class Port:
    """A port for engines, and what came of it. `log` has each line's event and fields, `turns` each join and leave."""

    members: Members
    number: int
    log: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    turns: list[tuple[str, str]] = field(default_factory=list)
    sessions: dict[str, RemoteEngine] = field(default_factory=dict)

    def logged(self, event: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.log if name == event]

    async def session(self, replica: str = "one") -> RemoteEngine:
        """The replica's, once it has joined."""
        await until(lambda: replica in self.sessions)
        return self.sessions[replica]

    async def refusal(self) -> str:
        """The reason of the first connection that was refused."""
        await until(lambda: bool(self.logged("engine_refused")))
        return str(self.logged("engine_refused")[0]["reason"])


async def listen(
    number: int = 0,
    *,
    expected: Expected = EXPECTED,
    watchdog: WatchdogPolicy | None = None,
    on_damaged: Callable[[tuple[str, ...]], None] = lambda digests: None,
    on_join: OnJoin = lambda replica, node, session: None,
    on_leave: OnLeave = lambda replica: None,
    tls: ssl.SSLContext | None = None,
) -> Port:
    """A port on loopback; 0 for any that is free."""
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(("127.0.0.1", number))

    def note_join(replica: str, node: str, session: RemoteEngine) -> None:
        on_join(replica, node, session)
        port.turns.append(("join", replica))
        port.sessions[replica] = session

    def note_leave(replica: str) -> None:
        on_leave(replica)
        port.turns.append(("leave", replica))
        del port.sessions[replica]

    members = Members(
        expected,
        PROBE,
        on_join=note_join,
        on_leave=note_leave,
        log=lambda event, **fields: port.log.append((event, fields)),
        watchdog=watchdog,
        on_damaged=on_damaged,
        tls=tls,
    )
    port = Port(members, bound.getsockname()[1])
    await members.listen([bound])
    return port


@asynccontextmanager
async def listening(**options: Any) -> AsyncIterator[Port]:
    port = await listen(**options)
    try:
        yield port
    finally:
        await port.members.close()


@dataclass
class Dialling:
    """A relay that runs. `log` as `Port.log`."""

    relay: Relay
    running: asyncio.Task[None]
    log: list[tuple[str, dict[str, Any]]]

    def logged(self, event: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.log if name == event]

    async def end(self) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        await self.relay.close()


def dial(
    number: int,
    replica: str = "one",
    *,
    token: bytes = TOKEN,
    read_probe: Callable[[str], bytes] = lambda digest: CONTENT,
    config: EngineConfig | None = None,
    restart: RestartPolicy | None = None,
    node: str = NODE,
    tls: ssl.SSLContext | None = None,
    host: str = "127.0.0.1",
) -> Dialling:
    """Run a relay with a fake engine that dials this port."""
    log: list[tuple[str, dict[str, Any]]] = []
    relay = Relay(
        config or EngineConfig("ok", "/nowhere"),
        Door(host, number, lambda: token, read_probe, tls),
        replica=replica,
        node=node,
        rules=Supervision(
            command=FAKE_ENGINE,
            start_timeout_s=60,
            restart=restart or RestartPolicy(),
            log=lambda event, **fields: log.append((event, fields)),
        ),
        dialling=DialPolicy(0.01, 0.1),
    )
    return Dialling(relay, asyncio.create_task(relay.run()), log)


@asynccontextmanager
async def dialling(number: int, replica: str = "one", **options: Any) -> AsyncIterator[Dialling]:
    dialled = dial(number, replica, **options)
    try:
        yield dialled
    finally:
        await dialled.end()


class DialledClient:
    """The session of an engine that dials in, with that engine and the port, for the conformance suite."""

    def __init__(self, config: EngineConfig, on_damaged: Callable[[tuple[str, ...]], None]) -> None:
        self._config = config
        self._on_damaged = on_damaged
        self._session: RemoteEngine | None = None

    async def start(self) -> None:
        self._port = await listen(on_damaged=self._on_damaged)
        self._dialled = dial(self._port.number, config=self._config)
        self._session = await self._port.session()

    async def close(self, *, drain_s: float = 0) -> None:
        assert self._session is not None
        await self._session.close(drain_s=drain_s)
        await self._dialled.end()
        await self._port.members.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)
