"""An engine's part in handing prefixes on: pages of what its memory has, and the taking of others' pages.

A drained engine is asked for a page after the other. A page names for each block the block before it, since a name does
not tell, and comes behind all of these. What has been handed on stays here, and is not handed on again. When a page was
the last, the next one begins again with what is here then. Looking for what comes next goes on from page to page, a
bounded part in each, since running requests wait for it.

The taking engine believes sizes, names and order of nothing that comes. It takes a block whose beginning it has, into
host memory, by the rules of that: as the newest, since the requests that used it will be sent here from now on, and in
the order in which they were used there. In one hand-over it gives half of host memory to such blocks at most, where it
is full.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Row
from itertools import islice

from loraplex.adapters.errors import LoraplexError
from loraplex.engine.core.handed import (
    MOST_BLOCKS,
    MOST_BYTES,
    PAGE_BYTES,
    HandedBlock,
    is_block_key,
)
from loraplex.engine.kv import prefix_keys
from loraplex.engine.kv.handed_blocks import HandedBlocks, PrefixForm
from loraplex.engine.kv.host_tier import HostTier, most_of_tenant
from loraplex.engine.types import BlockKey

MOST_LOOKS = 2048
"""Blocks that one call looks at: some 2 ms beside its copies, however many an engine has."""
_MOST_DISPLACED = 2
"""A hand-over displaces at most one part in this number of the slots."""


class HandoverRefused(LoraplexError):
    """A page is none that this engine can take."""

    code = "handover_refused"


class PrefixHandover:
    """The pages of `blocks`; with no `form`, or no host memory, the engine hands nothing on and takes nothing. `copy`
    has the copies that wait for a plan done, and returns then: it raises as `InFlightSteps.copy` does. `put` may be
    called from any thread, all else from the core's."""

    def __init__(self, blocks: HandedBlocks, form: PrefixForm | None, copy: Callable[[], None]) -> None:
        self._blocks = blocks
        self._form = form if blocks.host is not None else None
        self._piece_bytes = 0 if form is None else form.piece_bytes
        self._copy = copy
        self._pieces: dict[BlockKey, bytes] = {}  # that were read out
        self._ends: Iterator[BlockKey | None] | None = (
            None  # of prefixes that come still; None: no walk goes on
        )
        self._unpruned = 0  # of what was handed on before this walk, what may have left since
        self._chain: list[BlockKey] = []  # of the prefix that is looked for now, its end first
        self._looked_at: BlockKey | None = None  # the block of it that is looked at next
        self._waiting: list[BlockKey] = []  # of the prefix that is being handed on, the next one last
        self._broken: set[BlockKey] = set()  # blocks that are here without all before them
        self._firsts: OrderedDict[BlockKey, BlockKey] = OrderedDict()
        """The first block of their prefix, by block or state that was handed on."""
        self._looks = 0  # that are left to this call
        self._evicted = 0  # before the hand-over that is being taken
        self._came: Counter[str] = Counter()  # slots of that, by tenant
        self._order: dict[BlockKey, None] = {}  # of its blocks that are here, the most recently used first

    def reset(self) -> None:
        """Forget what was handed on, as for another client."""
        self._ends, self._looked_at, self._chain, self._waiting = None, None, [], []
        self._unpruned = 0
        self._firsts, self._broken = OrderedDict(), set()

    # Handing on.

    def put(self, key: BlockKey, payload: bytes) -> None:
        """A piece that was read out."""
        self._pieces[key] = payload

    def next_page(self, *, begins: bool) -> tuple[tuple[HandedBlock, ...], bool]:
        """The next page, and whether it is the last one. It may be empty before that: a call looks at `MOST_LOOKS`
        blocks. `begins`: hand everything on, again too. Raises DeviceLost."""
        if begins:
            self.reset()
        if self._form is None:
            return (), True
        self._looks = MOST_LOOKS
        self._pieces.clear()
        if self._ends is None:
            self._begin_walk()
        self._prune()
        chosen, size = list[BlockKey](), 0
        while size < PAGE_BYTES and len(chosen) < MOST_BLOCKS and (key := self._next()) is not None:
            count = len(self._blocks.parts_of(key)) * self._piece_bytes
            if count <= MOST_BYTES and self._is_behind_known(key) and self._blocks.read_out(key):
                chosen.append(key)
                size += count
                self._note(key)
            else:
                self._waiting.clear()  # nothing behind it is of use
        if chosen:
            self._copy()
        page = tuple(block for key in chosen if (block := self._handed(key)) is not None)
        self._pieces.clear()
        for key in {*chosen} - {block.key for block in page}:  # the copies failed
            self._firsts.pop(key, None)
            self._waiting.clear()
        return page, self._ends is None

    def _begin_walk(self) -> None:
        self._blocks.begin_ends()
        self._ends = self._blocks.ends()
        self._broken = set()
        self._unpruned = len(self._firsts)

    def _prune(self) -> None:
        """Forget what was handed on and has left since: it may be handed on again."""
        while self._unpruned and self._may_look():
            self._unpruned -= 1
            key = next(iter(self._firsts))
            if self._blocks.is_known(key):
                self._firsts.move_to_end(key)
            else:
                del self._firsts[key]

    def _may_look(self) -> bool:
        """Whether this call may look at one thing more, which counts."""
        self._looks -= 1
        return self._looks >= 0

    def _next(self) -> BlockKey | None:
        """The block or state that is handed on next; None: none in this call, or in this walk (`_ends` is None)."""
        while not self._waiting and not self._unpruned and self._may_look():
            if self._looked_at is not None:
                self._look_back(self._looked_at)
            elif self._ends is not None:
                self._find_end(self._ends)
            else:
                break
        return self._waiting.pop() if self._waiting else None

    def _find_end(self, ends: Iterator[BlockKey | None]) -> None:
        try:
            self._looked_at = next(ends)
        except StopIteration:
            self._ends = None

    def _look_back(self, key: BlockKey) -> None:
        """Look at one block more of a prefix, from its end."""
        if key not in self._firsts:
            self._chain.append(key)
            is_good, before = self._blocks.step_back(key, self._broken)
            # A page of another engine may have named blocks as those before each other.
            if not is_good or len(self._chain) > self._blocks.num_places:
                self._broken.update(self._chain)
                self._looked_at, self._chain = None, []
                return
            if before is not None:
                self._looked_at = before
                return
        self._waiting, self._looked_at, self._chain = self._chain, None, []
        end = self._waiting[0] if self._waiting else key
        if self._blocks.states is not None and (name := prefix_keys.of_state(end)) not in self._firsts:
            self._waiting.insert(0, name)

    def _before(self, key: BlockKey) -> BlockKey | None:
        return prefix_keys.block_of_state(key) if prefix_keys.is_of_state(key) else self._blocks.before(key)

    def _is_behind_known(self, key: BlockKey) -> bool:
        """Whether what comes before it was handed on: since it was looked at, it may have left and come back."""
        before = self._before(key)
        return before is None or before in self._firsts

    def _note(self, key: BlockKey) -> None:
        before = self._before(key)
        self._firsts[key] = key if before is None else self._firsts[before]

    def _handed(self, key: BlockKey) -> HandedBlock | None:
        """A block with what was read out of it; None where that failed, or its content turned out to be no good."""
        pieces = [self._pieces.get(name) for name in self._blocks.parts_of(key)]
        if None in pieces or not self._blocks.is_known(key):
            return None
        content = b"".join(piece for piece in pieces if piece is not None)
        return HandedBlock(key, self._before(key), self._firsts[key], content)

    # Taking.

    def take_in(
        self, form: str, page: Row[HandedBlock], *, begins: bool = False, ends: bool = False
    ) -> tuple[int, int]:
        """Take what there is room for, of the first blocks of a page. Returns how many blocks were looked at, the
        others are to be sent again, and how many of them are here now. `begins`, `ends`: a hand-over does. Raises
        HandoverRefused, before anything is taken."""
        host = self._blocks.host
        if self._form is None or host is None:
            raise HandoverRefused("this engine has no --kv-host-memory for prefixes of others")
        if form != self._form.name:
            raise HandoverRefused("prefixes of another base model, numerical build or size of blocks")
        if len(page) > MOST_BLOCKS:
            raise HandoverRefused(f"a page has {MOST_BLOCKS} blocks at most, this one has {len(page)}")
        for one in page:
            self._check(one)
        if begins:
            self._evicted, self._came, self._order = _evicted(host), Counter(), {}
        num_here, num_seen = 0, len(page)
        for number, one in enumerate(page):
            is_here = self._blocks.is_known(one.key)
            if not is_here and self._is_wanted(one) and self._has_room(host, one.key):
                if not self._blocks.may_bring_in(one.key):
                    num_seen = number
                    break
                is_here = self._bring_in(host, one)
            if is_here:
                num_here += 1
                self._order.setdefault(one.key)
        # A prefix is lost from its end. Pages have its blocks from the first on, and the newest prefixes first. At the
        # end the newest of all pages are put in order: what is behind them was brought in as the newest too.
        for key in reversed([*islice(self._order, MOST_LOOKS)] if ends else [one.key for one in page]):
            host.read(key)
        if ends:
            self._order = {}
        return num_seen, num_here

    def _check(self, one: HandedBlock) -> None:
        """Raise HandoverRefused unless names and size are those of a block, or of a state behind it."""
        key, is_state = one.key, prefix_keys.is_of_state(one.key)
        block = prefix_keys.block_of_state(key) if is_state else key
        names = [each for each in (block, one.before, one.first) if each is not None]
        is_odd = is_state and (self._blocks.states is None or one.before != block)
        if is_odd or not all(map(is_block_key, names)) or len({name[0][0] for name in names}) > 1:
            raise HandoverRefused("a block has no name, or one that no block has")
        wanted = len(self._blocks.parts_of(key)) * self._piece_bytes
        if len(one.payload) != wanted:
            raise HandoverRefused(f"a block has {len(one.payload)} bytes, it must have {wanted}")

    def _is_wanted(self, one: HandedBlock) -> bool:
        return not self._blocks.is_erased(one.key[0][1]) and (
            one.before is None or self._blocks.is_known(one.before)
        )

    def _has_room(self, host: HostTier, key: BlockKey) -> bool:
        """Whether it displaces no more than a hand-over may."""
        size, tenant, most = host.size(key), key[0][0], most_of_tenant(host.num_slots)
        if host.num_taken(tenant) + size > most:
            most //= _MOST_DISPLACED  # it displaces the tenant's own
        if self._came[tenant] + size > most:
            return False
        is_within = _evicted(host) - self._evicted < host.num_slots // _MOST_DISPLACED
        return is_within or len(host) + size <= host.num_slots

    def _bring_in(self, host: HostTier, one: HandedBlock) -> bool:
        size = self._piece_bytes
        pieces = [one.payload[begin : begin + size] for begin in range(0, len(one.payload), size)]
        if not self._blocks.bring_in(one.key, one.before, pieces):
            return False
        self._came[one.key[0][0]] += host.size(one.key)
        return True


def _evicted(host: HostTier) -> int:
    """Slots that others got, of all that is counted."""
    counts = host.counts
    return counts.evicted + counts.states_evicted * host.state_slots
