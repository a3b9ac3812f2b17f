"""The operator's webhook: where it may be, and how one event is told to it.

The address is checked where it is connected to: a name is resolved once, and the connection goes to an address that
was checked, so that a name which resolves to something else a moment later reaches nothing else. An answer is read up
to its status; redirects are not followed, and no proxy is used.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import socket
import ssl
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from loraplex.lifecycle.releases.webhook_address import AllowedHosts, checked_url

TIMEOUT_S = 5.0
MAX_STATUS_BYTES = 4096
Resolve = Callable[[str, int], Awaitable[list[str]]]


def signature(secret: str, body: bytes) -> str:
    """HMAC-SHA256 over the body, in hex digits. A body that is sent again by others is known by its id."""
    return hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()


async def resolve(host: str, port: int) -> list[str]:
    """The host's addresses. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class Webhook:
    """One address that events are posted to. `tls` is the context of https; by default the system's."""

    def __init__(
        self,
        url: str,
        secret: str,
        allowed: AllowedHosts,
        *,
        timeout_s: float = TIMEOUT_S,
        resolve: Resolve = resolve,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Raises ValueError as `checked_url`."""
        parts = urlsplit(checked_url(url))
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._authority = parts.netloc
        self._secret = secret
        self._allowed = allowed
        self._timeout_s = timeout_s
        self._resolve = resolve
        self._tls = (tls or ssl.create_default_context()) if parts.scheme == "https" else None

    async def send(self, delivery_id: str, event: str, body: bytes) -> str | None:
        """Tell it one event, once. Returns what went wrong; None if it answered with 2xx in time."""
        try:
            async with asyncio.timeout(self._timeout_s):
                address = await self._address()
                if address is None:
                    return f"'{self._host}' has no public address, and --webhook-allow names neither it nor its network"
                status = await self._post(address, self._request(delivery_id, event, body))
        except TimeoutError:
            return f"no answer within {self._timeout_s:g} s"
        except (OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            return (str(error) or type(error).__name__)[:200]
        return None if 200 <= status < 300 else f"the answer was {status}"

    async def _address(self) -> str | None:
        found = await self._resolve(self._host, self._port)
        return next((address for address in found if self._allowed.allow(self._host, address)), None)

    def _request(self, delivery_id: str, event: str, body: bytes) -> bytes:
        lines = (
            f"POST {self._target} HTTP/1.1",
            f"host: {self._authority}",
            "user-agent: loraplex",
            "content-type: application/json",
            f"content-length: {len(body)}",
            "connection: close",
            f"x-loraplex-event: {event}",
            f"x-loraplex-delivery: {delivery_id}",
            f"x-loraplex-signature: {signature(self._secret, body)}",
            "",
            "",
        )
        return "\r\n".join(lines).encode() + body

    async def _post(self, address: str, request: bytes) -> int:
        reader, writer = await asyncio.open_connection(
            address,
            self._port,
            ssl=self._tls,
            server_hostname=self._host if self._tls is not None else None,
            limit=MAX_STATUS_BYTES,
        )
        try:
            writer.write(request)
            line = await reader.readuntil(b"\n")
        finally:
            writer.transport.abort()  # what else comes is not read
        version, _, rest = line.partition(b" ")
        code = rest[:3]
        if not version.startswith(b"HTTP/1.") or not code.isdigit():
            raise ValueError("the answer is not HTTP")
        return int(code)
