"""Prefixes on their way from the host memory of an engine that is drained to that of another: what is passed on."""

from __future__ import annotations

import re
from dataclasses import dataclass

from loraplex.engine.types import BlockKey

PAGE_BYTES = 4 << 20
"""Content of one page, beside that of its last block. It is what a step of the taking engine copies beside decoding."""
MOST_BYTES = 24 << 20
"""A block or state that has more stays where it is: it would not fit into a frame."""
MOST_BLOCKS = 1024
"""Blocks and states of one page."""
_MOST_TENANT = 256
_LINK_BYTES = 32
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class HandedBlock:
    """A block, or a state behind one, and its content. `before`: the block that comes before it in its prefix, and of a
    state its own one; None: a prefix begins with it. `first`: the block that its prefix begins with, which says who
    will be asked for it."""

    key: BlockKey
    before: BlockKey | None
    first: BlockKey
    payload: bytes


def is_block_key(key: BlockKey) -> bool:
    """Whether a key from outside has the shape of a block's."""
    (tenant_id, digest), link = key
    is_owner = 0 < len(tenant_id) <= _MOST_TENANT and (digest is None or bool(_DIGEST.fullmatch(digest)))
    return is_owner and len(link) == _LINK_BYTES
