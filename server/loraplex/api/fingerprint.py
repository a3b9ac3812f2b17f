"""The fingerprint of an answer: the same fingerprint, seed and request give the same tokens.

That holds between servers too, wherever an engine promises the same bits (`EngineInfo.same_bits`).
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

from loraplex.adapters.ref import AdapterRef
from loraplex.engine.reports import EngineInfo
from loraplex.serving.output.formats import OutputFormats

HEADER = "x-loraplex-fingerprint"


def fingerprint(
    info: EngineInfo,
    text_build: str,
    adapter: AdapterRef | None,
    formats: OutputFormats,
    chat_digest: str | None = None,
) -> str:
    """The fingerprint of the base's weights, the version's, the dtype, the engine's numerical build, the build that
    makes tokens of text, the ids that end an answer, the formats that calls and reasoning are written in, and what the
    version brings for its chats, where that is used (`chat_digest`)."""
    return _digest(
        info.base_fingerprint,
        "" if adapter is None else adapter.digest,
        info.dtype,
        info.numerics,
        text_build,
        info.eos_ids,
        None if formats.tools is None else formats.tools.name,
        None if formats.reasoning is None else formats.reasoning.name,
        *(() if chat_digest is None else (chat_digest,)),
    )


@lru_cache(maxsize=4096)
def _digest(*parts: object) -> str:
    return f"fp_{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}"
