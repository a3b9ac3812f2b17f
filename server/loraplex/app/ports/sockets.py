"""The two ports, taken before anything else is done: a start that cannot have them fails at once."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from loraplex.app.settings import Settings, SettingsInvalid


@dataclass(frozen=True, slots=True)
class Ports:
    """Bound sockets that do not listen yet; a host name may stand for several addresses."""

    data: list[socket.socket]
    admin: list[socket.socket]


@contextlib.contextmanager
def open_ports(settings: Settings) -> Iterator[Ports]:
    """Bind both planes' addresses. Raises SettingsInvalid, which names the option at fault."""
    # Linux lets two sockets that do not listen yet bind the same port.
    if settings.port and (settings.host, settings.port) == (settings.admin_host, settings.admin_port):
        raise SettingsInvalid(
            f"--port and --admin-port are both {settings.port} on {settings.host}; choose another for one of them."
        )
    with contextlib.ExitStack() as stack:
        yield Ports(
            _bind(stack, settings.host, settings.port, "--host", "--port"),
            _bind(stack, settings.admin_host, settings.admin_port, "--admin-host", "--admin-port"),
        )


def url(sockets: list[socket.socket]) -> str:
    """Where the first of these listens, its true port included."""
    host, port = sockets[0].getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _bind(
    stack: contextlib.ExitStack, host: str, port: int, host_option: str, port_option: str
) -> list[socket.socket]:
    try:
        addresses = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise SettingsInvalid(f"{host_option} {host}: this address is not known here ({error}).") from error
    sockets: list[socket.socket] = []
    for family, kind, protocol, _, address in dict.fromkeys(addresses):
        try:
            bound = stack.enter_context(socket.socket(family, kind, protocol))
        except OSError:  # a family that the name has and this machine has not
            continue
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            bound.bind(address)
        except OSError as error:
            raise SettingsInvalid(
                f"port {port} on {host} cannot be used ({error.strerror}): stop what listens there, or choose another "
                f"with {port_option} or {host_option}."
            ) from error
        sockets.append(bound)
    if not sockets:
        raise SettingsInvalid(f"{host_option} {host}: no address of it can be used on this machine.")
    return sockets
