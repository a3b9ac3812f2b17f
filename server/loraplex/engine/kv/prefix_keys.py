"""The names of KV blocks' contents.

A full block is named by a link of a SHA-256 chain: the chain is rooted at its namespace, (tenant, adapter digest
or base), and every link is the hash of the one before and of the block's own token ids. So a link names all
tokens from position 0 up to the block's end. (Hash-chained block names: vLLM, "Automatic Prefix Caching".)

The namespace is part of the key itself, beside the hash. Two tenants can't come to one block even if SHA-256
were broken, and a version is its digest: a new version of an adapter never meets KV of the old one.

An activated LoRA acts from a position in the prompt on. What ends before is the base's, and has its names. The link of
the block in which it begins to act names this position too.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Row
from heapq import nsmallest

from loraplex.engine.kv.layers import STATE_GROUP
from loraplex.engine.pooling import OF_EVERY_TOKEN
from loraplex.engine.types import BlockKey, EngineRequest, Namespace, ScheduledSequence, Sequence
from loraplex.kernels.attention import BLOCK_SIZE

MAX_OWNERS = 10_000
"""Owners of prefixes in one answer: some 2 MiB, far below the limit of a frame."""
_LINK_BYTES = 32
_OF_STATE = bytes((STATE_GROUP,))
"""The byte behind the link in the key of a state."""


def namespace(request: EngineRequest) -> Namespace:
    """The key of requests that may share KV with this one: the same tenant, on the same adapter version (None: on
    base)."""
    return request.tenant_id, None if request.adapter is None else request.adapter.digest


def next_owners(owners: Iterable[Namespace], after: Namespace | None = None) -> list[Namespace]:
    """The first of these owners, `MAX_OWNERS` at most, in one order for all engines; of those behind `after`."""
    least = None if after is None else _place(after)
    return nsmallest(MAX_OWNERS, (one for one in owners if least is None or _place(one) > least), key=_place)


def _place(owner: Namespace) -> tuple[str, str]:
    return owner[0], owner[1] or ""


def root_link(space: Namespace) -> bytes:
    """The chain's start. Each part goes in with its length before it, so that no two namespaces spell the same
    bytes; the base is the absent part, not an empty name."""
    sha = hashlib.sha256()
    for part in space:
        raw = b"" if part is None else part.encode("utf-8", "surrogatepass")
        sha.update(b"-" if part is None else len(raw).to_bytes(8, "little"))
        sha.update(raw)
    return sha.digest()


def next_link(link: bytes, token_ids: Row[int]) -> bytes:
    """The link of the block that holds `token_ids` (BLOCK_SIZE of them, each below 2**32; with the position behind them
    in the block in which the adapter begins to act)."""
    return hashlib.sha256(link + array("I", token_ids).tobytes()).digest()


def findable_blocks(seq: Sequence) -> int:
    """Blocks of a waiting sequence that need not be computed where they are cached."""
    # The last token is always computed: its logits are needed, and logits are not cached.
    findable = max(0, seq.num_tokens - 1) // BLOCK_SIZE
    if seq.num_scored < seq.num_to_score:
        # Positions that are still to be scored are computed again for the same reason.
        return seq.num_scored // BLOCK_SIZE
    if seq.request.pooling in OF_EVERY_TOKEN and seq.pooled is not None:
        # No hidden state is cached either. Those that were added before a preemption are not needed again.
        return min(findable, seq.pooled.num_positions // BLOCK_SIZE)
    if seq.request.pooling == "cls" and seq.pooled is not None and not seq.pooled.num_positions:
        return 0
    return findable


def cached_prompt_tokens(seq: Sequence) -> int:
    """Positions of the prompt that a sequence has found in the prefix cache, when it starts for the first time."""
    if not seq.request.generated:
        return seq.num_computed
    # What another engine has generated may be cached too. As ever, the prompt's last position does not count.
    return min(seq.num_computed, (seq.num_prompt - 1) // BLOCK_SIZE * BLOCK_SIZE)


def of_group(key: BlockKey, group: int) -> BlockKey:
    """The name of what the layers of a group keep of the positions that `key` names, or the state behind them. No link
    has a byte more."""
    if group == STATE_GROUP:
        return of_state(key)
    return (key[0], key[1] + bytes((group,))) if group else key


def group_of(name: BlockKey) -> int:
    """The group of a block of this name."""
    return name[1][_LINK_BYTES] if len(name[1]) > _LINK_BYTES else 0


def of_state(key: BlockKey) -> BlockKey:
    """The name, beside those of blocks, of the state behind the block that `key` names."""
    return key[0], key[1] + _OF_STATE


def block_of_state(name: BlockKey) -> BlockKey:
    """The name of the block that the state of this name is behind."""
    return name[0], name[1][:_LINK_BYTES]


def part_of_state(name: BlockKey, part: int) -> BlockKey:
    """The name of a part, as large as a block, of the state of this name: on a disk each has a file of its own."""
    return name[0], name[1] + part.to_bytes(4, "little")


def state_of_part(key: BlockKey) -> BlockKey:
    """The name of the state that `key` names a part of. No state has the one that a block's key gives."""
    return key[0], key[1][: _LINK_BYTES + len(_OF_STATE)]


def is_of_state(key: BlockKey) -> bool:
    return key[1][_LINK_BYTES:] == _OF_STATE


def filled(
    seq: Sequence, scheduled: ScheduledSequence, start: int, end: int, num_groups: int
) -> list[tuple[int, BlockKey]]:
    """The blocks that positions start … end-1 of a computed slice of the sequence have filled, each with its key."""
    indices = range(start // BLOCK_SIZE, end // BLOCK_SIZE)
    keys = extend_keys(seq) if indices else []
    return [
        (scheduled.block_ids[index * num_groups + group], of_group(keys[index], group))
        for index in indices
        for group in range(num_groups)
    ]


def extend_keys(seq: Sequence) -> list[BlockKey]:
    """Name every block that `seq.token_ids` fill by now; what was named before is kept. Returns all keys."""
    return _extend(seq.block_keys, seq.request, seq.token_ids)


def first_key(request: EngineRequest) -> BlockKey:
    """The key of the prompt's first block. A prompt that fills none has one of its own, which no block has."""
    keys = _extend([], request, request.prompt_ids[:BLOCK_SIZE])
    own = namespace(request)
    return keys[0] if keys else (own, next_link(root_link(own), request.prompt_ids))


def _extend(keys: list[BlockKey], request: EngineRequest, tokens: Row[int]) -> list[BlockKey]:
    """Append the keys of the blocks that `tokens`, of the whole sequence, fill behind those named before."""
    place, full = request.adapter_from, len(tokens) // BLOCK_SIZE
    if len(keys) < full:
        own = namespace(request)
        before = (own[0], None) if place else own
        link = keys[-1][1] if keys else root_link(before)
        for start in range(len(keys) * BLOCK_SIZE, full * BLOCK_SIZE, BLOCK_SIZE):
            end = start + BLOCK_SIZE
            token_ids = tokens[start:end]
            # Tokens alone do not tell where the adapter begins to act: an answer may spell the invocation once more.
            begins = place > 0 and start <= place < end
            link = next_link(link, (*token_ids, place) if begins else token_ids)
            keys.append((before if end <= place else own, link))
    return keys
