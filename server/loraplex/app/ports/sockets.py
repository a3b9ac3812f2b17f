"""The ports, taken before anything else is done: a start that cannot have them fails at once."""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

from loraplex.app.settings import Settings, SettingsInvalid


@dataclass(frozen=True, slots=True)
class Ports:
    """Bound sockets that do not listen yet; a host name may stand for several addresses. `engine`: of the port that
    engines dial, none where the setting asks for none."""

    data: list[socket.socket]
    admin: list[socket.socket]
    engine: list[socket.socket] = field(default_factory=list)


@contextlib.contextmanager
def open_ports(settings: Settings, *, engines_dial: bool = False) -> Iterator[Ports]:
    """Bind the addresses of both planes, and of the engines' port if there is one; where `engines_dial` there is one,
    any that is free unless the settings name it. Raises SettingsInvalid, which names
    the option at fault."""
    # Linux lets two sockets that do not listen yet bind the same port.
    chosen = [
        (settings.host, settings.port, "--port"),
        (settings.admin_host, settings.admin_port, "--admin-port"),
        (*settings.engine_address, "--engine-port"),
    ]
    for (host, port, option), (other_host, other_port, other) in itertools.combinations(chosen, 2):
        if port and (host, port) == (other_host, other_port):
            raise SettingsInvalid(
                f"{option} and {other} are both {port} on {host}; choose another for one of them."
            )
    with contextlib.ExitStack() as stack:
        yield Ports(
            _bind(stack, settings.host, settings.port, "--host", "--port"),
            _bind(stack, settings.admin_host, settings.admin_port, "--admin-host", "--admin-port"),
            _bind(stack, *settings.engine_address, "--engine-port", "--engine-port")
            if settings.engine_address[1] or engines_dial
            else [],
        )


def url(sockets: list[socket.socket]) -> str:
    """Where the first of these listens, its true port included."""
    return f"http://{address(sockets)}"


def address(sockets: list[socket.socket]) -> str:
    """HOST:PORT or [HOST]:PORT of the first of these."""
    host, port = sockets[0].getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


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
                f"with {' or '.join(dict.fromkeys((port_option, host_option)))}."
            ) from error
        sockets.append(bound)
    if not sockets:
        raise SettingsInvalid(f"{host_option} {host}: no address of it can be used on this machine.")
    return sockets
