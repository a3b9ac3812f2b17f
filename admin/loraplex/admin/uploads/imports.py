"""An import's way from its source into a staging folder, off the event loop."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from functools import partial

import anyio
import anyio.to_thread

from loraplex.adapters.sources.copy import copy_source
from loraplex.adapters.sources.urls import Source
from loraplex.adapters.store.interface import Store
from loraplex.admin.uploads.multipart import Part
from loraplex.admin.uploads.receive import Received
from loraplex.control.catalog.staged import StagedUpload
from loraplex.control.types import AS_THE_BASE, Serving


@contextlib.asynccontextmanager
async def import_source(
    source: Source,
    store: Store,
    *,
    max_bytes: int,
    threads: anyio.CapacityLimiter,
    staged: StagedUpload,
    serving: Serving = AS_THE_BASE,
) -> AsyncIterator[Received]:
    """The source's files. Their staging folder is discarded on the way out unless it was committed.

    Raises AdapterRefused where the tenant's quota does not allow it, QuotaTaken, and what `copy_source` raises.
    """
    staging = await anyio.to_thread.run_sync(store.begin_staging, limiter=threads)
    try:
        copy = partial(copy_source, source, staging, max_bytes=max_bytes, reserve=staged.expect)
        await anyio.to_thread.run_sync(copy, limiter=threads)
        yield Received(staging, frozenset({Part.CONFIG, Part.TENSORS}), serving)
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(staging.discard)
