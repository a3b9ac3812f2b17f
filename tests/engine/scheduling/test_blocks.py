"""KV blocks: reference counts, the free list's order, the prefix index and the names of contents."""

from __future__ import annotations

from typing import Any

import pytest

from loraplex.adapters.ref import AdapterRef
from loraplex.engine.kv import prefix_keys
from loraplex.engine.kv.blocks import BlockManager
from loraplex.engine.types import EngineRequest, SamplingParams, Sequence
from loraplex.kernels.attention import BLOCK_SIZE
from support.simulator.kv_integrity import check_blocks


def sequence(tokens: list[int], *, tenant: str = "acme", digest: str | None = None) -> Sequence:
    adapter = None if digest is None else AdapterRef(tenant, "name", 1, digest, 8)
    request = EngineRequest("r", tenant, tuple(tokens), SamplingParams(max_tokens=1), adapter)
    return Sequence(request, 0.0, 0, list(tokens))


def keys_of(tokens: list[int], **who: str | None) -> list[tuple[tuple[str, str | None], bytes]]:
    return list(prefix_keys.extend_keys(sequence(tokens, **who)))  # type: ignore[arg-type]


def test_allocate_and_release_give_every_block_once() -> None:
    blocks = BlockManager(4)
    first, second = blocks.allocate(3), blocks.allocate(1)
    assert sorted(first + second) == [0, 1, 2, 3]
    assert (blocks.num_free, blocks.num_used) == (0, 4)
    check_blocks(blocks, [first, second])
    blocks.release(first)
    blocks.release(second)
    assert blocks.num_used == 0
    check_blocks(blocks, [])


def test_misuse_raises_and_changes_nothing() -> None:
    blocks = BlockManager(2)
    held = blocks.allocate(1)
    with pytest.raises(AssertionError, match="2 blocks asked, 1 free"):
        blocks.allocate(2)
    other = 1 - held[0]
    with pytest.raises(AssertionError, match="released, but has no reference"):
        blocks.release([held[0], other])
    with pytest.raises(AssertionError, match="registered, but has no reference"):
        blocks.register(other, (("t", None), b"x"))
    with pytest.raises(AssertionError, match="empty"):
        blocks.share([other])
    check_blocks(blocks, [held])
    with pytest.raises(ValueError, match="at least one block"):
        BlockManager(0)


def test_a_shared_prefix_is_held_until_its_last_holder_goes() -> None:
    blocks = BlockManager(3)
    keys = keys_of(list(range(2 * BLOCK_SIZE)))
    mine = blocks.allocate(2)
    for block, key in zip(mine, keys, strict=True):
        blocks.register(block, key)
    assert blocks.num_idle(mine) == 0
    blocks.share(mine)
    blocks.release(mine)
    assert blocks.num_used == 2
    check_blocks(blocks, [mine])
    blocks.release(mine)
    assert blocks.num_used == 0
    assert blocks.lookup(keys) == mine, "released content stays findable until its block is needed"
    assert blocks.num_idle(mine) == 2


def test_empty_blocks_go_first_then_the_least_recently_used_and_tails_before_heads() -> None:
    blocks = BlockManager(5)
    old, new = keys_of([1] * 2 * BLOCK_SIZE), keys_of([2] * 2 * BLOCK_SIZE)
    for keys in (old, new):
        held = blocks.allocate(2)
        for block, key in zip(held, keys, strict=True):
            blocks.register(block, key)
        blocks.release(held)
    blocks.allocate(1)  # the block that never held anything
    assert (len(blocks.lookup(old)), len(blocks.lookup(new))) == (2, 2)
    blocks.allocate(1)
    assert (len(blocks.lookup(old)), len(blocks.lookup(new))) == (1, 2)
    hit = blocks.lookup(old)
    blocks.share(hit)  # used again: now the other chain is older
    blocks.release(hit)
    blocks.allocate(2)
    assert (len(blocks.lookup(old)), len(blocks.lookup(new))) == (1, 0)


def test_a_twin_stays_nameless() -> None:
    blocks = BlockManager(2)
    (key,) = keys_of([3] * BLOCK_SIZE)
    first, twin = blocks.allocate(1), blocks.allocate(1)
    blocks.register(first[0], key)
    blocks.register(twin[0], key)
    assert blocks.lookup([key]) == first
    blocks.release(first)
    blocks.release(twin)
    check_blocks(blocks, [])


def test_keys_name_full_blocks_and_grow_with_the_tokens() -> None:
    seq = sequence(list(range(BLOCK_SIZE + 5)))
    assert len(prefix_keys.extend_keys(seq)) == 1
    first = seq.block_keys[0]
    seq.token_ids += range(100, 100 + BLOCK_SIZE)
    assert len(prefix_keys.extend_keys(seq)) == 2
    assert seq.block_keys[0] is first
    assert seq.block_keys == keys_of(seq.token_ids)


def test_a_key_depends_on_every_token_before_it() -> None:
    tokens = list(range(3 * BLOCK_SIZE))
    keys = keys_of(tokens)
    for changed in (0, BLOCK_SIZE, 2 * BLOCK_SIZE):
        other = keys_of([*tokens[:changed], 999, *tokens[changed + 1 :]])
        same = changed // BLOCK_SIZE
        assert other[:same] == keys[:same]
        assert not set(other[same:]) & set(keys[same:])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"tenant": "a", "digest": "d" * 64}, {"tenant": "b", "digest": "d" * 64}),
        ({"tenant": "a", "digest": "d" * 64}, {"tenant": "a", "digest": "e" * 64}),
        ({"tenant": "a", "digest": "d" * 64}, {"tenant": "a", "digest": None}),
        ({"tenant": "a", "digest": None}, {"tenant": "b", "digest": None}),
        # Spelled one after the other, these are the same characters.
        ({"tenant": "a", "digest": "bc"}, {"tenant": "ab", "digest": "c"}),
        ({"tenant": "a", "digest": ""}, {"tenant": "a", "digest": None}),
    ],
)
def test_namespaces_share_neither_keys_nor_hashes(
    one: dict[str, str | None], other: dict[str, str | None]
) -> None:
    tokens = list(range(2 * BLOCK_SIZE))
    left, right = keys_of(tokens, **one), keys_of(tokens, **other)
    assert not set(left) & set(right)
    assert not {link for _, link in left} & {link for _, link in right}


def cached(blocks: BlockManager, number: int, *, digest: str | None = None, size: int = 2) -> list[Any]:
    """A prompt of `size` blocks that was computed and has ended; its keys."""
    keys = keys_of([number] * size * BLOCK_SIZE, digest=digest)
    held = blocks.allocate(size)
    for block, key in zip(held, keys, strict=True):
        blocks.register(block, key)
    blocks.release(held)
    return keys


def test_blocks_of_departed_adapters_go_behind_empty_ones_and_before_all_others() -> None:
    blocks = BlockManager(9)
    base, stays, leaves = (
        cached(blocks, 1),
        cached(blocks, 2, digest="stays"),
        cached(blocks, 3, digest="leaves"),
    )
    resident = {"stays"}
    blocks.set_resident("leaves", False)
    check_blocks(blocks, [], resident.__contains__)

    def found() -> list[int]:
        return [len(blocks.lookup(keys)) for keys in (base, stays, leaves)]

    held = blocks.allocate(3)
    assert found() == [2, 2, 2], "empty blocks were left"
    held += blocks.allocate(1)
    assert found() == [2, 2, 1], "the tail of the departed one's, though it was used last"
    held += blocks.allocate(1)
    assert found() == [2, 2, 0]
    held += blocks.allocate(1)
    assert found() == [1, 2, 0], "then the least recently used"
    check_blocks(blocks, [held], resident.__contains__)


def test_blocks_of_an_adapter_that_comes_back_are_kept_like_others() -> None:
    blocks = BlockManager(4)
    base, returns = cached(blocks, 1), cached(blocks, 2, digest="returns")
    blocks.set_resident("returns", False)
    blocks.set_resident("returns", False)  # its load has failed
    blocks.set_resident("returns", True)
    check_blocks(blocks, [])
    assert blocks.lookup(returns)
    blocks.share(blocks.lookup(returns))
    blocks.release(blocks.lookup(returns))
    blocks.allocate(2)
    assert (len(blocks.lookup(base)), len(blocks.lookup(returns))) == (0, 2)


def test_what_is_known_of_a_departed_adapter_ends_with_its_last_block() -> None:
    blocks = BlockManager(2)
    cached(blocks, 1, digest="a")
    blocks.set_resident("a", False)
    blocks.set_resident("unknown", False)
    blocks.release(blocks.allocate(2))
    check_blocks(blocks, [], lambda digest: False)
    cached(blocks, 1, digest="a")
    check_blocks(blocks, [])
