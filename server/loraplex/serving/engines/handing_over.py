"""Prefixes of engines that are drained go to those that will be asked for them.

A drained engine hands on, page by page, what its pool and its host memory have; each prefix goes where `Engines` would
send a request that begins with it. That goes on until it has nothing to do any more, since what it still computes is
handed on too. Nobody waits for it: an engine that dies, refuses or is full takes no more part in it, and what it would
have got is computed again. What an idle engine has handed on is not handed on again.

A version or a tenant may be deleted while a page of theirs is here. Every engine is told of that behind the pages that
were sent to it, and no page is sent with anything that was deleted since the hand-over began.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from loraplex.engine.core.handed import HandedBlock, is_block_key
from loraplex.serving.engines.choosing import choose_replica
from loraplex.serving.engines.replica import Replica
from loraplex.serving.errors import EngineUnavailable, ServingError
from loraplex.serving.placement.homes import Homes

LOOK_S = 0.5
"""Time between two looks at what an engine that still has requests has computed."""
BUSY_S, MOST_BUSY_S = 0.01, 0.5
"""The first pause of a page whose engine brings enough in its next step already, and the longest: each is twice the one
before."""
_GIVE_UP_S = 5.0
"""The sum of such pauses in a row, after which an engine takes no more part in a hand-over."""
_MOST_REFUSED = 8
"""An engine that keeps nothing of this many pages in a row takes no more part in a hand-over."""


@dataclass(slots=True)
class HandoverCounts:
    """Since the server began."""

    num_taken: int = 0
    """Blocks, and states, that another engine has since."""
    num_refused: int = 0
    """Those that none has taken: erased, without room, of an engine that was lost."""
    num_bytes: int = 0
    """Bytes that were sent, some of them again."""
    seconds: float = 0.0
    """Time from the question for a page to the answers of those that got it."""


@dataclass(slots=True, eq=False)
class _HandingOver:
    """One drained engine. `met`: engines that have had a page of it; `refused`: how many pages in a row came to
    nothing there; `left_out`: those that take no part any more."""

    source: Replica
    task: asyncio.Task[None] | None = None
    erased: set[str] = field(default_factory=set)  # digests and tenants
    met: set[Replica] = field(default_factory=set)
    refused: Counter[Replica] = field(default_factory=Counter)
    left_out: set[Replica] = field(default_factory=set)

    def takes(self, block: HandedBlock) -> bool:
        tenant_id, digest = block.key[0]
        return tenant_id not in self.erased and digest not in self.erased


class HandingOver:
    """All hand-overs of a server. `ready` gives the engines that take requests. For one event loop's thread."""

    def __init__(self, ready: Callable[[], Sequence[Replica]], homes: Homes) -> None:
        self._ready = ready
        self._homes = homes
        self._running: dict[Replica, _HandingOver] = {}
        self._ended: set[Replica] = set()  # that have handed all on, and take nothing new
        self.counts = HandoverCounts()

    def begin(self, source: Replica) -> None:
        """Hand on what this engine has, unless that goes on or was done already, or no other could take any of it."""
        form = _form(source)
        if (
            source in self._running
            or source in self._ended
            or not form
            or not self._targets(_HandingOver(source), form)
        ):
            return
        one = self._running[source] = _HandingOver(source)
        source.session.hands_over = True
        one.task = asyncio.get_running_loop().create_task(self._run(one, form))

    def end(self, source: Replica) -> None:
        """The engine takes requests again, or is gone."""
        self._ended.discard(source)
        one = self._running.pop(source, None)
        if one is not None and one.task is not None:
            one.task.cancel()
            source.session.handed_over()

    def erase(self, owner: str) -> None:
        """A version, by its digest, or a tenant is being deleted: before any engine is told."""
        for one in self._running.values():
            one.erased.add(owner)

    def close(self) -> None:
        for source in list(self._running):
            self.end(source)

    def _targets(self, one: _HandingOver, form: str) -> list[Replica]:
        return [
            each
            for each in self._ready()
            if each is not one.source and each not in one.left_out and _form(each) == form
        ]

    async def _run(self, one: _HandingOver, form: str) -> None:
        try:
            begins = is_last = True
            is_idle = False
            while self._targets(one, form):
                if is_last:
                    is_idle = one.source.session.num_live == 0
                began = asyncio.get_running_loop().time()
                page = await one.source.session.take_prefixes(begins=begins)
                if _form(one.source) != form:
                    return  # it has started again, as another build
                begins, is_last = False, page.is_last
                for target, blocks in self._dealt(one, form, page.blocks).items():
                    await self._give(one, form, target, blocks)
                if page.blocks or not is_last:
                    self.counts.seconds += asyncio.get_running_loop().time() - began
                if is_last:
                    await self._end_pages(one, form)
                if is_last and is_idle:
                    self._ended.add(one.source)
                    return
                if is_last:
                    await asyncio.sleep(LOOK_S)
        except ServingError:
            pass  # the drained engine is gone
        finally:
            if self._running.get(one.source) is one:
                del self._running[one.source]
                one.source.session.handed_over()

    def _dealt(
        self, one: _HandingOver, form: str, page: Sequence[HandedBlock]
    ) -> dict[Replica, list[HandedBlock]]:
        """The blocks of a page by the engine that will be asked for them."""
        among, dealt = self._ready(), dict[Replica, list[HandedBlock]]()
        targets = self._targets(one, form)
        for block in page:
            (_, digest), link = block.first
            target = None
            if among and is_block_key(block.first):
                target = choose_replica(among, self._homes, digest, link, counts_load=False)
            if target is None or target not in targets:
                self.counts.num_refused += 1
            else:
                dealt.setdefault(target, []).append(block)
        return dealt

    async def _give(
        self, one: _HandingOver, form: str, target: Replica, blocks: Sequence[HandedBlock]
    ) -> None:
        pause, paused = BUSY_S, 0.0
        while paused < _GIVE_UP_S and one.refused[target] < _MOST_REFUSED:
            blocks, every = [block for block in blocks if one.takes(block)], len(blocks)
            self.counts.num_refused += every - len(blocks)
            if not blocks:
                return
            begins = not any(target in each.met for each in self._running.values())
            one.met.add(target)
            self.counts.num_bytes += sum(len(block.payload) for block in blocks)
            try:
                taken = await target.session.put_prefixes(form, blocks, begins=begins)
            except ServingError:
                break
            done, blocks = blocks[: taken.num_seen], blocks[taken.num_seen :]
            self.counts.num_taken += taken.num_here
            self.counts.num_refused += len(done) - taken.num_here
            if done:
                one.refused[target] = 0 if taken.num_here else one.refused[target] + 1
                pause, paused = BUSY_S, 0.0
            if not blocks:
                return
            await asyncio.sleep(pause)
            pause, paused = min(2 * pause, MOST_BUSY_S), paused + pause
        one.left_out.add(target)
        self.counts.num_refused += len(blocks)

    async def _end_pages(self, one: _HandingOver, form: str) -> None:
        """Tell those that had pages that none comes for now."""
        for target in self._targets(one, form):
            if target in one.met:
                try:
                    await target.session.put_prefixes(form, (), ends=True)
                except ServingError:
                    one.left_out.add(target)


def _form(replica: Replica) -> str:
    try:
        return replica.session.info.prefix_form
    except EngineUnavailable:
        return ""
