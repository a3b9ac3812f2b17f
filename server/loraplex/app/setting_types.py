"""Types of settings: what texts are read as, and what is refused of them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import fields
from typing import Annotated, Any, get_args
from urllib.parse import unquote, urlsplit

from pydantic import BeforeValidator, Field

from loraplex.adapters.sources.urls import AllowedSources
from loraplex.control.types import ADAPTER_LIMITS, BudgetPeriod, Limits
from loraplex.http.text import did_you_mean
from loraplex.lifecycle.releases.webhook_address import AllowedHosts

ANY_ADDRESS = ("", "0.0.0.0", "::")  # noqa: S104 - only compared
"""Hosts that stand for each address of the machine, and so name none."""
SERVER_LIMITS = tuple(field.name for field in fields(Limits) if field.name not in ADAPTER_LIMITS)
"""Names that `--server-limit NAME=VALUE` takes."""
MAX_COUNT = 1 << 53
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


def comma_list(value: object) -> object:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def otlp_url(value: str) -> str:
    return _plain_url(value, "http://collector:4318", "; use --otlp-headers for a secret")


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


def checked_headers(value: str) -> str:
    header_pairs(value)
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


def checked_sources(value: list[str] | str) -> list[str] | str:
    AllowedSources(value)
    return value


def checked_hosts(value: list[str] | str) -> list[str] | str:
    AllowedHosts(value)
    return value


def checked_server_limits(value: list[str] | str) -> list[str] | str:
    server_limits(value)
    return value


def server_limits(given: Iterable[str]) -> Limits:
    """The limits that texts as "max_concurrency=64" stand for. A token budget without a period is one of each month.
    Raises ValueError."""
    found: dict[str, Any] = {}
    for text in given:
        name, equals, value = (part.strip() for part in text.partition("="))
        name = name.replace("-", "_")
        if name not in SERVER_LIMITS:
            listed = ", ".join(SERVER_LIMITS)
            raise ValueError(
                f"has no limit '{name}'{did_you_mean(name, SERVER_LIMITS)}; NAME is one of {listed}"
            )
        if not equals:
            raise ValueError(f"'{name}' has no value: say {name}=VALUE")
        if name == "budget_period":
            if value not in get_args(BudgetPeriod):
                raise ValueError(f"'{name}' must be one of {', '.join(get_args(BudgetPeriod))}")
            found[name] = value
        elif not (value.isascii() and value.isdecimal() and len(value) <= 16 and int(value) <= MAX_COUNT):
            raise ValueError(f"'{name}' must be a whole number of at most {MAX_COUNT}")
        else:
            found[name] = int(value) or None
    found["budget_period"] = found.get("budget_period", "month") if found.get("token_budget") else None
    return Limits(**found)


Bytes = Annotated[int, BeforeValidator(parse_size)]
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Port = Annotated[int, Field(ge=0, le=65535)]
