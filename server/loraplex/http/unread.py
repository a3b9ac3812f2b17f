"""How much of what was sent to a client it has not taken yet."""

from __future__ import annotations

import asyncio
import fcntl
import sys
import termios


def unread_bytes(transport: asyncio.WriteTransport) -> int:
    """Bytes in the transport's buffer and in the kernel's send queue, which may be megabytes."""
    return transport.get_write_buffer_size() + _unacknowledged(transport)


def _unacknowledged(transport: asyncio.WriteTransport) -> int:
    """SIOCOUTQ of tcp(7); 0 where the system does not tell."""
    connection = transport.get_extra_info("socket")
    try:
        answer = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, b"\0\0\0\0")
    except (AttributeError, OSError):
        return 0
    return int.from_bytes(answer, sys.byteorder)
