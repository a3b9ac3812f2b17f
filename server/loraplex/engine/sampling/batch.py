"""The options of a step's rows, gathered on the planning thread before the rows can change."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from loraplex.engine.host_to_device import HostToDevice
from loraplex.engine.sampling.noise import uniform
from loraplex.engine.sampling.sampled_row import SampledRow
from loraplex.engine.types import SamplingParams
from loraplex.kernels.sampling.types import TOKEN_BITS, Biases, History, Option, Options, SampleRows

MIN_TEMPERATURE = 1e-20
"""Below it float32 would divide by zero. The largest logit has won long before."""
_KEPT_STEPS = 64
"""Steps without a row for which a sequence is remembered: it may wait for its turn, and counting a long one takes
milliseconds."""
_COLUMNS = tuple(option.name.lower() for option in Option if option is not Option.UNIFORM)
"""Fields of SamplingParams, in the order of the options' columns."""


@dataclass(slots=True)
class _Counted:
    """The different tokens of a sequence as entries of `History`, and where each of them stands."""

    num_tokens: int = 0
    places: dict[int, int] = field(default_factory=dict)
    entries: array[int] = field(default_factory=lambda: array("q"))


class RowMemory:
    """Memory of sequences from one step to the next: how often each token occurs, and their biases. For the
    planning thread alone. Token ids that are not in the vocabulary are passed over: they can neither occur nor be
    sampled."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._known: dict[tuple[str, int], _Counted] = {}
        self._biases: dict[tuple[str, int], tuple[NDArray[np.int64], NDArray[np.float32]]] = {}
        self._rested: dict[tuple[str, int], int] = {}  # steps since its last row

    def entries(self, row: SampledRow) -> NDArray[np.int64]:
        """The entries of `History` for a row that tells its outputs, of a sequence that only ever grows, with the
        drafted tokens that the row assumes: a copy."""
        counted = self._known.setdefault(row.sequence, _Counted())
        places, entries, num_prompt = counted.places, counted.entries, row.num_prompt
        num_tokens = num_prompt + len(row.outputs)
        for at in range(counted.num_tokens, num_tokens):
            is_output = at >= num_prompt
            token = row.outputs[at - num_prompt] if is_output else row.request.prompt_ids[at]
            if not 0 <= token < self._vocab_size:
                continue
            place = places.setdefault(token, len(entries))
            if place == len(entries):
                entries.append(token)
            if is_output:
                entries[place] += 1 << TOKEN_BITS
        counted.num_tokens = num_tokens
        return self._with_drafted(counted, row.drafted) if row.offset else np.array(entries, dtype=np.int64)

    def _with_drafted(self, counted: _Counted, drafted: Sequence[int]) -> NDArray[np.int64]:
        """A copy of the entries in which these tokens count too."""
        entries, new = counted.entries[:], dict[int, int]()
        for token in drafted:
            if 0 <= token < self._vocab_size:
                place = counted.places.get(token, -1)
                if place < 0:
                    place = new.setdefault(token, len(entries))
                    if place == len(entries):
                        entries.append(token)
                entries[place] += 1 << TOKEN_BITS
        return np.array(entries, dtype=np.int64)

    def biases(self, row: SampledRow) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Different tokens of `logit_bias`, and what is added to each."""
        known = self._biases.get(row.sequence)
        if known is None:
            summed: dict[int, float] = {}
            for token, value in row.request.sampling.logit_bias:
                if 0 <= token < self._vocab_size:
                    summed[token] = summed.get(token, 0.0) + value
            tokens, values = np.array(list(summed), np.int64), np.array(list(summed.values()), np.float32)
            known = self._biases[row.sequence] = tokens, values
        return known

    def begin_step(self, sequences: Iterable[tuple[str, int]]) -> None:
        """These have rows in it. Forget those that had none for `_KEPT_STEPS`."""
        if self._known or self._biases:
            rested = {key: steps + 1 for key, steps in self._rested.items() if steps < _KEPT_STEPS}
            self._rested = rested | dict.fromkeys(sequences, 0)
            self._known = {k: v for k, v in self._known.items() if k in self._rested}
            self._biases = {k: v for k, v in self._biases.items() if k in self._rested}


def build_sample_rows(
    rows: Sequence[SampledRow],
    *,
    vocab_size: int,
    eos_ids: frozenset[int],
    memory: RowMemory,
    upload: HostToDevice,
) -> SampleRows:
    """`rows` are in the order of the logits."""
    memory.begin_step(row.sequence for row in rows)
    penalised = [row.request.sampling.has_penalty for row in rows]
    return SampleRows(
        len(rows),
        options=_options(rows, upload, needed=any(penalised)),
        history=_history(rows, penalised, memory, upload) if any(penalised) else None,
        biases=_biases(rows, vocab_size, eos_ids, memory, upload),
    )


def _options(rows: Sequence[SampledRow], upload: HostToDevice, *, needed: bool) -> Options | None:
    """None where all rows are greedy, unless they are `needed`."""
    if not needed and not any(row.request.sampling.temperature > 0.0 for row in rows):
        return None
    host = np.array([_row_options(row.request.sampling, row.output_index) for row in rows])
    return Options(host, upload.doubles(host.ravel()).view(host.shape))


def _row_options(params: SamplingParams, output_index: int) -> list[float]:
    row = [getattr(params, name) for name in _COLUMNS]
    if params.temperature > 0.0:
        row[Option.TEMPERATURE] = max(params.temperature, MIN_TEMPERATURE)
        return [*row, uniform(params.seed, params.choice, output_index)]
    return [*row, 0.0]


def _history(
    rows: Sequence[SampledRow], penalised: Sequence[bool], memory: RowMemory, upload: HostToDevice
) -> History:
    none = np.empty(0, dtype=np.int64)
    entries = [memory.entries(row) if yes else none for row, yes in zip(rows, penalised, strict=True)]
    pending = [int(yes and row.pending_input) for row, yes in zip(rows, penalised, strict=True)]
    return History(
        starts=upload.ints(_starts(entries)),
        entries=upload.ints(np.concatenate(entries)),
        pending=upload.ints(pending),
    )


def _biases(
    rows: Sequence[SampledRow],
    vocab_size: int,
    eos_ids: frozenset[int],
    memory: RowMemory,
    upload: HostToDevice,
) -> Biases | None:
    if not any(row.request.sampling.logit_bias or row.request.sampling.min_tokens for row in rows):
        return None
    tokens: list[NDArray[np.int64]] = []
    values: list[NDArray[np.float32]] = []
    for row in rows:
        own, added = memory.biases(row)
        if barred := barred_tokens(row, vocab_size, eos_ids):
            free = ~np.isin(own, barred)
            own = np.concatenate((own[free], np.array(barred, np.int64)))
            added = np.concatenate((added[free], np.full(len(barred), -np.inf, np.float32)))
        tokens.append(own)
        values.append(added)
    if not any(map(len, tokens)):
        return None
    return Biases(
        starts=upload.ints(_starts(tokens)),
        tokens=upload.ints(np.concatenate(tokens)),
        values=upload.floats(np.concatenate(values)),
    )


def barred_tokens(row: SampledRow, vocab_size: int, eos_ids: frozenset[int]) -> list[int]:
    """The tokens that would end a row before its `min_tokens`, in ascending order. A row with a grammar has them barred
    by its mask, unless the grammar allows nothing else."""
    params = row.request.sampling
    if row.output_index >= params.min_tokens or row.request.grammar is not None:
        return []
    ends = set(params.stop_token_ids) if params.ignore_eos else eos_ids.union(params.stop_token_ids)
    return sorted(token for token in ends if 0 <= token < vocab_size)


def _starts(lists: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate(([0], np.cumsum([len(each) for each in lists]))).astype(np.int64)
