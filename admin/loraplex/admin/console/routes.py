"""The console's page and files. They are read once, by fixed names: nothing of a request's path reaches the disk."""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from loraplex.http.errors import PathUnknown
from loraplex.http.routing import exact

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    # A browser asks each time whether its copy is current: a file's name has no version in it.
    "Cache-Control": "no-cache",
    "Vary": "Accept-Encoding",
}
PAGE = "index.html"
STATIC = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".json": "application/json",
    ".txt": "text/plain; charset=utf-8",
}


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file's bytes, as they are and compressed; `digest` is the beginning of their SHA-256."""

    media_type: str
    plain: bytes
    compressed: bytes
    digest: str

    def answer(self, request: Request) -> Response:
        """The file; compressed where the client reads gzip; 304 where the client has it."""
        zipped = "gzip" in request.headers.get("accept-encoding", "")
        etag = f'"{self.digest}{"-gzip" if zipped else ""}"'
        headers = {**HEADERS, "ETag": etag}
        if etag in (known.strip() for known in request.headers.get("if-none-match", "").split(",")):
            return Response(status_code=304, headers=headers)
        if zipped:
            headers["Content-Encoding"] = "gzip"
        return Response(
            self.compressed if zipped else self.plain, headers=headers, media_type=self.media_type
        )


@cache
def static_files() -> Mapping[str, StaticFile]:
    """The console's files by their names below `static`."""
    return {
        path.relative_to(STATIC).as_posix(): _read(path)
        for path in sorted(STATIC.rglob("*"))
        if path.suffix in _TYPES
    }


def console_routes(page: str) -> list[BaseRoute]:
    """The page at the path `page`, and its files below /console/. They need no secret: what the page shows comes from
    the API."""
    files = static_files()

    async def show_page(request: Request) -> Response:
        return files[PAGE].answer(request)

    async def show_file(request: Request) -> Response:
        found = files.get(request.path_params["file"])
        if found is None:
            raise PathUnknown(request.method, request.url.path)
        return found.answer(request)

    return [
        exact(Route(page, show_page, methods=["GET"])),
        exact(Route("/console/{file:path}", show_file, methods=["GET"])),
    ]


def _read(path: Path) -> StaticFile:
    plain = path.read_bytes()
    return StaticFile(
        _TYPES[path.suffix], plain, gzip.compress(plain, mtime=0), sha256(plain).hexdigest()[:32]
    )
