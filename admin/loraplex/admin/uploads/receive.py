"""An upload's way from the socket into its staging folder: streamed, counted, off the event loop.

At no time is more of it in memory than one write buffer. Whatever ends it early (a refusal, a client that hangs up,
a cancelled request) removes the staging folder; a killed process leaves staging behind, which the store sweeps at its
next start.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import BinaryIO

import anyio
import anyio.to_thread
from starlette.requests import Request

from loraplex.adapters.store.artifact_store import Staging
from loraplex.adapters.store.fault_points import FaultPoint
from loraplex.adapters.store.files import create_file, disk_failures_named, place_in, write_all
from loraplex.adapters.store.interface import Store
from loraplex.admin.problem import Problem
from loraplex.admin.uploads.multipart import Part, UploadParser, too_large
from loraplex.admin.uploads.push_form import MAX_AGREEMENT_BYTES, PushForm
from loraplex.admin.uploads.serving_field import read_serving
from loraplex.control.agreement import TrainerNumbers
from loraplex.control.catalog.staged import StagedUpload
from loraplex.control.types import AS_THE_BASE, Serving
from loraplex.http.body import SILENCE_S, chunks, declared_length, refuse_encoding

BUFFER_BYTES = 1 << 20
PUSH_TYPE = "application/octet-stream"
"""The content type of a body that is the tensors alone."""
FORM_TYPE = "multipart/form-data"
_FRAMING_BYTES = 64 << 10
"""Bytes that a body may have beside its files: boundaries, part headers, the field `serving`, and an epilogue, which
MIME allows behind the last boundary."""


@dataclass(frozen=True, slots=True)
class Received:
    """An upload: the staging folder with its files, which of them came, how the version is to be served, and what its
    trainer computed."""

    staging: Staging
    parts: frozenset[Part]
    serving: Serving
    numbers: TrainerNumbers | None = None


@contextlib.asynccontextmanager
async def receive_upload(
    request: Request,
    store: Store,
    *,
    max_bytes: int,
    threads: anyio.CapacityLimiter,
    staged: StagedUpload,
    silence_s: float = SILENCE_S,
) -> AsyncIterator[Received]:
    """The request's body. Its staging folder is discarded on the way out unless it was committed.

    Raises Problem (400, 413, 415), AdapterRefused for a part of another format and where the tenant's quota does not
    allow it, BodyEncoded, BodyTooSlow, ClientGone, StoreFull (507), StoreFailed (503), OSError. Nothing is written
    before the headers have been looked at.
    """
    refuse_encoding(request.scope)
    declared = declared_length(request.scope) or 0
    if declared > max_bytes + _FRAMING_BYTES:
        raise too_large(max_bytes)
    parser = UploadParser(request.headers.get("content-type", ""), max_bytes=max_bytes)
    staged.expect(declared - _FRAMING_BYTES)
    async with _staged_folder(store, threads) as staging:
        writer = _Writer(staging, threads)
        try:
            framing = size = 0
            async for chunk in chunks(request.receive, silence_s=silence_s):
                pieces = parser.feed(chunk)
                framing += len(chunk) - sum(len(data) for _, data in pieces)
                if framing > _FRAMING_BYTES:
                    raise Problem(
                        "invalid_multipart",
                        f"The form has more than {_FRAMING_BYTES} bytes beside its files: boundaries, headers of "
                        "parts, and text before the first boundary or behind the last. Send the parts alone.",
                    )
                size += sum(len(data) for _, data in pieces)
                # An archive is a little larger than what the quota is for.
                staged.expect(size - _FRAMING_BYTES if Part.ARCHIVE in parser.seen else size)
                await writer.write(pieces)
            parts = parser.finish()
            await writer.flush(parts)
        finally:
            await writer.close()
        yield Received(staging, parts, read_serving(bytes(parser.serving)))


@contextlib.asynccontextmanager
async def receive_tensors(
    request: Request,
    store: Store,
    config: bytes,
    read_numbers: Callable[[bytes], TrainerNumbers],
    *,
    max_bytes: int,
    threads: anyio.CapacityLimiter,
    staged: StagedUpload,
    silence_s: float = SILENCE_S,
) -> AsyncIterator[Received]:
    """A body that is the tensors alone, or a form of them and of what `read_numbers` reads, beside the `config` that
    the tensors are of. Raises as `receive_upload`, and what `read_numbers` raises."""
    refuse_encoding(request.scope)
    form = PushForm(request.headers.get("content-type", "")) if is_form(request) else None
    if form is None and _media_type(request) != PUSH_TYPE:
        raise Problem(
            "unsupported_media_type",
            f"Send the bytes of {Part.TENSORS.value} as {PUSH_TYPE}, or as a part of {FORM_TYPE}.",
            param="Content-Type",
        )
    beside = 0 if form is None else MAX_AGREEMENT_BYTES + _FRAMING_BYTES
    declared = declared_length(request.scope) or 0
    if declared + len(config) > max_bytes + beside:
        raise too_large(max_bytes)
    staged.expect(max(0, declared - beside) + len(config))
    async with _staged_folder(store, threads) as staging:
        writer = _Writer(staging, threads)
        try:
            size = body = len(config)
            await writer.write([(Part.CONFIG, config)])
            async for chunk in chunks(request.receive, silence_s=silence_s):
                data = chunk if form is None else form.feed(chunk)
                size, body = size + len(data), body + len(chunk)
                if size > max_bytes or body > max_bytes + beside:
                    raise too_large(max_bytes)
                staged.expect(size)
                await writer.write([(Part.TENSORS, data)])
            numbers = None
            if form is not None:
                form.finish()
                numbers = read_numbers(bytes(form.agreement))
            parts = frozenset({Part.CONFIG, Part.TENSORS})
            await writer.flush(parts)
        finally:
            await writer.close()
        yield Received(staging, parts, AS_THE_BASE, numbers)


@contextlib.asynccontextmanager
async def _staged_folder(store: Store, threads: anyio.CapacityLimiter) -> AsyncIterator[Staging]:
    staging = await anyio.to_thread.run_sync(store.begin_staging, limiter=threads)
    try:
        yield staging
    finally:
        # A thread that has begun cannot be called back: a cancelled request waits for it, then for this.
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(staging.discard)


def is_form(request: Request) -> bool:
    """Whether the body is a multipart form."""
    return _media_type(request) == FORM_TYPE


def _media_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


class _Writer:
    """Collects pieces and writes them in a worker thread, `BUFFER_BYTES` at a time."""

    def __init__(self, staging: Staging, threads: anyio.CapacityLimiter) -> None:
        self._directory = staging.directory
        self._names = {part: part.value for part in Part} | {Part.ARCHIVE: staging.archive_path.name}
        self._fault = staging.fault
        self._threads = threads
        self._files: dict[Part, BinaryIO] = {}
        self._pending: list[tuple[Part, bytearray]] = []
        self._size = 0

    async def write(self, pieces: list[tuple[Part, bytes]]) -> None:
        for part, data in pieces:
            # Joined, so that a body that comes byte by byte costs no more memory than one that does not.
            if self._pending and self._pending[-1][0] is part:
                self._pending[-1][1].extend(data)
            else:
                self._pending.append((part, bytearray(data)))
            self._size += len(data)
        if self._size >= BUFFER_BYTES:
            await self._flush(frozenset())

    async def flush(self, parts: frozenset[Part]) -> None:
        """Write the rest. Each of `parts` has a file afterwards, even if it was empty."""
        await self._flush(parts)

    async def _flush(self, parts: frozenset[Part]) -> None:
        pending, self._pending, self._size = self._pending, [], 0
        await anyio.to_thread.run_sync(self._write_all, pending, parts, limiter=self._threads)

    def _write_all(self, pending: list[tuple[Part, bytearray]], parts: frozenset[Part]) -> None:
        with disk_failures_named():
            for part, data in pending:
                file = self._file(part)
                self._fault(FaultPoint.RECEIVE_WRITE, self._directory / self._names[part])
                write_all(file, memoryview(data))
            for part in parts:
                self._file(part)

    def _file(self, part: Part) -> BinaryIO:
        if part not in self._files:
            self._fault(FaultPoint.RECEIVE_CREATE, self._directory / self._names[part])
            self._files[part] = create_file(place_in(self._directory, self._names[part]))
        return self._files[part]

    async def close(self) -> None:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._close)

    def _close(self) -> None:
        for file in self._files.values():
            file.close()
