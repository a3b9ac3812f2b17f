"""The longest match of a sequence's newest tokens in the sequence itself."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Row

MIN_MATCH, MAX_MATCH = 2, 8
"""Tokens."""
INDEXED_A_CALL = 512
"""Positions. A long prompt is indexed over several calls."""
_MAX_CHAIN = 16
_MAX_HEADS = 1 << 16


def match_length(tokens: Row[int], other: Row[int], place: int) -> int:
    """How many of the last `MAX_MATCH` tokens stand before `place` in `other` too."""
    most = min(MAX_MATCH, place, len(tokens))
    length = 0
    while length < most and other[place - 1 - length] == tokens[-1 - length]:
        length += 1
    return length


class OwnIndex:
    """Chains of the places behind equal bigrams of one sequence: `_heads` has the newest place by the bigram's hash,
    `_before[place]` the next older one of the same hash."""

    __slots__ = ("_before", "_heads", "_mask")

    def __init__(self, most_tokens: int) -> None:
        size = 256
        while size < min(most_tokens, _MAX_HEADS):
            size *= 2
        self._mask = size - 1
        self._heads = array("i", (-1,)) * size
        self._before = array("i", (-1, -1))

    def find(self, tokens: list[int], follow: int) -> tuple[int, int]:
        """The longest match of the end of `tokens` and the place behind it; the newest of several. (0, 0) if there is
        none. `follow` is one more place to look at (-1: none). At most `INDEXED_A_CALL` new places are indexed."""
        before, heads, mask, end = self._before, self._heads, self._mask, len(tokens)
        for place in range(len(before), min(end, len(before) + INDEXED_A_CALL)):
            bucket = hash((tokens[place - 2], tokens[place - 1])) & mask
            before.append(heads[bucket])
            heads[bucket] = place
        best, found = MIN_MATCH - 1, 0
        place = heads[hash((tokens[-2], tokens[-1])) & mask]
        token = tokens[-1 - best]
        for _ in range(_MAX_CHAIN):
            # Only a place that matches at this distance can be longer than the best one.
            if place > best and tokens[place - 1 - best] == token:
                length = match_length(tokens, tokens, place)
                if length > best:
                    best, found = length, place
                    if best in (MAX_MATCH, end):
                        break
                    token = tokens[-1 - best]
            elif place < 0:
                break
            place = before[place]
        # A chain that is too long to walk does not end what was followed before.
        if 0 < follow < end and best < MAX_MATCH:
            length = match_length(tokens, tokens, follow)
            if length > best:
                best, found = length, follow
        return (best, found) if found else (0, 0)
