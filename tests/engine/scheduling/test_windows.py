"""Layers that see a window keep the window's blocks alone, and prefixes are found all the same."""

from __future__ import annotations

import pytest
import torch

from loraplex.engine.kv.cache import block_bytes
from loraplex.engine.kv.layers import BlockNeeds, CacheKind, block_needs, keeping_all, layer_groups
from loraplex.engine.kv.prefix_blocks import GIVEN_BACK
from loraplex.engine.types import Sequence
from support.engine.scheduler_bench import Bench

CHUNK = 256
"""Tokens of a step on a CPU."""
MISTRAL_7B = (CacheKind(8, 128, window=4096),) * 32
GEMMA_3_1B = tuple(CacheKind(1, 256, window=None if index % 6 == 5 else 512) for index in range(26))

GEMMA_4_31B = tuple(
    CacheKind(4, 512) if index % 6 == 5 else CacheKind(16, 256, window=1024) for index in range(60)
)


def held(seq: Sequence) -> list[int]:
    return [block for block in seq.block_ids if block != GIVEN_BACK]


@pytest.mark.parametrize(
    ("layers", "most", "decoding", "without"),
    [(MISTRAL_7B, 273, 257, 512), (GEMMA_3_1B, 806, 710, 3328), (GEMMA_4_31B, 1322, 1162, 5632)],
    ids=["Mistral 7B", "Gemma 3 1B", "Gemma 4 31B"],
)
def test_8192_tokens_take_what_arithmetic_says(
    layers: tuple[CacheKind, ...], most: int, decoding: int, without: int
) -> None:
    """The blocks of the formula are those that a scheduler is seen to hold."""
    needs = block_needs(layers, CHUNK)
    assert (needs.of(8192), needs.of(8192, 1)) == (most, decoding)
    all_kept, one = (block_bytes(each, torch.bfloat16) for each in (keeping_all(layers), layers))
    assert without == 8192 / 16 * all_kept / one
    bench = Bench(blocks=most, tokens=CHUNK, windows=needs.windows)
    seq = bench.add("long", 8192 - 40, max_tokens=40)
    peak = 0
    while seq.num_tokens < 8191:
        bench.step()
        peak = max(peak, bench.scheduler.blocks.num_used)
        assert len(held(seq)) == seq.num_held == bench.scheduler.blocks.num_used
        if seq.num_outputs > 32:  # nothing of the prompt's last chunk is left ahead
            assert seq.num_held <= decoding
    assert decoding <= peak <= most


def test_layers_are_grouped_by_their_windows_and_sizes() -> None:
    def sizes(*layers: CacheKind) -> list[tuple[int | None, int]]:
        return [(group.window, len(group.layers)) for group in layer_groups(layers)]

    full, window = CacheKind(2, 8), CacheKind(2, 8, window=32)
    assert sizes(*(full,) * 5) == [(None, 5)]
    assert sizes(*(window,) * 5) == [(32, 5)]
    assert sizes(window, full, window, full) == [(32, 2), (None, 2)]
    assert sizes(*GEMMA_3_1B) == [*[(512, 4)] * 5, (512, 2), (None, 4)]
    assert sizes(*(full,) * 27, window) == [(None, 28)]  # one group for each layer would gain nothing
    assert sizes(full, CacheKind(1, 32, window=32)) == [(None, 1), (32, 1)]
    assert sizes(full, CacheKind(1, 32)) == [(None, 2)]
    assert sizes(*GEMMA_4_31B) == [*[(1024, 5)] * 10, (None, 10)]
    e2b = (*(CacheKind(1, 256, window=512),) * 4, CacheKind(1, 512)) * 3
    assert sizes(*(CacheKind(1, 2 * size) for size in range(1, 20)), window)[0] == (
        None,
        20,
    )  # too many kinds
    shared = tuple(CacheKind(1, 512, shares=14) for _ in range(4))
    assert sizes(*e2b, *shared) == [(512, 6), (512, 6), (None, 3)]
    assert sizes(window, full, CacheKind(2, 8, shares=1)) == [(32, 1), (None, 1)]
    assert sizes(window, CacheKind(2, 8, window=48, shares=0)) == [(48, 1)]
    assert sizes(window, CacheKind(2, 8, shares=0)) == [(None, 1)]


def test_what_a_window_gave_back_is_free_for_others_and_found_until_they_take_it() -> None:
    bench = Bench(blocks=40, tokens=64, windows=(None, 32))
    first = bench.add("first", 240, max_tokens=1)
    while "first" in bench.live:
        bench.step()
    assert bench.scheduler.blocks.num_used == 0
    second = bench.add("second", 250, max_tokens=50)
    bench.step()
    assert second.num_cached == 240  # 15 blocks of the one group, 2 of the other
    assert second.block_ids.count(GIVEN_BACK) == 13
    assert bench.scheduler.blocks.num_used == 15 + 2 + 2
    del first


def test_a_prefix_ends_where_the_window_still_has_its_last_blocks() -> None:
    bench = Bench(blocks=64, tokens=64, windows=(None, 32))
    seq = bench.add("first", 240, max_tokens=1)
    bench.step()
    while "first" in bench.live:
        bench.step()
    blocks = bench.scheduler.blocks
    keys = [key for key in blocks._block_of if len(key[1]) > 32]
    assert len(keys) == 15
    # The window's blocks of positions 128 … 239 are gone.
    blocks.disown(keys[8:])
    again = bench.add("again", 250, max_tokens=5)
    bench.step()
    assert again.num_cached == 8 * 16
    assert again.block_ids[1:12:2] == (GIVEN_BACK,) * 6
    del seq


def test_a_prefix_that_is_shorter_than_a_window_needs_all_of_its_blocks() -> None:
    bench = Bench(blocks=64, tokens=64, windows=(64, None))
    bench.add("first", 100, max_tokens=1)
    while bench.live:
        bench.step()
    blocks = bench.scheduler.blocks
    blocks.disown([next(key for key in blocks._block_of if len(key[1]) == 32)])
    again = bench.add("again", 50, max_tokens=5)
    bench.step()
    assert again.num_cached == 0


def test_prefixes_of_layers_that_all_see_a_window() -> None:
    bench = Bench(blocks=30, tokens=64, windows=(33,))
    bench.add("first", 400, max_tokens=1)
    while bench.live:
        bench.step()
    second = bench.add("second", 410, max_tokens=5)
    bench.step()
    assert second.num_cached == 400
    assert [block == GIVEN_BACK for block in second.block_ids] == [True] * 23 + [False] * 3


def test_sequences_share_what_a_window_sees_and_give_it_back_apart() -> None:
    bench = Bench(blocks=64, tokens=64, windows=(None, 16))
    one = bench.add("one", 70, max_tokens=60)
    bench.step()
    bench.step()
    two = bench.add("two", 70, max_tokens=60)
    bench.step()
    assert two.block_ids[:8:2] == one.block_ids[:8:2]
    assert two.block_ids[7] == one.block_ids[7] != GIVEN_BACK
    for _ in range(20):
        bench.step()
    assert one.block_ids[7] == two.block_ids[7] == GIVEN_BACK


def test_a_short_pool_preempts_and_every_answer_ends() -> None:
    bench = Bench(blocks=36, seqs=4, tokens=32, windows=(None, 17, 17))
    for number in range(4):
        bench.add(f"r{number}", 40, max_tokens=200, first=1000 * number)
    steps = 0
    while bench.live:
        bench.step()
        steps += 1
    assert bench.scheduler.num_preemptions > 0
    assert bench.scheduler.blocks.num_used == 0
    assert steps < 1200


@pytest.mark.parametrize("windows", [(32,), (17, 17), (None, 32)])
def test_a_prompt_in_flight_keeps_the_blocks_of_its_last_chunk(windows: tuple[int | None, ...]) -> None:
    """Requests that come later take none of them, or it would be preempted, and all of it computed again."""
    needs = BlockNeeds(windows, 2 * 64)
    bench = Bench(blocks=needs.of(240), tokens=64, windows=windows, lookahead=1)
    bench.add("long", 240, max_tokens=1)
    for number in range(8):
        bench.add(f"short {number}", 8, max_tokens=3, tenant="globex", first=5000 + 100 * number)
    in_flight = bench.plan()
    while bench.live:
        following = bench.plan()
        bench.collect(in_flight)
        in_flight = following
    assert bench.scheduler.num_preemptions == 0


def test_needs_are_those_of_full_layers_where_the_window_is_longer() -> None:
    needs = BlockNeeds((None, 4096), 512)
    assert [needs.of(count) for count in (0, 1, 16, 17, 1000)] == [0, 2, 2, 4, 126]
    assert needs.longest(126) == 1008
    assert needs.longest(1) == 0
