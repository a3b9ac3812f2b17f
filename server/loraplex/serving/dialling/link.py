"""The engine's end of its connection to a server: the handshake, then frames both ways."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import cast

from loraplex.adapters.errors import LoraplexError
from loraplex.engine.ipc import framing
from loraplex.engine.ipc import protocol as wire
from loraplex.engine.ipc.loop import Log
from loraplex.serving.dialling import hello as handshake
from loraplex.serving.dialling.hello import Draining, HandshakeRefused, Identity
from loraplex.serving.dialling.tcp import MAX_UNSENT_BYTES, is_stuck, watch_peer

OnCommand = Callable[[wire.Command, bytes], None]
"""on_command(command, payload): the server's command, and as it came."""


class Link(asyncio.Protocol):
    """One connection to a server. All methods belong to one event loop's thread."""

    def __init__(self, on_command: OnCommand) -> None:
        self._on_command = on_command
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._reader = framing.FrameReader(handshake.MAX_FRAME_BYTES)
        self._messages: deque[bytes] = deque()  # of the handshake
        self._is_open = False
        self._changed = asyncio.Event()
        self._beating: asyncio.TimerHandle | None = None
        self.gone: asyncio.Future[str] = self._loop.create_future()
        """Done when it has ended, with the reason."""

    async def shake_hands(
        self, identity: Identity, token: bytes, read_probe: Callable[[str], bytes], log: Log
    ) -> None:
        """Return when the server has welcomed this engine. Raises HandshakeRefused."""
        challenge = handshake.decode_challenge(await self._message())
        try:
            probe = await asyncio.to_thread(read_probe, challenge.probe)
        except (LoraplexError, OSError) as error:
            log("probe_not_read", reason=str(error))
            probe = b""
        hello = handshake.make_hello(challenge, token, identity, probe)
        self._write(framing.encode_frame(hello))
        handshake.check_answer(await self._message(), hello, token)
        if self._messages or self._reader.num_left:
            raise HandshakeRefused("the server went on before the engine was ready")
        self._reader = framing.FrameReader()
        self._is_open = True

    def begin(self, *greeting: wire.Event) -> None:
        """Send these first, and signs of life from here on."""
        for event in greeting:
            self.send(event)
        self._beat()

    def send(self, event: wire.Event | Draining) -> None:
        self._write(framing.encode_frame(event))

    def send_payload(self, payload: bytes) -> None:
        """Send an event that is encoded already."""
        self._write(framing.frame_payload(payload))

    def end(self, reason: str) -> None:
        if self.gone.done():
            return
        self.gone.set_result(reason)
        self._changed.set()
        if self._beating is not None:
            self._beating.cancel()
        if self._transport is not None:
            self._transport.abort()

    def _write(self, frame: bytes) -> None:
        if self.gone.done() or self._transport is None:
            return
        self._transport.write(frame)
        if is_stuck(self._transport):
            self.end(f"the server leaves more than {MAX_UNSENT_BYTES >> 20} MiB unread")

    def _beat(self) -> None:
        # A step that hangs is noticed beside the engine, whose process ends then: this one shows that the way is open.
        self.send(wire.Heartbeat(0.0, 0.0, unusual=False))
        if not self.gone.done():
            self._beating = self._loop.call_later(wire.HEARTBEAT_INTERVAL_S, self._beat)

    async def _message(self) -> bytes:
        while not self._messages:
            if self.gone.done():
                raise HandshakeRefused(self.gone.result())
            self._changed.clear()
            await self._changed.wait()
        return self._messages.popleft()

    # asyncio.Protocol.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        watch_peer(transport)

    def data_received(self, data: bytes) -> None:
        if self.gone.done():
            return
        try:
            for payload in self._reader.feed(data):
                if self._is_open:
                    self._on_payload(payload)
                else:
                    self._messages.append(payload)
                    self._changed.set()
        except framing.ProtocolError as error:
            self.end(f"the server broke the protocol: {error}")

    def _on_payload(self, payload: bytes) -> None:
        # All of it is checked here: a bad command must not end the engine process.
        command = wire.decode_command(payload)
        if isinstance(command, wire.Shutdown):
            raise framing.ProtocolError("a server does not shut down an engine that dialled in")
        self._on_command(command, payload)

    def eof_received(self) -> None:
        self.end("the server hung up")

    def connection_lost(self, exc: Exception | None) -> None:
        self.end("the server hung up" if exc is None else f"the connection broke: {exc}")
