"""Proposes the next tokens of sequences, and learns from what became of them."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

from loraplex.engine.kv.prefix_keys import namespace
from loraplex.engine.scheduling.drafting.acceptance import TRIAL_GAIN, Acceptance, cell_of
from loraplex.engine.scheduling.drafting.answer_history import Histories, KeptAnswer
from loraplex.engine.scheduling.drafting.own_index import MAX_MATCH, MIN_MATCH, OwnIndex
from loraplex.engine.types import Namespace, Sequence

DraftSource = Literal["own", "history"]
MAX_DRAFT = 8
MAX_ANSWER = 1024
"""Tokens of a finished answer that are kept: its first ones."""
MAX_LEARNED = 1024
"""Namespaces whose acceptance is remembered. The one that was used longest ago is dropped first."""
_NEW_TOKENS = 2048
"""Output tokens for which a sequence's index has room without longer chains."""
_SOURCES: tuple[DraftSource, DraftSource] = ("own", "history")
_Found = tuple[int, int, tuple[int, ...]]
"""A source by its number in `_SOURCES`, the length of the match, and the tokens that followed it."""


@dataclass(frozen=True, slots=True)
class Draft:
    """`token_ids`: 1 … MAX_DRAFT guessed tokens. `gains[i]`: the estimated probability that tokens 0 … i are all
    accepted; it never rises."""

    token_ids: tuple[int, ...]
    gains: tuple[float, ...]
    source: DraftSource


class _Drafting:
    """The state of one sequence. `own_from`, `answer_from`: the places that the last matches were followed from,
    when the sequence had `num_tokens`. `cells` are those of its last matches by source (-1: none), `is_trial` says what
    its last draft was."""

    __slots__ = (
        "answer",
        "answer_from",
        "cells",
        "index",
        "is_trial",
        "lucky",
        "num_tokens",
        "own_from",
        "space",
    )

    def __init__(self, seq: Sequence) -> None:
        num_tokens = len(seq.token_ids)
        self.space: Namespace = namespace(seq.request)
        self.index = OwnIndex(min(seq.most_computed + 1, num_tokens + _NEW_TOKENS))
        self.own_from = -1
        self.answer: KeptAnswer | None = None
        self.answer_from = 0
        self.num_tokens = num_tokens
        self.cells = [-1, -1]
        self.lucky = True
        self.is_trial = False


class Drafter:
    """Proposals for sequences that decode, and what was learned of them.

    Finished answers of a tenant take `bytes_per_tenant` at most, over all its namespaces, and those of all tenants
    `total_bytes`; `num_bytes` is what they take. Beside that, each sequence that a proposal was asked for has an index
    of 4 bytes a token and of at most 256 KiB, until `closed`; and MAX_LEARNED namespaces have less than 2 KiB each for
    what was learned. `num_drafted` and `num_accepted` count tokens by source.
    """

    def __init__(self, *, bytes_per_tenant: int, total_bytes: int) -> None:
        self._histories = Histories(bytes_per_tenant, total_bytes)
        self._sequences: dict[Sequence, _Drafting] = {}
        self._learned: OrderedDict[Namespace, Acceptance] = OrderedDict()  # the one used longest ago first
        self.num_drafted: dict[DraftSource, int] = dict.fromkeys(_SOURCES, 0)
        self.num_accepted: dict[DraftSource, int] = dict.fromkeys(_SOURCES, 0)

    @property
    def num_bytes(self) -> int:
        """Bytes of finished answers and their indexes."""
        return self._histories.num_bytes

    def propose(self, seq: Sequence, most: int) -> Draft | None:
        """Guess at most `most` tokens that follow `seq.token_ids`, from the source whose gains promise more. None if
        its newest two tokens never occurred before. Reads nothing but the sequence's own tokens and what its namespace
        has."""
        tokens = seq.token_ids
        most = min(most, MAX_DRAFT)
        if most < 1 or len(tokens) < MIN_MATCH:
            return None
        drafting = self._sequences.get(seq)
        if drafting is None:
            drafting = self._sequences[seq] = _Drafting(seq)
        found = self._search(drafting, tokens, most)
        return self._choose(drafting, found) if found else None

    def _search(self, drafting: _Drafting, tokens: list[int], most: int) -> list[_Found]:
        """The longest match of each source that has one: the source, the match's length, and what followed."""
        grown = len(tokens) - drafting.num_tokens
        drafting.num_tokens = len(tokens)
        found: list[_Found] = []
        follow = drafting.own_from + grown if drafting.own_from > 0 else -1
        length, place = drafting.index.find(tokens, follow)
        drafting.own_from = place if length else -1
        if length:
            found.append((0, length, _repeat(tokens, place, most)))
        history = self._histories.by_namespace.get(drafting.space)
        if history is None:
            drafting.answer = None
            return found
        answer = drafting.answer
        if answer is not None and not self._histories.holds(answer):
            answer = None
        length, answer, place = history.find(tokens, answer, drafting.answer_from + grown)
        drafting.answer, drafting.answer_from = answer, place
        if answer is not None:
            found.append((1, length, tuple(answer.tokens[place : place + most])))
        return found

    def _choose(self, drafting: _Drafting, found: list[_Found]) -> Draft:
        """The draft that promises most, or one to try a kind of drafts that was not taken for long."""
        learned = self._acceptance(drafting.space)
        drafting.is_trial = False
        best, promised = found[0], -1.0
        first = then = 0.0
        for match in found:
            source, length, token_ids = match
            cell = drafting.cells[source] = cell_of(source, length, lucky=drafting.lucky)
            gain, later = learned.chances(cell)
            if learned.is_due(cell):
                drafting.is_trial = True
                return Draft(token_ids[:1], (TRIAL_GAIN,), _SOURCES[source])
            count = len(token_ids)
            total = gain * ((1 - later**count) / (1 - later) if later < 1 else count)
            if total > promised:
                best, first, then, promised = match, gain, later, total
        gains = [first]
        for _ in range(len(best[2]) - 1):
            first *= then
            gains.append(first)
        return Draft(best[2], tuple(gains), _SOURCES[best[0]])

    def _acceptance(self, space: Namespace) -> Acceptance:
        learned = self._learned.get(space)
        if learned is None:
            learned = self._learned[space] = Acceptance()
            if len(self._learned) > MAX_LEARNED:
                self._learned.popitem(last=False)
        else:
            self._learned.move_to_end(space)
        return learned

    def verified(self, seq: Sequence, source: DraftSource, num_drafted: int, num_accepted: int) -> None:
        """Learn from a step's outcome: the first `num_accepted` of `num_drafted` tokens of the sequence's last proposal
        were right."""
        self.num_drafted[source] += num_drafted
        self.num_accepted[source] += num_accepted
        drafting = self._sequences.get(seq)
        number = _SOURCES.index(source)
        if drafting is None or (cell := drafting.cells[number]) < 0:
            return
        self._acceptance(drafting.space).learn(cell, num_drafted, num_accepted, is_trial=drafting.is_trial)
        drafting.lucky = num_accepted > 0
        if number == 1 and num_accepted and drafting.answer is not None:
            self._histories.used(drafting.answer)

    def finished(self, seq: Sequence) -> None:
        """Keep the answer of a sequence that has come to a proper end for its namespace."""
        if not seq.num_outputs:
            return
        # With the end of the prompt, so that an answer's beginning can be found.
        start = max(0, seq.num_prompt - MAX_MATCH)
        tokens = array("i", seq.token_ids[start : seq.num_prompt + MAX_ANSWER])
        if len(tokens) > MIN_MATCH:
            self._histories.add(namespace(seq.request), tokens)

    def closed(self, seq: Sequence) -> None:
        """Free what is kept of a sequence that has ended in any way."""
        self._sequences.pop(seq, None)

    def forget(self, digest: str) -> None:
        """Drop the answers of an adapter version, and what was learned of it."""
        self._histories.forget(digest)
        for space in [space for space in self._learned if space[1] == digest]:
            del self._learned[space]

    def drop_all(self) -> None:
        """Free everything but the counts: nothing more will be asked."""
        self._histories = Histories(0, 0)
        self._sequences.clear()
        self._learned.clear()


def _repeat(tokens: list[int], place: int, most: int) -> tuple[int, ...]:
    """`most` tokens from this place on. Behind the last one, the copy itself goes on."""
    copied = tokens[place : place + most]
    while len(copied) < most:
        copied += copied[: most - len(copied)]
    return tuple(copied)
