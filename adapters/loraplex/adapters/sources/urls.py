"""URLs of adapters, and the prefixes that they have to lie below.

A URL is compared part by part and never decoded: what could be read in two ways (percent-encoding, queries, users,
"..") is refused before anything is looked at.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, Self, get_args

from loraplex.adapters.sources.errors import SourceNotAllowed
from loraplex.adapters.store.files import shown

Scheme = Literal["file", "s3", "hf"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
TENANT_PART = "{tenant}"
"""A part of a prefix that stands for the id of the tenant that imports."""
MAX_URL_CHARS = 2048
_AMBIGUOUS = frozenset("%?#\\*")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class Source:
    """A place that may be read. `root` is the folder, the bucket's or the hub's part that the operator allowed, and
    `parts` leads from there to the adapter; of a hub, `revision` is a commit."""

    scheme: Scheme
    authority: str
    root: tuple[str, ...]
    parts: tuple[str, ...]
    revision: str = ""
    num_trusted: int = 0
    """The number of first parts of a folder's `root` that only the operator can replace, the tenant's own folder
    included."""

    @property
    def url(self) -> str:
        """One spelling for each place, for the audit log."""
        path = "/".join((*self.root, *self.parts))
        at = f"@{self.revision}" if self.revision else ""
        return f"{self.scheme}://{self.authority}/{path}{at}"


@dataclass(frozen=True, slots=True)
class _Place:
    """A URL in its parts. `authority` is the bucket, or the hub's organisation."""

    scheme: Scheme
    authority: str
    parts: tuple[str, ...]
    revision: str = ""

    @classmethod
    def parse(cls, text: str, *, extra: frozenset[str] = frozenset()) -> Self:
        """`extra` are parts that are taken as they are. Raises ValueError, which says what is wrong."""
        if len(text) > MAX_URL_CHARS or not text.isprintable():
            raise ValueError(f"a URL has at most {MAX_URL_CHARS} printable characters")
        scheme, separator, rest = text.partition("://")
        if not separator or scheme not in SCHEMES:
            raise ValueError("a URL begins with file:///, s3:// or hf://")
        if _AMBIGUOUS & set(rest):
            raise ValueError("a path is written as it is, without percent-encoding, query or fragment")
        authority, slash, path = rest.partition("/")
        parts = tuple(path.rstrip("/").split("/")) if path.rstrip("/") else ()
        check_parts(parts)
        named = tuple(part for part in parts if part not in extra)
        if scheme == "file":
            if authority or not slash:
                raise ValueError("a folder is file:///DIR, without a host")
            return cls("file", "", parts)
        if scheme == "s3":
            if not _BUCKET.fullmatch(authority):
                raise ValueError("a bucket is s3://BUCKET/PREFIX, without a user, a password or a port")
            return cls("s3", authority, parts)
        if not _HUB_NAME.fullmatch(authority) or len(parts) > 1:
            raise ValueError("a hub's repository is hf://ORG/NAME@REVISION")
        name, at, revision = parts[0].partition("@") if named else ("", "", "")
        if named and not _HUB_NAME.fullmatch(name):
            raise ValueError("a hub's repository is hf://ORG/NAME@REVISION")
        if at and not _COMMIT.fullmatch(revision):
            raise ValueError("a hub's revision is a commit: 40 hex digits")
        return cls("hf", authority, (name,) if named else parts, revision)


class AllowedSources:
    """The prefixes of --adapter-sources: without any, every source is refused."""

    def __init__(self, prefixes: Iterable[str] = ()) -> None:
        """Raises ValueError for what is no prefix."""
        self._prefixes = tuple(map(_parse_prefix, prefixes))

    def allow(self, url: str, tenant_id: str) -> Source:
        """The source that this tenant names. Raises SourceNotAllowed."""
        try:
            place = _Place.parse(url)
        except ValueError as error:
            raise SourceNotAllowed(f"The source {shown(url)} cannot be read: {error}.") from None
        if place.scheme == "hf" and not (place.parts and place.revision):
            raise SourceNotAllowed("A hub's repository is named with its commit: hf://ORG/NAME@REVISION.")
        return self._below(place, url, tenant_id)

    def allow_path(self, path: str, tenant_id: str) -> Source:
        """The source as `allow` gives it, for a plain path of the server's file system or a URL. Raises
        SourceNotAllowed."""
        if "://" in path:
            return self.allow(path, tenant_id)
        if not path.startswith("/") or len(path) > MAX_URL_CHARS or not path.isprintable():
            raise SourceNotAllowed(
                f"The path {shown(path)} cannot be read: it has to be an absolute path of the server's file system."
            )
        parts = tuple(path.strip("/").split("/"))
        try:
            check_parts(parts)
        except ValueError as error:
            raise SourceNotAllowed(f"The path {shown(path)} cannot be read: {error}.") from None
        return self._below(_Place("file", "", parts), path, tenant_id)

    def _below(self, place: _Place, given: str, tenant_id: str) -> Source:
        for prefix in self._prefixes:
            root = tuple(tenant_id if part == TENANT_PART else part for part in prefix.parts)
            if (prefix.scheme, prefix.authority, root) == (
                place.scheme,
                place.authority,
                place.parts[: len(root)],
            ):
                trusted = prefix.parts.index(TENANT_PART) + 1 if TENANT_PART in prefix.parts else len(root)
                below = place.parts[len(root) :]
                return Source(place.scheme, place.authority, root, below, place.revision, trusted)
        raise SourceNotAllowed(
            f"The source {shown(given)} lies below no prefix that this server's operator allowed (--adapter-sources)."
        )


def check_parts(parts: Iterable[str]) -> None:
    """Raises ValueError for a path that has more than one reading."""
    for part in parts:
        if part in ("", ".", ".."):
            raise ValueError("a path has no empty parts, and neither '.' nor '..'")


def _parse_prefix(text: str) -> _Place:
    place = _Place.parse(text, extra=frozenset({TENANT_PART}))
    if place.scheme == "file" and not place.parts:
        raise ValueError("file:/// alone would allow every file of this machine; name a folder")
    if place.revision:
        raise ValueError("a prefix has no revision")
    for part in place.parts:
        if part != TENANT_PART and ("{" in part or "}" in part):
            raise ValueError(f"the only name in braces is {TENANT_PART}, as a whole part of the path")
    return replace(place)
