"""The host that a request names: exactly one, which every proxy before this server reads in the same way.

RFC 9112 (3.2) asks for 400 where a request of HTTP/1.1 has no `Host`, where any has two, and where its value is none.
Of an absolute target the RFC lets the target win over `Host`. Proxies do not agree on that. A request that names two
hosts can pass a check of the one and reach the other, so both must name the same host here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_AUTHORITY = re.compile(
    rb"(?P<host>\[[0-9A-Za-z:.]+\]|(?:[0-9A-Za-z._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*)(?::(?P<port>[0-9]*))?"
)
"""`uri-host [":" port]` of RFC 9110 (7.2). Without a user: RFC 9110 (4.2.4)."""
_ABSOLUTE = re.compile(rb"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<authority>[^/?#]*)")
_DEFAULT_PORTS = {b"http": b"80", b"https": b"443"}


def wrong_host(version: str, target: bytes, headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The fault of the host that a request names, if any. `headers`: their names in lower case."""
    hosts = [value.strip(b" \t") for name, value in headers if name == b"host"]
    if len(hosts) > 1:
        return "The request has more than one Host header. Send exactly one."
    if not hosts and version == "1.1":
        return "The request has no Host header. HTTP/1.1 needs exactly one."
    host = _AUTHORITY.fullmatch(hosts[0]) if hosts else None
    if hosts and host is None:
        return "The Host header is no host with an optional port."
    absolute = _ABSOLUTE.match(target)
    if absolute is None:
        return None
    named = _AUTHORITY.fullmatch(absolute["authority"])
    if named is None:
        return "The request's target names no host with an optional port."
    default = _DEFAULT_PORTS.get(absolute["scheme"].lower(), b"")
    if host is not None and _same_form(named, default) != _same_form(host, default):
        return "The Host header and the request's target name different hosts."
    return None


def _same_form(found: re.Match[bytes], default_port: bytes) -> tuple[bytes, bytes]:
    return found["host"].lower(), (found["port"] or default_port).lstrip(b"0")
