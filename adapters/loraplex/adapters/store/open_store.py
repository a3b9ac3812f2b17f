"""The store that an artifact URL names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from loraplex.adapters.store.artifact_store import ArtifactStore
from loraplex.adapters.store.fault_points import Fault, no_fault
from loraplex.adapters.store.interface import Store

if TYPE_CHECKING:  # it loads the library
    from loraplex.adapters.store.bucket_client import BucketClient

BUCKET_SCHEME = "s3://"


def open_store(url: str, folder: Path, *, cache_bytes: int, fault: Fault = no_fault) -> Store:
    """The bucket of `url`, if it is s3://BUCKET/PREFIX, with its cache in `folder`; else the store of `folder`. Raises
    StoreFull, StoreFailed, OSError."""
    if not url.startswith(BUCKET_SCHEME):
        return ArtifactStore(folder, fault)
    # Only here, so that a server on a local disk does not load the library.
    from loraplex.adapters.store.bucket_store import BucketStore

    return BucketStore(bucket_client(url), folder, cache_bytes=cache_bytes, fault=fault)


def bucket_client(url: str, **options: float) -> BucketClient:
    """The client of s3://BUCKET/PREFIX. `options` are those of `BucketClient`."""
    from loraplex.adapters.store.bucket_client import BucketClient

    bucket, _, prefix = url.removeprefix(BUCKET_SCHEME).partition("/")
    return BucketClient(bucket, prefix.strip("/"), **options)
