"""Random histories of two engines that hand prefixes on to each other, and bugs that they find."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from loraplex.engine.core import handover
from loraplex.engine.core.handed import HandedBlock
from loraplex.engine.core.handover import PrefixHandover
from loraplex.engine.kv.handed_blocks import HandedBlocks
from loraplex.engine.types import BlockCopy, BlockKey, EngineRequest
from support.engine.core_engine import FORM, CoreEngine, adapter, expected
from support.engine.fake_transport import Fate
from support.handing_engines import SIZES, STATES, make, pages


def play(seed: int) -> int:
    """Requests on both engines, hand-overs in both directions in the middle of them, versions and tenants that are
    deleted between a page and its taking. Raises AssertionError. Returns the blocks that came."""
    rng = random.Random(seed)
    config = rng.choice((SIZES, STATES)) | {
        "num_host_blocks": rng.choice((30, 80, 200)), "lookahead": rng.randrange(2),
        "most_restored_blocks": rng.choice((3, 8, 64)),
    }  # fmt: skip
    engines = [make(**config) for _ in range(2)]
    prompts = [tuple(rng.randrange(1, 900) for _ in range(16 * rng.randrange(2, 9) + 5)) for _ in range(3)]
    gone: set[str] = set()  # digests
    for engine in engines:  # their files are gone, too
        engine.transport.load_fate = lambda digest: Fate(0.0, "deleted" if digest in gone else None)
    sent: list[tuple[CoreEngine, EngineRequest, int]] = []
    num_here = 0
    for number in range(30):
        source, target = rng.sample(engines, 2)
        tenant, version = rng.choice(("acme", "other")), rng.randrange(3)
        ref = None if not version else adapter(10 * version + (tenant == "acme"), tenant)
        action = rng.random()
        if action < 0.6 and (ref is None or ref.digest not in gone):
            count = rng.randrange(1, 20)
            prompt = (*rng.choice(prompts), *rng.sample(range(900), rng.randrange(20)))
            request = source.add(
                str(number), ref, tenant_id=tenant, prompt_ids=prompt, max_tokens=count, ignore_eos=True
            )
            sent.append((source, request, count))
            for _ in range(rng.randrange(30)):
                source.step(0.01)
        elif action < 0.9:
            begins = True
            for page in pages(source):
                if rng.random() < 0.1:
                    break  # the drain is taken back, or the source dies
                if rng.random() < 0.2 and page:
                    digest = rng.choice(page).key[0][1]
                    if digest is not None:
                        gone.add(digest)
                        for engine in engines:
                            engine.core.drop(digest)
                            engine.runner.host.erased(digest)
                blocks = tuple(block for block in page if block.key[0][1] not in gone)  # as a server does
                num_here += target.core.handover.take_in(FORM, blocks, begins=begins)[1]
                begins = False
                if rng.random() < 0.1:
                    prompt = (*rng.choice(prompts), *rng.sample(range(900), rng.randrange(20)))
                    name = f"{number}-{len(sent)}"
                    request = source.add(
                        name, None, tenant_id=tenant, prompt_ids=prompt, max_tokens=3, ignore_eos=True
                    )
                    sent.append((source, request, 3))
                for _ in range(rng.randrange(3)):
                    rng.choice(engines).step(0.01)
        for engine in engines:
            host = engine.core._scheduler.blocks.host
            assert host is not None
            assert not {key[0][1] for key in host.recent()} & gone, "it came back after its owner was erased"
            chains = engine.core._scheduler.blocks._before
            known = {*host.recent(), *engine.core._scheduler.blocks._block_of}
            assert {*chains} <= known, "the block before one that is gone is still known"
    for engine in engines:
        engine.run()
    for engine, request, count in sent:
        tokens, wanted = engine.tokens(request.request_id), expected(request, count)
        if engine.end(request.request_id).error is None:
            assert tokens == wanted
        else:
            assert request.adapter is not None
            assert request.adapter.digest in gone
            assert tokens == wanted[: len(tokens)]
    return num_here


@pytest.mark.parametrize("most_looks", [3, handover.MOST_LOOKS])
def test_histories_of_two_engines(most_looks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "MOST_LOOKS", most_looks)
    assert sum(map(play, range(60))) > 500


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_two_thousand_histories_of_two_engines() -> None:
    for seed in range(2_000):
        play(seed)


def under_the_wrong_tenant(patch: pytest.MonkeyPatch) -> None:
    handed = PrefixHandover._handed

    def wrong(self: PrefixHandover, key: BlockKey) -> HandedBlock | None:
        def other(one: BlockKey) -> BlockKey:
            return ({"acme": "other", "other": "acme"}[one[0][0]], one[0][1]), one[1]

        block = handed(self, key)
        if block is None:
            return None
        before = None if block.before is None else other(block.before)
        return replace(block, key=other(block.key), before=before, first=other(block.first))

    patch.setattr(PrefixHandover, "_handed", wrong)


def came_back_after_erasure(patch: pytest.MonkeyPatch) -> None:
    bring, erase = HandedBlocks.bring_in, HandedBlocks.erase
    kept: dict[HandedBlocks, list[Any]] = {}

    def noted(self: HandedBlocks, *what: Any) -> bool:
        kept.setdefault(self, []).append(what)
        return bring(self, *what)

    def again(self: HandedBlocks, digest: str, *, is_used: bool) -> None:
        erase(self, digest, is_used=is_used)
        for what in kept.get(self, ()):
            if what[0][0][1] == digest and self.num_free:
                bring(self, *what)

    patch.setattr(HandedBlocks, "bring_in", noted)
    patch.setattr(HandedBlocks, "erase", again)


def copied_behind_what_reads_it(patch: pytest.MonkeyPatch) -> None:
    take = HandedBlocks.take_copies
    patch.setattr(
        HandedBlocks, "take_copies", lambda self: tuple(sorted(take(self), key=lambda one: one.to_host))
    )


def one_block_for_another(patch: pytest.MonkeyPatch) -> None:
    take = HandedBlocks.take_copies

    def wrong(self: HandedBlocks) -> tuple[BlockCopy, ...]:
        copies = take(self)
        out = [one for one in copies if one.to_host and -1 in (one.block, one.slot)]
        swapped = dict(zip(map(id, out), out[1:] + out[:1], strict=True))
        return tuple(
            replace(one, block=swapped[id(one)].block, slot=swapped[id(one)].slot)
            if id(one) in swapped and swapped[id(one)].part == one.part
            else one
            for one in copies
        )

    patch.setattr(HandedBlocks, "take_copies", wrong)


BUGS = (
    under_the_wrong_tenant, came_back_after_erasure, copied_behind_what_reads_it, one_block_for_another,
)  # fmt: skip


@pytest.mark.parametrize("plant", BUGS)
def test_planted_bug_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        for seed in range(100):
            play(seed)
