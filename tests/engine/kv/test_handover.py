"""Prefixes that one engine hands on are found by the other, for their owner alone, and nothing that was erased."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from loraplex.engine.core import handover
from loraplex.engine.core.handed import MOST_BLOCKS, HandedBlock
from loraplex.engine.core.handover import HandoverRefused
from loraplex.engine.kv import prefix_keys
from loraplex.engine.kv.blocks import UseOrder
from loraplex.engine.kv.handed_blocks import HandedBlocks
from loraplex.engine.kv.host_tier import HostTier
from loraplex.engine.types import BlockKey, EngineRequest
from support.engine.core_engine import FORM, CoreEngine, adapter, expected
from support.fake_host_memory import BLOCK_BYTES
from support.handing_engines import SIZES, STATES, make, pages

LONG = tuple(range(1, 162))
"""A prompt of ten blocks and a token."""


def hand_over(source: CoreEngine, target: CoreEngine, *, limit: int = 1000) -> int:
    """How many blocks and states the target has of those that came."""
    num_here, begins = 0, True
    for page in pages(source):
        rest = page[:limit]
        for _ in range(100):
            seen, here = target.core.handover.take_in(FORM, rest, begins=begins)
            begins, rest, num_here = False, rest[seen:], num_here + here
            target.step(0.01)
            if not rest:
                break
        assert not rest
    target.core.handover.take_in(FORM, (), ends=True)
    return num_here


def ask(engine: CoreEngine, name: str, ref: Any = None, **changes: Any) -> tuple[EngineRequest, int]:
    """Answer a request, with the right tokens. Returns how many positions of its prompt were found."""
    request = engine.add(name, ref, **{"prompt_ids": LONG, "max_tokens": 3} | changes)
    engine.run()
    assert engine.tokens(name) == expected(request, 3)
    usage = engine.end(name).usage
    assert usage is not None
    return request, usage.cached_tokens


def forget(engine: CoreEngine) -> None:
    """Have other prompts take the whole pool."""
    for number in range(4):
        prompt = tuple(range(300 + 100 * number, 300 + 100 * number + 200))
        engine.add(f"other {number}", tenant_id="other", prompt_ids=prompt, max_tokens=1)
        engine.run()


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("config", [SIZES, STATES], ids=["blocks", "states"])
@pytest.mark.parametrize("is_in_pool", [False, True])
@pytest.mark.parametrize("ref", [None, adapter(1)], ids=["base", "adapter"])
def test_a_prefix_that_was_handed_on_is_found(
    ref: Any, is_in_pool: bool, config: dict[str, Any], lookahead: int
) -> None:
    source, target = make(**config, lookahead=lookahead), make(**config, lookahead=lookahead)
    ask(source, "first", ref)
    if not is_in_pool:
        forget(source)
    assert hand_over(source, target) >= 10
    assert ask(target, "again", ref)[1] == 160
    assert ask(target, "stranger", ref, tenant_id="stranger")[1] == 0
    assert ask(target, "other version", adapter(2))[1] == 0
    assert ask(source, "here still", ref)[1] == 160  # as after a drain that was taken back


def test_a_second_walk_hands_on_only_what_is_new() -> None:
    source = make()
    ask(source, "first")
    assert len(next(pages(source))) == 10
    assert source.core.handover.next_page(begins=False) == ((), True)
    ask(source, "second", prompt_ids=(*LONG[:80], *range(500, 600)))
    page, is_last = source.core.handover.next_page(begins=False)
    assert is_last
    assert len(page) == 6
    assert {block.first for block in page} == {page[0].first}
    source.core.reset()
    assert len(source.core.handover.next_page(begins=False)[0]) == 16


def test_whole_prefixes_come_and_the_last_used_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "PAGE_BYTES", 3 * BLOCK_BYTES)
    source = make()
    for number in range(3):
        ask(source, str(number), prompt_ids=tuple(range(number, number + 100)))
    forget(source)
    blocks = [block for page in pages(source) for block in page]
    assert max(len(page) for page in pages(source)) == 3
    known: set[BlockKey | None] = {None}
    for block in blocks:
        assert block.before in known
        known.add(block.key)
    own = [block for block in blocks if block.key[0][0] == "acme"]
    firsts = [*dict.fromkeys(block.first for block in own)]
    wanted = [
        prefix_keys.first_key(EngineRequest("", "acme", tuple(range(n, n + 100)), None, None))  # type: ignore[arg-type]
        for n in (2, 1, 0)
    ]
    assert firsts == wanted


@pytest.mark.parametrize("config", [SIZES, STATES], ids=["blocks", "states"])
def test_a_call_looks_at_few_blocks_however_many_there_are(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make(**config)
    for number in range(12):
        ask(source, str(number), prompt_ids=tuple(range(number, number + 100)))
    whole = [block for page in pages(source) for block in page]
    looks = Counter[str]()

    def counted(owner: type, name: str) -> None:
        method = getattr(owner, name)

        def call(self: Any, *args: Any) -> Any:
            looks[name] += 1
            return method(self, *args)

        monkeypatch.setattr(owner, name, call)

    for owner, name in ((UseOrder, "walk"), (HandedBlocks, "step_back"), (HandedBlocks, "is_known")):
        counted(owner, name)
    monkeypatch.setattr(handover, "MOST_LOOKS", 7)
    came, most, num_calls, begins, is_last = list[HandedBlock](), 0, 0, True, False
    for _ in range(2):  # the second walk finds all of it handed on
        while not is_last:
            looks.clear()
            page, is_last = source.core.handover.next_page(begins=begins)
            # Each block of the page is looked at once more, behind the copies.
            most, num_calls, begins = max(most, looks.total() - len(page)), num_calls + 1, False
            came += page
        is_last = False
    assert most <= 7 + 2  # each of the two orders says once that it has ended
    assert num_calls > 2 * len(whole) / 7
    assert [block.key for block in came] == [block.key for block in whole]


def test_at_its_end_the_engine_that_takes_uses_few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = make(), make()
    for number in range(12):
        ask(source, str(number), prompt_ids=tuple(range(number, number + 100)))
    uses, read = Counter[bool](), HostTier.read
    take = target.core.handover.take_in

    def counted(tier: HostTier, key: BlockKey) -> Any:
        uses[is_end] += 1
        return read(tier, key)

    def taken(*arguments: Any, ends: bool = False, **options: Any) -> Any:
        nonlocal is_end
        is_end = ends
        return take(*arguments, ends=ends, **options)

    is_end = False
    monkeypatch.setattr(HostTier, "read", counted)
    monkeypatch.setattr(target.core.handover, "take_in", taken)
    monkeypatch.setattr(handover, "MOST_LOOKS", 7)
    assert hand_over(source, target) > 7
    assert uses[True] == 7


def test_what_leaves_in_the_middle_of_a_walk_is_not_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "MOST_LOOKS", 3)
    source, ref = make(), adapter(1)
    ask(source, "base")
    ask(source, "adapter", ref)
    for number in range(3):  # the first three of the version's ten blocks
        page, is_last = source.core.handover.next_page(begins=not number)
        assert [block.key[0][1] for block in page] == [ref.digest]
        assert not is_last
    source.core.drop(ref.digest)
    came = [block for page in walked_on(source) for block in page]
    assert len(came) == 10
    assert {block.key[0][1] for block in came} == {None}
    ask(source, "third", prompt_ids=tuple(range(200, 300)))
    page, _ = source.core.handover.next_page(begins=True)
    forget(source)  # to host memory, in the middle of a walk
    keys = {block.key for each in (*walked_on(source), *walked_on(source), page) for block in each}
    assert keys >= {block.key for block in came}
    assert keys == {block.key for page in pages(source) for block in page}


def walked_on(engine: CoreEngine) -> Iterator[tuple[HandedBlock, ...]]:
    is_last = False
    while not is_last:
        page, is_last = engine.core.handover.next_page(begins=False)
        yield page


def test_what_came_is_used_in_the_order_of_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "PAGE_BYTES", 3 * BLOCK_BYTES)
    source, target = make(), make()
    for number in range(5):
        ask(source, str(number), prompt_ids=tuple(range(number, number + 100)))
    forget(source)
    hand_over(source, target)
    orders = []
    for engine in (source, target):
        host = engine.core._scheduler.blocks.host
        assert host is not None
        orders.append([key for key in host.recent() if key[0][0] == "acme"])
    assert len(orders[0]) == 30
    assert orders[0] == orders[1]


def test_what_a_running_request_holds_comes_when_it_has_ended() -> None:
    source = make()
    request = source.add("running", prompt_ids=LONG, max_tokens=30)
    while len(source.tokens("running")) < 3:
        source.step(0.01)
    assert source.core.handover.next_page(begins=True) == ((), True)
    source.run()
    assert source.tokens("running") == expected(request, 30)
    assert len(source.core.handover.next_page(begins=False)[0]) >= 10


def test_a_block_without_those_before_it_is_not_taken() -> None:
    source, target = make(), make()
    ask(source, "first")
    (page,) = pages(source)
    assert target.core.handover.take_in(FORM, page[1:], begins=True) == (9, 0)
    assert target.core.handover.take_in(FORM, page[:3], begins=False) == (3, 3)
    target.step()
    assert ask(target, "again")[1] == 48


def test_a_version_that_is_erased_while_its_prefix_comes() -> None:
    ref = adapter(1)
    source, target = make(), make()
    ask(source, "first", ref)
    (page,) = pages(source)
    target.core.handover.take_in(FORM, page, begins=True)
    target.core.drop(ref.digest)  # before the copies are done
    target.step()
    assert target.core.prefix_owners() == set()
    source.core.drop(ref.digest)
    assert [*pages(source)] == [()]
    target.core.handover.take_in(FORM, page, begins=True)
    target.core.forget_tenant("acme")
    target.step()
    assert target.core.prefix_owners() == set()
    assert ask(target, "again", ref)[1] == 0


def test_a_version_that_was_erased_while_a_request_ran_on_it() -> None:
    ref = adapter(1)
    source, target = make(), make()
    ask(source, "first", ref)
    (page,) = pages(source)
    target.add("running", ref, prompt_ids=tuple(range(20)), max_tokens=20)
    while not target.tokens("running"):
        target.step(0.01)
    target.core.drop(ref.digest)
    assert target.core.handover.take_in(FORM, page, begins=True) == (10, 0)
    target.run()
    assert target.core.prefix_owners() == set()


def test_no_more_comes_in_a_step_than_is_restored_in_one() -> None:
    source, target = make(), make(most_restored_blocks=4)
    ask(source, "first")
    (page,) = pages(source)
    assert target.core.handover.take_in(FORM, page, begins=True) == (4, 4)
    assert target.core.handover.take_in(FORM, page[4:], begins=False) == (0, 0)
    target.step()  # the fake memory complains of more
    assert target.core.handover.take_in(FORM, page[4:], begins=False) == (4, 4)


def test_half_of_host_memory_is_displaced_at_most() -> None:
    source, target = make(num_host_blocks=400), make(num_host_blocks=40)
    for number in range(8):
        for engine, first in ((source, 0), (target, 500)):
            prompt = tuple(range(first + number, first + number + 100))
            ask(engine, str(number), tenant_id=f"{first} {number}", prompt_ids=prompt)
    forget(target)
    host = target.core._scheduler.blocks.host
    assert host is not None
    before = {*host.recent()}
    assert len(host) == 40
    hand_over(source, target)
    kept = before & {*host.recent()}
    assert len(kept) >= 20
    assert len(host) == 40
    assert {key[0][0] for key in host.recent()} >= {"0 7"}


def test_a_tenant_at_its_most_keeps_half_of_its_own() -> None:
    source, target = make(num_host_blocks=400), make(num_host_blocks=80)
    for number in range(8):
        for engine, first in ((source, 0), (target, 500)):
            prompt = tuple(range(first + number, first + number + 100))
            ask(engine, str(number), tenant_id="one", prompt_ids=prompt)
    forget(target)
    host = target.core._scheduler.blocks.host
    assert host is not None
    before = {key for key in host.recent() if key[0][0] == "one"}
    assert len(before) == 40
    hand_over(source, target)
    after = {key for key in host.recent() if key[0][0] == "one"}
    assert len(after) == 40
    assert 20 <= len(before & after) < 40


def changed(block: HandedBlock, **changes: Any) -> HandedBlock:
    return replace(block, **changes)


BAD: dict[str, Callable[[HandedBlock], HandedBlock]] = {
    "short": lambda block: changed(block, payload=block.payload[:-1]),
    "long": lambda block: changed(block, payload=block.payload + b"\0"),
    "no link": lambda block: changed(block, key=(block.key[0], b"")),
    "long link": lambda block: changed(block, key=(block.key[0], bytes(33))),
    "a state of a model without": lambda block: changed(block, key=prefix_keys.of_state(block.key)),
    "no tenant": lambda block: changed(block, key=(("", None), block.key[1])),
    "a huge tenant": lambda block: changed(block, key=(("x" * 10_000, None), block.key[1])),
    "no digest": lambda block: changed(block, key=(("acme", "../x"), block.key[1])),
    "behind another tenant's": lambda block: changed(block, before=(("other", None), bytes(32))),
    "the first of another tenant": lambda block: changed(block, first=(("other", None), bytes(32))),
}


@pytest.mark.parametrize("name", BAD)
def test_a_page_with_a_bad_block_is_refused_whole(name: str) -> None:
    source, target = make(), make()
    ask(source, "first")
    (page,) = pages(source)
    with pytest.raises(HandoverRefused):
        target.core.handover.take_in(FORM, (*page[:4], BAD[name](page[4])), begins=True)
    assert target.core.prefix_owners() == set()
    assert not target.core._scheduler.blocks.copies


def test_other_refusals() -> None:
    source, target = make(), make()
    ask(source, "first")
    (page,) = pages(source)
    with pytest.raises(HandoverRefused, match="another base model"):
        target.core.handover.take_in("another", page, begins=True)
    with pytest.raises(HandoverRefused, match=f"{MOST_BLOCKS} blocks at most"):
        target.core.handover.take_in(FORM, page[:1] * (MOST_BLOCKS + 1), begins=True)
    without = make(num_host_blocks=0)
    with pytest.raises(HandoverRefused, match="no --kv-host-memory"):
        without.core.handover.take_in(FORM, page, begins=True)
    ask(without, "first")
    assert [*pages(without)] == [()]
