"""Telling the engine what it need not keep any more."""

from __future__ import annotations

import structlog

from loraplex.control.types import Removal
from loraplex.serving.client import EngineClient
from loraplex.serving.errors import ServingError

log = structlog.get_logger("loraplex.admin")


async def forget(engine: EngineClient, removal: Removal) -> None:
    """Drop the deleted bytes from the engine's memory. The deletion stands whatever the engine does: without it
    they leave the engine as any other version that nobody uses."""
    for digest in removal.digests:
        try:
            await engine.drop(digest)
        except ServingError as error:
            log.warning("drop_failed", digest=digest[:12], reason=error.message)
