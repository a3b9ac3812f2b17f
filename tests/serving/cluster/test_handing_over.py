"""A server and the prefixes of an engine that is drained."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from loraplex.engine.core.handed import HandedBlock
from loraplex.engine.ipc import protocol as wire
from loraplex.engine.kv.prefix_keys import first_key
from loraplex.engine.types import BlockKey, EngineRequest, SamplingParams
from loraplex.serving.engines import handing_over
from loraplex.serving.engines.engines import Engines
from loraplex.serving.engines.replica import Replica
from loraplex.serving.errors import EngineUnavailable, ServingError
from support.cluster.scripted import ScriptedSession
from support.engine.fake_engine import fake_engine_info
from support.engine.fake_processes import until

FORM = "form"
DIGEST = "d" * 64


def request(number: int, tenant: str = "acme") -> EngineRequest:
    return EngineRequest(f"{tenant} {number}", tenant, (number,) * 17, SamplingParams(3))


def block(number: int, tenant: str = "acme", digest: str | None = None) -> HandedBlock:
    key = first_key(request(number, tenant))
    if digest is not None:
        key = (tenant, digest), key[1]
    return HandedBlock(key, None, key, b"content")


class Keeper(ScriptedSession):
    """Hands on `pages`, each when `gate` lets it, and keeps what it is given."""

    def __init__(self, form: str = FORM) -> None:
        super().__init__(replace(fake_engine_info(), prefix_form=form))
        self.pages: list[list[HandedBlock]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.num_asked = 0
        self.begun: list[bool] = []
        self.kept: list[BlockKey] = []
        self.refusal: Exception | None = None
        self.most = 1000  # blocks that it takes at a time
        self.num_ended = 0
        self.keeps = True
        self.on_put: Callable[[], None] = lambda: None

    async def take_prefixes(self, *, begins: bool) -> wire.PrefixPage:
        self.num_asked += 1
        page = tuple(self.pages.pop(0)) if self.pages else ()
        is_last = not self.pages
        await self.gate.wait()
        if not self.healthy:
            raise EngineUnavailable("it is gone")
        return wire.PrefixPage(1, page, is_last)

    async def put_prefixes(
        self, form: str, blocks: Sequence[HandedBlock], *, begins: bool = False, ends: bool = False
    ) -> wire.PrefixesTaken:
        if ends:
            self.num_ended += 1
            return wire.PrefixesTaken(1, 0, 0)
        self.begun.append(begins)
        if self.refusal is not None:
            raise self.refusal
        taken = [one.key for one in blocks[: self.most]]
        self.kept += taken if self.keeps else []
        self.on_put()
        return wire.PrefixesTaken(1, len(taken), len(taken) if self.keeps else 0)


async def cluster(number: int = 3, *forms: str) -> tuple[Engines, list[Keeper]]:
    keepers = [Keeper(forms[n] if forms else FORM) for n in range(number)]
    engines = Engines(Replica(f"r{n}", keeper) for n, keeper in enumerate(keepers))
    await engines.start()
    return engines, keepers


async def done(engines: Engines, name: str = "r0") -> None:
    await until(lambda: not engines._replicas[name].session.hands_over)


async def test_each_prefix_goes_where_its_requests_go() -> None:
    engines, (source, *others) = await cluster()
    source.pages = [[block(number) for number in range(10)], [block(number) for number in range(10, 40)]]
    engines.drain("r0")
    await done(engines)
    assert all(len(keeper.kept) > 5 for keeper in others)
    assert [keeper.begun for keeper in others] == [[True, False]] * 2
    ready = [each for each in engines.replicas if each.id != "r0"]
    for number in range(40):
        chosen = engines._choose(ready, request(number)).session
        assert isinstance(chosen, Keeper)
        assert block(number).key in chosen.kept
    counts = engines.handing_over.counts
    assert (counts.num_taken, counts.num_refused, counts.num_bytes) == (40, 0, 40 * len(b"content"))
    await engines.close()


async def test_one_engine_hands_nothing_on() -> None:
    engines, (source,) = await cluster(1)
    engines.drain("r0")
    assert not source.hands_over
    await engines.close()


@pytest.mark.parametrize("forms", [("", FORM), (FORM, ""), (FORM, "another")])
async def test_engines_of_other_forms_hand_nothing_on(forms: tuple[str, str]) -> None:
    engines, (source, other) = await cluster(2, *forms)
    source.pages = [[block(1)]]
    engines.drain("r0")
    await asyncio.sleep(0)
    assert (source.num_asked, source.hands_over, other.kept) == (0, False, [])
    await engines.close()


async def test_a_drain_that_is_taken_back_ends_it() -> None:
    engines, (source, other) = await cluster(2)
    source.gate.clear()
    source.pages = [[block(1)], [block(2)]]
    engines.drain("r0")
    engines.drain("r0")  # once more
    await until(lambda: source.num_asked == 1)
    engines.drain("r0", False)
    assert not source.hands_over
    source.gate.set()
    await asyncio.sleep(0.05)
    assert (source.num_asked, other.kept) == (1, [])
    engines.drain("r0")
    await done(engines)
    assert other.kept == [block(2).key]
    await engines.close()


@pytest.mark.parametrize("what", ["version", "tenant"])
async def test_what_is_deleted_while_its_page_is_here_is_not_passed_on(what: str) -> None:
    engines, (source, other) = await cluster(2)
    source.gate.clear()
    source.pages = [[block(1, "acme", DIGEST), block(2, "kept")]]
    engines.drain("r0")
    await until(lambda: source.num_asked == 1)
    erasing = engines.drop(DIGEST) if what == "version" else engines.forget_tenant("acme")
    task = asyncio.ensure_future(erasing)
    await asyncio.sleep(0)
    source.gate.set()
    await done(engines)
    assert other.kept == [block(2, "kept").key]
    assert engines.handing_over.counts.num_refused == 1
    task.cancel()
    await engines.close()


async def test_what_is_deleted_between_two_parts_of_a_page_is_not_passed_on() -> None:
    engines, (source, other) = await cluster(2)
    other.most = 1
    source.pages = [[block(2, "kept"), block(1, "acme", DIGEST)]]
    other.on_put = lambda: engines.handing_over.erase(DIGEST)
    engines.drain("r0")
    await done(engines)
    assert other.kept == [block(2, "kept").key]
    await engines.close()


async def test_an_engine_that_refuses_or_dies_takes_no_more_part() -> None:
    engines, (source, refusing, taking) = await cluster()
    refusing.refusal = ServingError("no")
    source.pages = [[block(number) for number in range(20)] for _ in range(3)]
    engines.drain("r0")
    await done(engines)
    assert refusing.begun == [True]
    assert len(taking.begun) == 3
    counts = engines.handing_over.counts
    assert counts.num_taken + counts.num_refused == 60
    assert counts.num_taken == len(taking.kept)
    await engines.close()


async def test_a_drained_engine_that_dies_ends_it() -> None:
    engines, (source, other) = await cluster(2)
    source.gate.clear()
    source.pages = [[block(1)]]
    engines.drain("r0")
    await until(lambda: source.num_asked == 1)
    source.kill()
    source.gate.set()
    await done(engines)
    assert other.kept == []
    await engines.close()


async def test_what_it_still_computes_is_handed_on_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handing_over, "LOOK_S", 0.01)
    engines, (source, other) = await cluster(2)
    (stream,) = source.submit(EngineRequest("long", "acme", (1, 2), SamplingParams(30)))
    source.pages = [[block(1)]]
    engines.drain("r0")
    await until(lambda: other.kept == [block(1).key])
    assert source.hands_over
    source.pages = [[block(2)]]
    async for _ in stream:
        pass
    await done(engines)
    assert other.kept == [block(1).key, block(2).key]
    await engines.close()


async def test_the_end_of_the_server_waits_for_none() -> None:
    engines, (source, _) = await cluster(2)
    source.gate.clear()
    engines.drain("r0")
    await until(lambda: source.num_asked == 1)
    await asyncio.wait_for(engines.close(), 1)
    assert not source.hands_over


async def test_an_engine_that_has_handed_all_on_does_not_begin_again() -> None:
    engines, (source, other) = await cluster(2)
    source.pages = [[block(1)]]
    engines.drain("r0")
    await done(engines)
    num_asked = source.num_asked
    engines.drain("r0")
    assert (source.hands_over, other.kept, other.num_ended) == (False, [block(1).key], 1)
    engines.drain("r0", False)
    source.pages = [[block(2)]]
    engines.drain("r0")
    await done(engines)
    assert source.num_asked > num_asked
    assert other.kept == [block(1).key, block(2).key]
    await engines.close()


async def test_an_engine_that_keeps_nothing_is_sent_no_more() -> None:
    engines, (source, other) = await cluster(2)
    other.keeps = False
    source.pages = [[block(number)] for number in range(30)]
    engines.drain("r0")
    await done(engines)
    assert 0 < len(other.begun) < 15
    assert engines.handing_over.counts.num_taken == 0
    await engines.close()


async def test_hand_overs_at_once_are_one_for_the_engine_that_takes_them() -> None:
    engines, (one, two, other) = await cluster()
    two.gate.clear()
    one.pages, two.pages = [[block(1)], [block(2)], [block(3)]], [[block(4)]]
    other.on_put = lambda: one.gate.clear() if len(other.begun) == 2 else None
    engines.drain("r1")
    engines.drain("r0")
    await until(lambda: len(other.begun) == 2)
    two.gate.set()
    await done(engines, "r1")
    one.gate.set()
    await done(engines)
    assert other.begun == [True, False, False, False]
    await engines.close()
