"""The tokens that a step's rows may have, filled while its forward pass runs.

One thread does it, step after step. llguidance fills the masks of all rows of a step in one call, on threads of its own
and without the interpreter lock; a turn through Python for each row takes several times as long. A row's mask depends
on its grammar and its tokens alone.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

import numpy as np
from llguidance import LLExecutor
from numpy.typing import NDArray

from loraplex.engine.grammar.dictated import DictatesTooMuch
from loraplex.engine.grammar.matchers import GrammarMatchers, SequenceMatcher
from loraplex.engine.grammar.vocabulary import GrammarVocabulary, clear_bits
from loraplex.engine.sampling.sampled_row import SampledRow

_MAX_THREADS = 8
MAX_FORCED = 32
"""Tokens of one sequence that are forced at a time: a step computes a bounded number of positions for it."""


@dataclass(frozen=True, slots=True)
class MaskRow:
    """A sampled row with a grammar: number `row` of the step's. `count` of its output tokens are on the host; if it is
    `pending`, one more is sampled by the step before, in that one's row `source`. `barred` tokens would end it too
    early. Rows of a slice with drafts share the `matcher`, which follows the first one."""

    row: int
    sampled: SampledRow
    matcher: SequenceMatcher
    count: int
    pending: bool
    source: int | None
    barred: list[int]


@dataclass(frozen=True, slots=True)
class FilledMasks:
    """`bits` [C, ⌈V / 32⌉] int32, in the order of the rows; `failed`: by a row's number in the step, why it has no
    mask. Such a row may have any token, and so may one whose token of the step before is not known: nobody uses it."""

    bits: NDArray[np.int32]
    failed: dict[int, str]


@dataclass(frozen=True, slots=True)
class Accepted:
    """The token that was sampled, and those behind it that the grammar forces. `ends`: with the last of them the
    grammar is at its end. `error`: what is wrong, if anything."""

    tokens: tuple[int, ...]
    ends: bool = False
    error: str | None = None


class MaskMaker:
    """`plan`, `start` and `accept` belong to the thread that plans.

    Without `lookahead` the tokens of the step before are known when a step is planned. So
    - tokens that the grammar forces are not sampled one by one, each by a step of its own: one step computes all of
      them (jump-forward decoding, as SGLang names it). The answer is the same: a mask allows the forced token alone.
    - masks are begun when a token is accepted. The cores that compute the forward pass are idle then.
    """

    def __init__(self, matchers: GrammarMatchers, vocab_size: int, *, lookahead: bool) -> None:
        self._matchers = matchers
        self._lookahead = lookahead
        self._num_words = -(-vocab_size // 32)
        self._executor = LLExecutor(max(1, min(_MAX_THREADS, (os.cpu_count() or 1) // 2)))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-masks")
        self._in_use = (
            threading.Lock()
        )  # the matchers: with lookahead, a step is collected while the next is filled

    def plan(
        self, rows: Sequence[SampledRow], eos_ids: Collection[int], sources: Mapping[str, int]
    ) -> tuple[MaskRow, ...]:
        """Those of a step's sampled rows that have a grammar. `sources`: the sampled row of each request in the step
        before."""
        found = []
        for number, row in enumerate(rows):
            if row.request.grammar is None:
                continue
            matcher = self._matchers.matcher(row.request_id)
            # A step that is computed again may have brought tokens that nobody took.
            matcher.known[:] = row.outputs
            source = sources.get(row.request_id) if row.pending_input else None
            barred = _barred(row, eos_ids)
            found.append(MaskRow(number, row, matcher, len(matcher.known), row.pending_input, source, barred))
        return tuple(found)

    def start(
        self, rows: Sequence[MaskRow], previous: Callable[[], Sequence[int | None] | None]
    ) -> Future[FilledMasks]:
        """`previous` waits for the tokens of the step before: None of all, or of a row, where there are none."""
        return self._thread.submit(self._fill, rows, previous)

    def accept(self, row: MaskRow, token: int, *, is_last: bool = True) -> Accepted:
        """A row's token has been sampled, by the oldest step that was not collected. `is_last`: no row of its slice
        behind it is of use."""
        matcher = row.matcher
        if row.sampled.output_index != len(matcher.known):
            return Accepted((token,))  # nobody uses the token
        with self._in_use:
            error = matcher.move_to(len(matcher.known), token)
            try:
                asks = is_last and error is None and not self._lookahead
                forced = self._forced(row) if asks else []
            except DictatesTooMuch as fault:
                return Accepted((token,), error=str(fault))
            if forced:
                error = matcher.move_to(len(matcher.known), token, *forced)
            # One that failed in the mask of the step behind counts as stopped too. That step tells.
            ends = error is None and matcher.inner.is_stopped() and not matcher.inner.is_error()
            matcher.known += (token, *forced)
            return Accepted((token, *forced), ends, error)

    def begin_next(self, rows: Sequence[MaskRow]) -> None:
        """The tokens of these rows have been accepted, and their grammars go on."""
        if rows and not self._lookahead:
            self._thread.submit(self._compute_next, [row.matcher for row in rows])

    def _compute_next(self, matchers: Sequence[SequenceMatcher]) -> None:
        with self._in_use:
            self._compute(matchers)

    def _forced(self, row: MaskRow) -> list[int]:
        """Tokens that must follow the row's new token; what ends the answer before is for the tracker to see. Special
        tokens, and those that the model has not got, are left to a mask. Raises DictatesTooMuch."""
        sampling, vocabulary = row.sampled.request.sampling, self._matchers.vocabulary
        most = min(MAX_FORCED, sampling.max_tokens - row.sampled.output_index - 1)
        if sampling.logprobs is not None or most <= 0:
            return []
        forced = list(islice(row.matcher.dictated(vocabulary.tokenizer), most))
        for place, token in enumerate(forced):
            if token >= vocabulary.vocab_size or vocabulary.tokenizer.is_special_token(token):
                return forced[:place]
        return forced

    def _compute(self, matchers: Sequence[SequenceMatcher]) -> None:
        """Masks for those that have none. Those that dictate too much get none."""
        todo = [
            matcher for matcher in matchers if matcher.mask is None and not self._compute_dictated(matcher)
        ]
        if not todo:
            return
        words = np.zeros((len(todo), self._matchers.vocabulary.num_words), dtype=np.uint32)
        places = [(matcher.inner, place) for place, matcher in enumerate(todo)]
        size = words.shape[1] * words.itemsize
        self._executor.unsafe_compute_mask_ptr(places, words.ctypes.data, size, len(todo))
        for matcher, mask in zip(todo, words, strict=True):
            matcher.mask = mask

    def _compute_dictated(self, matcher: SequenceMatcher) -> bool:
        """Whether the mask needs no llguidance: one token is known to follow, or none may."""
        vocabulary = self._matchers.vocabulary
        try:
            token = matcher.dictated_token(vocabulary.tokenizer)
        except DictatesTooMuch:
            return True
        if token is not None:
            matcher.mask = np.zeros(vocabulary.num_words, dtype=np.uint32)
            matcher.mask[token // 32] = 1 << token % 32
        return token is not None

    def close(self) -> None:
        self._thread.shutdown()

    def _fill(
        self, rows: Sequence[MaskRow], previous: Callable[[], Sequence[int | None] | None]
    ) -> FilledMasks:
        vocabulary = self._matchers.vocabulary
        tokens = previous() if any(row.pending for row in rows) else None
        failed: dict[int, str] = {}
        words = np.full((len(rows), vocabulary.num_words), ~np.uint32(0))
        with self._in_use:
            followed: list[tuple[int, MaskRow, SequenceMatcher]] = []
            drafts: list[SequenceMatcher] = []  # of the slice at hand, behind its drafted tokens
            for place, row in enumerate(rows):
                if offset := row.sampled.offset:
                    # A row behind a token that the grammar bars is of no use.
                    followed += [(place, row, each) for each in drafts[offset - 1 : offset]]
                    continue
                drafts = []
                token = None if tokens is None or row.source is None else tokens[row.source]
                if row.pending and token is None:
                    continue
                if error := row.matcher.move_to(row.count, *([] if token is None else [token])):
                    failed[row.row] = error
                else:
                    followed.append((place, row, row.matcher))
                    drafted = row.sampled.scheduled.drafted
                    if drafted:
                        drafts = row.matcher.behind(drafted, vocabulary.tokenizer.vocab_size)
            self._compute([matcher for _, _, matcher in followed])
            for place, row, matcher in followed:
                mask = words[place]
                if matcher.mask is not None:
                    mask[:] = matcher.mask
                if error := _finish(matcher, row.barred, mask, vocabulary):
                    failed[row.row] = error
                    mask[:] = ~np.uint32(0)
        bits = np.zeros((len(rows), self._num_words), dtype=np.uint32)
        shared = min(bits.shape[1], words.shape[1])
        bits[:, :shared] = words[:, :shared]
        return FilledMasks(bits.view(np.int32), failed)


def _finish(
    matcher: SequenceMatcher, barred: list[int], mask: NDArray[np.uint32], vocabulary: GrammarVocabulary
) -> str | None:
    """Bar what llguidance knows nothing of. Returns what is wrong, if anything."""
    inner = matcher.inner
    if inner.is_error():
        return matcher.failed()
    if matcher.mask is None:
        return matcher.grammar.fault
    used_words = int(np.count_nonzero(mask))
    if used_words == 1:
        vocabulary.allow_dictated_text(inner, mask)
    if vocabulary.known is not None:
        mask &= vocabulary.known
        used_words = int(np.count_nonzero(mask))
    if barred:
        before = mask.copy()
        if clear_bits(mask, barred) and not mask.any():
            mask[:] = before  # the grammar allows the end alone
    return None if used_words else "no token of the model can go on with it"


def _barred(row: SampledRow, eos_ids: Collection[int]) -> list[int]:
    params = row.request.sampling
    if row.output_index < params.min_tokens:
        return [*eos_ids, *params.stop_token_ids]
    return [*eos_ids] if params.ignore_eos else []
