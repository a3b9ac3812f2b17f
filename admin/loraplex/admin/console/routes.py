"""The console's page and files. They are read once, by fixed names: nothing of a request's path reaches the disk.

The page names its files below a folder that is the digest of them all. So a page never runs modules of another version:
after an upgrade a page that is open finds the folder gone, and says so.
"""

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
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Vary": "Accept-Encoding",
}
ASK_EACH_TIME = "no-cache"
KEEP = "public, max-age=31536000, immutable"
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

    def answer(self, request: Request, caching: str) -> Response:
        """The file, with `caching` as its Cache-Control; compressed where the client reads gzip; 304 where the client
        has it."""
        zipped = "gzip" in request.headers.get("accept-encoding", "")
        etag = f'"{self.digest}{"-gzip" if zipped else ""}"'
        headers = {**HEADERS, "Cache-Control": caching, "ETag": etag}
        if etag in (known.strip() for known in request.headers.get("if-none-match", "").split(",")):
            return Response(status_code=304, headers=headers)
        if zipped:
            headers["Content-Encoding"] = "gzip"
        return Response(
            self.compressed if zipped else self.plain, headers=headers, media_type=self.media_type
        )


@cache
def static_files() -> Mapping[str, StaticFile]:
    """The console's files by their paths below /console/, which begin with the digest of all; and the page, as PAGE."""
    plain = {
        path.relative_to(STATIC).as_posix(): path.read_bytes()
        for path in sorted(STATIC.rglob("*"))
        if path.suffix in _TYPES
    }
    folder = sha256(b"".join(sha256(content).digest() for content in plain.values())).hexdigest()[:16]
    page = plain.pop(PAGE).replace(b'="console/', f'="console/{folder}/'.encode())
    return {PAGE: _made(PAGE, page)} | {
        f"{folder}/{name}": _made(name, content) for name, content in plain.items()
    }


def console_routes(page: str) -> list[BaseRoute]:
    """The page at the path `page`, and its files below /console/. They need no secret: what the page shows comes from
    the API."""
    files = static_files()

    async def show_page(request: Request) -> Response:
        return files[PAGE].answer(request, ASK_EACH_TIME)

    async def show_file(request: Request) -> Response:
        name = request.path_params["file"]
        found = files.get(name)
        if found is None or name == PAGE:
            raise PathUnknown(request.method, request.url.path)
        return found.answer(request, KEEP)

    return [
        exact(Route(page, show_page, methods=["GET"])),
        exact(Route("/console/{file:path}", show_file, methods=["GET"])),
    ]


def _made(name: str, plain: bytes) -> StaticFile:
    media_type = _TYPES[Path(name).suffix]
    return StaticFile(media_type, plain, gzip.compress(plain, mtime=0), sha256(plain).hexdigest()[:32])
