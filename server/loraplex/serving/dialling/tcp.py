"""Rules for both ends of an engine's connection: a dead peer is noticed, and an unread buffer has a bound."""

from __future__ import annotations

import asyncio
import contextlib
import socket

MAX_UNSENT_BYTES = 64 << 20
"""Two of the largest frames. Of an engine's requests no more wait to be sent; a server that leaves more unread is
disconnected."""
UNREAD_S = 10.0
"""Time after which an engine that reads nothing of what waits for it is disconnected."""
PEER_TIMEOUT_S = 10
"""Time after which a peer whose machine answers nothing is gone."""
_PROBES = 3


def watch_peer(transport: asyncio.BaseTransport) -> None:
    """Have the kernel end the connection when the peer's machine is gone, and send small frames at once."""
    wire = transport.get_extra_info("socket")
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)]
    interval = max(1, PEER_TIMEOUT_S // (_PROBES + 1))
    timed = {  # not every platform has all of them
        "TCP_KEEPIDLE": interval,
        "TCP_KEEPINTVL": interval,
        "TCP_KEEPCNT": _PROBES,
        "TCP_USER_TIMEOUT": PEER_TIMEOUT_S * 1000,
    }
    for name, value in timed.items():
        if (option := getattr(socket, name, None)) is not None:
            options.append((socket.IPPROTO_TCP, option, value))
    for level, option, value in options:
        with contextlib.suppress(OSError):  # the peer has gone already
            wire.setsockopt(level, option, value)


def is_stuck(transport: asyncio.WriteTransport) -> bool:
    """Whether the peer reads too little of what it is sent."""
    return transport.get_write_buffer_size() > MAX_UNSENT_BYTES
