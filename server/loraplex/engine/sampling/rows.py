"""The sampling parameters of a step's rows for sampling on the device: `loraplex.kernels.sampling.types` from the rows'
options."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from loraplex.engine.host_to_device import HostToDevice
from loraplex.engine.sampling.batch import MIN_TEMPERATURE, barred_tokens
from loraplex.engine.sampling.noise import uniform
from loraplex.engine.sampling.sampled_row import SampledRow
from loraplex.kernels.sampling.types import TOKEN_BITS, Biases, Draws, History, SampleRows


@dataclass(slots=True)
class _Counted:
    """The different tokens of a sequence as entries of `History`, and where each of them stands."""

    num_tokens: int = 0
    places: dict[int, int] = field(default_factory=dict)
    entries: array[int] = field(default_factory=lambda: array("q"))


class TokenCounts:
    """How often each token occurs in sequences, counted from step to step instead of from the beginning. For the
    planning thread alone. Token ids that are not in the vocabulary are passed over."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._known: dict[str, _Counted] = {}

    def entries(self, row: SampledRow) -> NDArray[np.int64]:
        """The entries of `History` for a row that tells its outputs, of a sequence that only ever grows, with the
        drafted tokens that the row assumes: a copy."""
        counted = self._known.setdefault(row.request_id, _Counted())
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

    def retain_requests(self, request_ids: Iterable[str]) -> None:
        """Forget all others."""
        if self._known:
            keep = set(request_ids)
            self._known = {k: v for k, v in self._known.items() if k in keep}


def build_sample_rows(
    rows: Sequence[SampledRow],
    *,
    vocab_size: int,
    eos_ids: frozenset[int],
    counts: TokenCounts,
    upload: HostToDevice,
) -> SampleRows:
    """`rows` are in the order of the logits. Token ids beyond the vocabulary are passed over:
    they can neither occur nor be sampled."""
    counts.retain_requests(row.request_id for row in rows)
    return SampleRows(
        len(rows),
        history=_history(rows, counts, upload),
        biases=_biases(rows, vocab_size, eos_ids, upload),
        draws=_draws(rows, vocab_size, upload),
    )


def _history(rows: Sequence[SampledRow], counts: TokenCounts, upload: HostToDevice) -> History | None:
    params = [row.request.sampling for row in rows]
    penalised = [p.has_penalty for p in params]
    if not any(penalised):
        return None
    none = np.empty(0, dtype=np.int64)
    entries = [counts.entries(row) if yes else none for row, yes in zip(rows, penalised, strict=True)]
    pending = [int(yes and row.pending_input) for row, yes in zip(rows, penalised, strict=True)]
    numbers = upload.floats(
        [p.repetition_penalty for p in params]
        + [p.presence_penalty for p in params]
        + [p.frequency_penalty for p in params]
    ).view(3, len(rows))
    return History(
        starts=upload.ints(_starts([len(found) for found in entries])),
        entries=upload.ints(np.concatenate(entries)),
        repetition=numbers[0],
        presence=numbers[1],
        frequency=numbers[2],
        pending=upload.ints(pending),
    )


def _biases(
    rows: Sequence[SampledRow], vocab_size: int, eos_ids: frozenset[int], upload: HostToDevice
) -> Biases | None:
    found: list[dict[int, float]] = []
    for row in rows:
        biases: dict[int, float] = {}
        for token, value in row.request.sampling.logit_bias:
            if 0 <= token < vocab_size:
                biases[token] = biases.get(token, 0.0) + value
        biases |= dict.fromkeys(barred_tokens(row, vocab_size, eos_ids), float("-inf"))
        found.append(biases)
    if not any(found):
        return None
    return Biases(
        starts=upload.ints(_starts([len(biases) for biases in found])),
        tokens=upload.ints([token for biases in found for token in biases]),
        values=upload.floats([value for biases in found for value in biases.values()]),
    )


def _draws(rows: Sequence[SampledRow], vocab_size: int, upload: HostToDevice) -> Draws | None:
    params = [row.request.sampling for row in rows]
    if not any(p.temperature > 0.0 for p in params):
        return None
    temperature = [max(p.temperature, MIN_TEMPERATURE) if p.temperature > 0.0 else 0.0 for p in params]
    noise = [
        uniform(p.seed, p.choice, row.output_index) if p.temperature > 0.0 else 0.0
        for p, row in zip(params, rows, strict=True)
    ]
    limits = [p.top_k if 0 < p.top_k < vocab_size else 0 for p in params]
    floats = upload.floats(temperature + [p.min_p for p in params]).view(2, len(rows))
    doubles = upload.doubles([p.top_p for p in params] + noise).view(2, len(rows))
    return Draws(
        temperature=floats[0],
        min_p=floats[1],
        top_k=upload.ints(limits),
        top_p=doubles[0],
        uniform=doubles[1],
        ranked=any(p.temperature > 0.0 and (k or p.top_p < 1.0) for p, k in zip(params, limits, strict=True)),
    )


def _starts(sizes: Sequence[int]) -> NDArray[np.int64]:
    return np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)
