"""Faults of an upload, collected, so that one refusal names all of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from loraplex.adapters.errors import AdapterRefused, RefusalCode

_MAX_TOLD = 16
_MAX_SHOWN = 80


class Faults:
    """The reasons against an upload in the order in which they were found, the first few of very many."""

    def __init__(self, found: Iterable[AdapterRefused] = ()) -> None:
        self._found: list[AdapterRefused] = []
        for fault in found:
            self._keep(fault)

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, code: RefusalCode, message: str, *, feature: str | None = None) -> None:
        self._keep(AdapterRefused(code, message, feature=feature))

    def extend(self, refusal: AdapterRefused) -> None:
        """Add all that a refusal names."""
        for fault in refusal.faults:
            self._keep(fault)

    def add_kind(self, refusal: AdapterRefused) -> None:
        """Add a refusal unless one with its code and feature is there."""
        if all((fault.code, fault.feature) != (refusal.code, refusal.feature) for fault in self._found):
            self._keep(refusal)

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Catch the refusal of what runs inside, and add it."""
        try:
            yield
        except AdapterRefused as refusal:
            self.extend(refusal)

    def raise_any(self) -> None:
        """Raise one AdapterRefused with the code and the feature of the first fault and the messages of all."""
        if not self._found:
            return
        first: AdapterRefused = self._found[0]
        if len(self._found) == 1:
            raise first
        told = [f"({number}) {fault.message}" for number, fault in enumerate(self._found[:_MAX_TOLD], 1)]
        raise AdapterRefused(
            first.code,
            "; ".join(told) + ("; and others" if len(self._found) > _MAX_TOLD else ""),
            feature=first.feature,
            faults=tuple(self._found),
        )

    def _keep(self, fault: AdapterRefused) -> None:
        if len(self._found) <= _MAX_TOLD and all(fault.message != other.message for other in self._found):
            self._found.append(fault)


def as_json(value: Any) -> str:
    """A value of a config as its file has it, made safe for messages: ASCII, and cut."""
    try:
        text = json.dumps(value)
    except RecursionError:
        return "a value of very many levels"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def invalid(what: str) -> NoReturn:
    """Raises AdapterRefused("config_invalid")."""
    raise AdapterRefused("config_invalid", f"adapter_config.json: {what}")


def unsupported(feature: str, what: str) -> NoReturn:
    """Raises AdapterRefused("unsupported_feature")."""
    raise AdapterRefused("unsupported_feature", f"adapter_config.json: {what}", feature=feature)
