"""Reading an adapter from a bucket, by S3's protocol. Endpoint and credentials are in the `AWS_*` variables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from loraplex.adapters.sources.errors import SourceNotFound, SourceUnavailable
from loraplex.adapters.sources.remote import RemoteFile, find_remote, write_remote
from loraplex.adapters.sources.urls import Source
from loraplex.adapters.store.artifact_store import Staging
from loraplex.adapters.store.files import CHUNK_BYTES
from loraplex.adapters.store.s3 import s3_store

RETRY_S = 20.0
"""Seconds for which a request that fails is repeated."""


def copy_bucket(source: Source, staging: Staging, *, max_bytes: int, reserve: Callable[[int], None]) -> None:
    """Copy the objects of an adapter into `staging`. Raises SourceUnavailable, and what `find_remote` and
    `write_remote` raise."""
    prefix = "/".join((*source.root, *source.parts))
    store = s3_store(source.authority, prefix, request_s=60, retries=5, retry_s=RETRY_S)
    write_remote(find_remote(partial(_found, store)), staging, max_bytes=max_bytes, reserve=reserve)


def _found(store: S3Store, name: str) -> RemoteFile:
    try:
        found = obstore.head(store, name)
    except FileNotFoundError:
        raise SourceNotFound(f"The source has no object {name}.") from None
    except BaseError as error:
        raise _unavailable(name, error) from error
    return RemoteFile(found["size"], _chunks(store, name, found["e_tag"]))


def _chunks(store: S3Store, name: str, e_tag: str | None) -> Iterator[bytes]:
    """The bytes of the object that was found; an object that has replaced it meanwhile is refused."""
    try:
        found = obstore.get(store, name, options=None if e_tag is None else {"if_match": e_tag})
        for chunk in found.stream(min_chunk_size=CHUNK_BYTES):
            yield bytes(chunk)
    except (BaseError, OSError) as error:
        raise _unavailable(name, error) from error


def _unavailable(name: str, error: BaseException) -> SourceUnavailable:
    """The client's library repeats addresses and headers in its messages: the log has them, the answer has not."""
    return SourceUnavailable(f"{name} cannot be read from its bucket now ({type(error).__name__}).")
