"""Addresses of the operator's webhook: public ones, and those that the operator allowed."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import urlsplit

_UNICAST = ip_network("2000::/3")
"""All that is routed of IPv6. Addresses that hold an IPv4 address lie outside of it, but those of 6to4."""


class AllowedHosts:
    """The hosts and networks of --webhook-allow. Raises ValueError for what is neither."""

    def __init__(self, entries: Iterable[str] = ()) -> None:
        self._networks: list[IPv4Network | IPv6Network] = []
        self._hosts: set[str] = set()
        for entry in entries:
            if "/" in entry or ":" in entry or entry.replace(".", "").isdigit():
                try:
                    self._networks.append(ip_network(entry))
                except ValueError as error:
                    raise ValueError(f"'{entry[:80]}' is no network: {error}") from None
            elif not entry.isascii() or not all(
                part.replace("-", "a").isalnum() for part in entry.split(".")
            ):
                raise ValueError(f"'{entry[:80]}' is neither a host such as hooks.internal nor a network")
            else:
                self._hosts.add(entry.lower())

    def allow(self, host: str, address: str) -> bool:
        """Whether this address of the host may be connected to: it is public, or the operator allowed it."""
        found = ip_address(address)
        if host.lower() in self._hosts or any(found in network for network in self._networks):
            return True
        return is_public(found)


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Whether the address is one host of the public internet."""
    if isinstance(address, IPv6Address):
        inner = address.sixtofour
        return (
            address.scope_id is None
            and address in _UNICAST
            and address.is_global
            and (inner is None or is_public(inner))
        )
    return address.is_global and not address.is_multicast


def checked_url(value: str) -> str:
    """Raises ValueError for what is no address of a webhook. It may hold a secret, and is not in the message."""
    message = "must be a URL such as https://hooks.example.com/loraplex"
    if not value:
        return value
    try:
        url = urlsplit(value)
        fits = url.port is None or url.port > 0
    except ValueError:
        raise ValueError(message) from None
    if url.scheme not in ("http", "https") or not url.hostname or not fits or len(value) > 2048:
        raise ValueError(message)
    if not value.isascii() or not value.isprintable() or " " in value:
        raise ValueError(f"{message}, in ASCII and without blanks")
    if "@" in url.netloc or url.fragment:
        raise ValueError("must have no user, password or fragment")
    return value
