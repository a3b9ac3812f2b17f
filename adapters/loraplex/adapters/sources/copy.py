"""Copying an adapter from any kind of source."""

from __future__ import annotations

from collections.abc import Callable

from loraplex.adapters.sources.folder import copy_folder
from loraplex.adapters.sources.urls import Source
from loraplex.adapters.store.artifact_store import Staging


def copy_source(source: Source, staging: Staging, *, max_bytes: int, reserve: Callable[[int], None]) -> None:
    """Copy the files of an adapter into `staging`. Sizes are known, and `reserve` has heard of them, before a byte
    is copied. Runs in a worker thread. Raises SourceNotAllowed, SourceNotFound, SourceUnavailable, AdapterRefused
    (too_large, not_safetensors), StoreFull, StoreFailed, and what `reserve` raises."""
    if source.scheme == "file":
        copy_folder(source, staging, max_bytes=max_bytes, reserve=reserve)
    elif source.scheme == "s3":
        # Only here, so that a server without such sources does not load the library.
        from loraplex.adapters.sources.bucket import copy_bucket

        copy_bucket(source, staging, max_bytes=max_bytes, reserve=reserve)
    else:
        from loraplex.adapters.sources.hub import copy_from_hub

        copy_from_hub(source, staging, max_bytes=max_bytes, reserve=reserve)
