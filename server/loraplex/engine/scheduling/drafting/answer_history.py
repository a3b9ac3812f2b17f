"""Finished answers, and the longest match of a sequence's newest tokens in those of its namespace.

Their memory is bounded for each tenant and in all. Tokens are 4 bytes, and so are places in a table that has about two
of them for each token; a dict of lists takes some 200 bytes a token. The table grows by one bucket at a time (Litwin,
"Linear Hashing", VLDB 1980), so that no call copies it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from sys import getsizeof

from loraplex.engine.scheduling.drafting.own_index import MAX_MATCH, MIN_MATCH, match_length
from loraplex.engine.types import Namespace

_WAYS = 4
_PLACE_BITS = 11
_OFFSET = (1 << _PLACE_BITS) - 1
_TOKENS_A_BUCKET = 2
_MAX_SLOTS = 1 << (31 - _PLACE_BITS)
_ANSWER_BYTES = 640
"""An answer without its tokens: its record, its places in the two orders of use, and their growth."""
_HISTORY_BYTES = 1536
"""A namespace without its answers and its table, and what its tenant has of its own."""


class KeptAnswer:
    """The tokens of a finished answer, behind the last ones of its prompt."""

    __slots__ = ("history", "slot", "tokens")

    def __init__(self, history: AnswerHistory, slot: int, tokens: array[int]) -> None:
        self.history = history
        self.slot = slot
        self.tokens = tokens


class AnswerHistory:
    """Finished answers of one namespace, and the newest places behind their bigrams.

    A place is `slot << _PLACE_BITS | offset`. The table has buckets of `_WAYS` places, newest first; an older one drops
    out. Places in answers that were dropped are left where they are: a candidate counts only where its tokens match.
    """

    __slots__ = ("_free", "_level", "_num_buckets", "_num_tokens", "_places", "num_answers", "slots", "space")

    def __init__(self, space: Namespace) -> None:
        self.space = space
        self.slots: list[KeptAnswer | None] = []
        self.num_answers = 0
        self._free: list[int] = []
        self._num_tokens = 0
        self._num_buckets = self._level = 8
        self._places = array("i", (-1,)) * (_WAYS * 8)

    @property
    def num_bytes(self) -> int:
        lists = getsizeof(self._places) + getsizeof(self.slots) + getsizeof(self._free)
        return _HISTORY_BYTES + lists + self.num_answers * _ANSWER_BYTES + self._num_tokens * 4

    def add(self, tokens: array[int]) -> KeptAnswer:
        """Keep an answer and index it. No more than `_MAX_SLOTS` can be here at once."""
        slot = self._free.pop() if self._free else len(self.slots)
        if slot == len(self.slots):
            self.slots.append(None)
        answer = self.slots[slot] = KeptAnswer(self, slot, tokens)
        self.num_answers += 1
        self._num_tokens += len(tokens)
        while self._num_buckets * _TOKENS_A_BUCKET < self._num_tokens:
            self._grow()
        places = self._places
        one, two = tokens[0], tokens[1]
        for place, token in enumerate(tokens[2:], slot << _PLACE_BITS | 2):
            first = self._first(one, two)
            places[first + 3] = places[first + 2]
            places[first + 2] = places[first + 1]
            places[first + 1] = places[first]
            places[first] = place
            one, two = two, token
        return answer

    def remove(self, answer: KeptAnswer) -> None:
        self.slots[answer.slot] = None
        self._free.append(answer.slot)
        self.num_answers -= 1
        self._num_tokens -= len(answer.tokens)

    def find(
        self, tokens: list[int], follow: KeptAnswer | None, offset: int
    ) -> tuple[int, KeptAnswer | None, int]:
        """The longest match of the end of `tokens`, the answer and the offset behind it; (0, None, 0) if there is none.
        `offset` in the answer `follow` is one more place to look at."""
        first = self._first(tokens[-2], tokens[-1])
        best, found, behind = MIN_MATCH - 1, None, 0
        for place in self._places[first : first + _WAYS]:
            answer = self.slots[place >> _PLACE_BITS] if place >= 0 else None
            if answer is None:
                continue
            start, held = place & _OFFSET, answer.tokens
            # Only a place that matches at this distance can be longer than the best one.
            if best < start < len(held) and held[start - 1 - best] == tokens[-1 - best]:
                length = match_length(tokens, held, start)
                if length > best:
                    best, found, behind = length, answer, start
                    if best in (MAX_MATCH, len(tokens)):
                        break
        if follow is not None and best < MAX_MATCH and offset < len(follow.tokens):
            length = match_length(tokens, follow.tokens, offset)
            if length > best:
                best, found, behind = length, follow, offset
        return (0, None, 0) if found is None else (best, found, behind)

    def _first(self, one: int, two: int) -> int:
        """Where the bucket of a bigram begins."""
        bucket = hash((one, two)) & (2 * self._level - 1)
        return _WAYS * (bucket if bucket < self._num_buckets else bucket - self._level)

    def _grow(self) -> None:
        """One bucket more, which takes its places from one other bucket."""
        first = _WAYS * (self._num_buckets - self._level)
        held = self._places[first : first + _WAYS]
        added = _WAYS * self._num_buckets
        self._places.extend([-1] * _WAYS)
        self._num_buckets += 1
        kept, moved = [-1] * _WAYS, [-1] * _WAYS
        num_kept = num_moved = 0
        for place in held:
            answer = None if place < 0 else self.slots[place >> _PLACE_BITS]
            offset = place & _OFFSET
            if answer is None or offset >= len(answer.tokens):
                continue
            if self._first(answer.tokens[offset - 2], answer.tokens[offset - 1]) == added:
                moved[num_moved] = place
                num_moved += 1
            else:
                kept[num_kept] = place
                num_kept += 1
        self._places[first : first + _WAYS] = array("i", kept)
        self._places[added:] = array("i", moved)
        if self._num_buckets == 2 * self._level:
            self._level = self._num_buckets


class Histories:
    """The histories of all namespaces, within `bytes_per_tenant` and `total_bytes`.

    The answer that was used longest ago is dropped first: of the same tenant's above the first limit, of all above the
    second.
    """

    def __init__(self, bytes_per_tenant: int, total_bytes: int) -> None:
        # A slot has a number of 31 - _PLACE_BITS bits.
        self._bytes_per_tenant = min(bytes_per_tenant, total_bytes, _MAX_SLOTS * _ANSWER_BYTES)
        self._total_bytes = total_bytes
        self.by_namespace: dict[Namespace, AnswerHistory] = {}
        self._answers: OrderedDict[KeptAnswer, None] = OrderedDict()  # the one used longest ago first
        self._by_tenant: dict[str, OrderedDict[KeptAnswer, None]] = {}
        self._tenant_bytes: dict[str, int] = {}
        self.num_bytes = 0

    def add(self, space: Namespace, tokens: array[int]) -> None:
        tenant_id = space[0]
        needed = _HISTORY_BYTES + _ANSWER_BYTES + 16 * len(tokens)  # with its part of the table
        if needed > self._bytes_per_tenant:
            return
        self._make_room(tenant_id, needed)
        history = self.by_namespace.get(space)
        if history is None:
            history = self.by_namespace[space] = AnswerHistory(space)
            self._count(tenant_id, history.num_bytes)
        before = history.num_bytes
        answer = history.add(tokens)
        self._count(tenant_id, history.num_bytes - before)
        self._answers[answer] = None
        self._by_tenant.setdefault(tenant_id, OrderedDict())[answer] = None
        self._make_room(tenant_id, 0)  # arrays grow ahead of what they hold

    def used(self, answer: KeptAnswer) -> None:
        if answer in self._answers:
            self._answers.move_to_end(answer)
            self._by_tenant[answer.history.space[0]].move_to_end(answer)

    def holds(self, answer: KeptAnswer) -> bool:
        return answer in self._answers

    def forget(self, digest: str) -> None:
        for history in [history for space, history in self.by_namespace.items() if space[1] == digest]:
            for answer in [answer for answer in history.slots if answer is not None]:
                self._drop(answer)

    def _make_room(self, tenant_id: str, needed: int) -> None:
        of_tenant = self._by_tenant.get(tenant_id)
        while of_tenant and self._tenant_bytes[tenant_id] + needed > self._bytes_per_tenant:
            self._drop(next(iter(of_tenant)))
        while self._answers and self.num_bytes + needed > self._total_bytes:
            self._drop(next(iter(self._answers)))

    def _drop(self, answer: KeptAnswer) -> None:
        history = answer.history
        tenant_id = history.space[0]
        before = history.num_bytes
        history.remove(answer)
        del self._answers[answer]
        of_tenant = self._by_tenant[tenant_id]
        del of_tenant[answer]
        after = history.num_bytes
        if not history.num_answers:
            del self.by_namespace[history.space]
            after = 0
        self._count(tenant_id, after - before)
        if not of_tenant:
            del self._by_tenant[tenant_id], self._tenant_bytes[tenant_id]

    def _count(self, tenant_id: str, num_bytes: int) -> None:
        self._tenant_bytes[tenant_id] = self._tenant_bytes.get(tenant_id, 0) + num_bytes
        self.num_bytes += num_bytes
