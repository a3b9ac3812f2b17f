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

import numpy as np
from llguidance import LLExecutor
from numpy.typing import NDArray

from loraplex.engine.grammar.matchers import GrammarMatchers, SequenceMatcher, reason_of
from loraplex.engine.grammar.vocabulary import GrammarVocabulary, clear_bits
from loraplex.engine.types import ScheduledSequence, SequenceState

_MAX_THREADS = 8


@dataclass(frozen=True, slots=True)
class MaskRow:
    """A sampled row with a grammar: number `row` of the step's. `count` of its output tokens are on the host; if it is
    `pending`, one more is sampled by the step before, in that one's row `source`. `barred` tokens would end it too
    early."""

    row: int
    scheduled: ScheduledSequence
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


class MaskMaker:
    """`plan`, `start` and `accept` belong to the thread that plans."""

    def __init__(self, matchers: GrammarMatchers, vocab_size: int) -> None:
        self._matchers = matchers
        self._num_words = -(-vocab_size // 32)
        self._executor = LLExecutor(max(1, min(_MAX_THREADS, (os.cpu_count() or 1) // 2)))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-masks")
        self._in_use = (
            threading.Lock()
        )  # the matchers: with lookahead, a step is collected while the next is filled

    def plan(
        self, rows: Sequence[ScheduledSequence], eos_ids: Collection[int], sources: Mapping[str, int]
    ) -> tuple[MaskRow, ...]:
        """Those of a step's sampled rows that have a grammar. `sources`: the sampled row of each request in the step
        before."""
        found = []
        for number, row in enumerate(rows):
            seq = row.seq
            if seq.request.grammar is None:
                continue
            matcher = self._matchers.matcher(seq.request_id)
            matcher.known += seq.token_ids[seq.num_prompt + len(matcher.known) :]
            source = sources.get(seq.request_id) if row.pending_input else None
            barred = _barred(row, eos_ids)
            found.append(MaskRow(number, row, matcher, len(matcher.known), row.pending_input, source, barred))
        return tuple(found)

    def start(
        self, rows: Sequence[MaskRow], previous: Callable[[], Sequence[int | None] | None]
    ) -> Future[FilledMasks]:
        """`previous` waits for the tokens of the step before: None of all, or of a row, where there are none."""
        return self._thread.submit(self._fill, rows, previous)

    def accept(self, row: MaskRow, token: int) -> tuple[bool, str | None]:
        """A row's token has been sampled, by the oldest step that was not collected. Returns whether the grammar ends
        with it, and what is wrong, if anything."""
        seq, matcher = row.scheduled.seq, row.matcher
        if seq.state is SequenceState.FINISHED or row.scheduled.output_index != seq.num_outputs:
            return False, None  # nobody uses the token
        with self._in_use:
            matcher.known += seq.token_ids[seq.num_prompt + len(matcher.known) :]
            error = matcher.move_to(len(matcher.known), token)
            return error is None and matcher.inner.is_stopped(), error

    def close(self) -> None:
        self._thread.shutdown()

    def _fill(
        self, rows: Sequence[MaskRow], previous: Callable[[], Sequence[int | None] | None]
    ) -> FilledMasks:
        vocabulary = self._matchers.vocabulary
        tokens = previous() if any(row.pending for row in rows) else None
        words = np.zeros((len(rows), vocabulary.num_words), dtype=np.uint32)
        failed: dict[int, str] = {}
        filled: list[tuple[MaskRow, NDArray[np.uint32]]] = []
        with self._in_use:
            todo = []
            for place, row in enumerate(rows):
                token = None if tokens is None or row.source is None else tokens[row.source]
                if row.pending and token is None:
                    words[place] = ~np.uint32(0)
                elif error := row.matcher.move_to(row.count, token):
                    failed[row.row] = error
                    words[place] = ~np.uint32(0)
                else:
                    todo.append((row.matcher.inner, place))
                    filled.append((row, words[place]))
            if todo:
                size = words.shape[1] * words.itemsize
                self._executor.unsafe_compute_mask_ptr(todo, words.ctypes.data, size, len(rows))
            used_words = np.count_nonzero(words, axis=1).tolist()
            for (row, mask), (_, place) in zip(filled, todo, strict=True):
                if error := _finish(row, mask, used_words[place], vocabulary):
                    failed[row.row] = error
                    mask[:] = ~np.uint32(0)
        bits = np.zeros((len(rows), self._num_words), dtype=np.uint32)
        shared = min(bits.shape[1], words.shape[1])
        bits[:, :shared] = words[:, :shared]
        return FilledMasks(bits.view(np.int32), failed)


def _finish(
    row: MaskRow, mask: NDArray[np.uint32], used_words: int, vocabulary: GrammarVocabulary
) -> str | None:
    """Bar what llguidance knows nothing of. `used_words` of the mask are not 0. Returns what is wrong, if anything."""
    inner = row.matcher.inner
    if inner.is_error():
        return reason_of(inner)
    if used_words == 1:
        vocabulary.allow_dictated_text(inner, mask)
    if vocabulary.known is not None:
        mask &= vocabulary.known
        used_words = int(np.count_nonzero(mask))
    if row.barred:
        before = mask.copy()
        if clear_bits(mask, row.barred) and not mask.any():
            mask[:] = before  # the grammar allows the end alone
    return None if used_words else "no token of the model can go on with it"


def _barred(row: ScheduledSequence, eos_ids: Collection[int]) -> list[int]:
    params = row.seq.request.sampling
    if row.output_index < params.min_tokens:
        return [*eos_ids, *params.stop_token_ids]
    return [*eos_ids] if params.ignore_eos else []
