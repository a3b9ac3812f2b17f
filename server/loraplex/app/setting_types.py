"""Types of settings: what texts are read as, and what is refused of them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any
from urllib.parse import unquote, urlsplit

from pydantic import BeforeValidator, Field

from loraplex.adapters.sources.urls import AllowedSources
from loraplex.control.types import ADAPTER_LIMITS, BUDGET_PERIODS, Limits
from loraplex.http.text import did_you_mean
from loraplex.lifecycle.releases.webhook_address import AllowedHosts

ANY_ADDRESS = ("", "0.0.0.0", "::")  # noqa: S104 - only compared
"""Hosts that stand for each address of the machine, and so name none."""
SERVER_LIMITS = tuple(each.name for each in fields(Limits) if each.name not in ADAPTER_LIMITS)
"""Names that `--server-limit NAME=VALUE` takes."""
_UNITS = {
    "": 1,
    "b": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "k": 1 << 10,
    "m": 1 << 20,
    "g": 1 << 30,
}


def parse_size(value: object) -> object:
    """Bytes from "2GiB", "512 MiB", "1.5g" or a plain number; what is no text goes on to pydantic's own check."""
    if not isinstance(value, str):
        return value
    if match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value):
        unit = _UNITS.get(match.group(2).lower())
        if unit is None:
            raise ValueError(f"'{match.group(2)}' is no unit of size; use KiB, MiB or GiB")
        return int(float(match.group(1)) * unit)
    raise ValueError("must be bytes, such as 1048576, 512MiB or 2GiB")


def parse_size_or_auto(value: object) -> object:
    """`parse_size`, and "auto" as it is."""
    return value if value == "auto" else parse_size(value)


def comma_list(value: object) -> object:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def otlp_url(value: str) -> str:
    return _plain_url(value, "http://collector:4318", "; use OTEL_EXPORTER_OTLP_HEADERS for a secret")


def data_plane_url(value: str) -> str:
    """The URL without a slash at its end."""
    return _plain_url(value, "https://llm.example.com", "").rstrip("/")


def _plain_url(value: str, example: str, advice: str) -> str:
    """An http(s) URL of a host, perhaps with a port and a path, or an empty text. Raises ValueError."""
    if not value:
        return value
    try:
        url = urlsplit(value)
        port_fits = url.port is None or url.port > 0
    except ValueError:
        raise ValueError(f"must be a URL such as {example}") from None
    if url.scheme not in ("http", "https") or not url.hostname or not port_fits or not value.isprintable():
        raise ValueError(f"must be a URL such as {example}")
    if "@" in url.netloc or url.query or url.fragment:
        raise ValueError(f"must have no user, password, query or fragment{advice}")
    return value


def header_pairs(value: str) -> list[tuple[str, str]]:
    """Raises ValueError, without the values: they are secrets."""
    pairs = []
    for number, part in enumerate(filter(None, map(str.strip, value.split(","))), 1):
        name, equals, text = part.partition("=")
        name, text = name.strip(), unquote(text.strip())
        if not equals or not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", name):
            raise ValueError(f"header {number} is not NAME=VALUE")
        if not (text.isascii() and text.isprintable() and text == text.strip()):
            raise ValueError(f"the value of header {number} has characters that no header can have")
        pairs.append((name, text))
    return pairs


def port_text(value: object) -> object:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def checked_engine_port(value: str) -> str:
    split_engine_port(value)
    return value


def split_engine_port(value: str) -> tuple[str, int]:
    """Host and port of `PORT`, `HOST:PORT` or `[HOST]:PORT`. Raises ValueError."""
    host, _, port = value.rpartition(":")
    if not (port.isascii() and port.isdecimal() and int(port) <= 65535):
        raise ValueError("must be PORT or HOST:PORT, such as 8002 or 10.0.0.5:8002, and a port at most 65535")
    return host.removeprefix("[").removesuffix("]") or "127.0.0.1", int(port)


def limit_list(value: object) -> object:
    """NAME=VALUE of a text, of several, or of a file's table."""
    if isinstance(value, dict):
        return [f"{name}={given}" for name, given in value.items()]
    if isinstance(value, list | tuple) and all(isinstance(part, str) for part in value):
        return comma_list(",".join(value))
    return comma_list(value)


def checked_server_limits(value: list[str] | str) -> list[str] | str:
    server_limits(value)
    return value


def server_limits(given: Iterable[str]) -> Limits:
    """The limits of all tenants together, from NAME=VALUE. Raises ValueError."""
    found: dict[str, Any] = {}
    for text in given:
        name, equals, value = (part.strip() for part in text.partition("="))
        name = name.replace("-", "_")
        if name not in SERVER_LIMITS:
            raise ValueError(
                f"there is no limit '{name}'{did_you_mean(name, SERVER_LIMITS)}; NAME is one of "
                f"{', '.join(SERVER_LIMITS)}"
            )
        if not equals or not value:
            raise ValueError(f"'{name}' has no value: say {name}=VALUE")
        found[name] = _period(value) if name == "budget_period" else _count(name, value)
    if found.get("token_budget") is None:
        return Limits(**found | {"budget_period": None})
    return Limits(**{"budget_period": "month"} | found)


def _period(value: str) -> str:
    if value not in BUDGET_PERIODS:
        raise ValueError(f"budget_period must be one of {', '.join(BUDGET_PERIODS)}")
    return value


def _count(name: str, value: str) -> int | None:
    """0 and none: no limit."""
    if value == "none":
        return None
    if not (value.isascii() and value.isdecimal() and int(value) <= 1 << 53):
        raise ValueError(f"{name} must be a whole number up to 2^53 (0: no limit)")
    return int(value) or None


@dataclass(frozen=True, slots=True)
class KVDisk:
    """Where prefixes are kept on a disk, the most bytes of an engine there, and the file of the secret that encrypts
    them."""

    directory: str
    num_bytes: int = 16 << 30
    key_file: str | None = None


def checked_kv_disk(value: str) -> str:
    if value:
        kv_disk(value)
    return value


def kv_disk(value: str) -> KVDisk:
    """Read `DIR[,bytes=N][,key-file=PATH]`. Raises ValueError."""
    directory, *options = (part.strip() for part in value.split(","))
    if not directory or "=" in directory:
        raise ValueError("must begin with a directory, such as /var/cache/loraplex,bytes=50GiB")
    found = KVDisk(directory)
    for option in options:
        name, _, text = option.partition("=")
        if name == "bytes" and isinstance(num_bytes := parse_size(text), int) and num_bytes:
            found = replace(found, num_bytes=num_bytes)
        elif name == "key-file" and text:
            found = replace(found, key_file=text)
        else:
            raise ValueError(f"'{option}' is not bytes=SIZE or key-file=PATH")
    return found


def checked_sources(value: list[str] | str) -> list[str] | str:
    AllowedSources(value)
    return value


def checked_hosts(value: list[str] | str) -> list[str] | str:
    AllowedHosts(value)
    return value


Bytes = Annotated[int, BeforeValidator(parse_size)]
Port = Annotated[int, Field(ge=0, le=65535)]
