"""Answers of Tinker's samples, as its protocol buffers (`tinker_public.proto` of the SDK 0.38.0)."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from loraplex.api.openai.delta import Delta
from loraplex.api.openai.formats import WholeChoice
from loraplex.api.tinker.schemas import SampleRequest
from loraplex.engine.logprobs import Logprobs
from loraplex.engine.types import Usage

_MASK = -99999.0
"""Tinker's log probability of a place that has none, among likely tokens."""
_VARINT, _BYTES = 0, 2
"""Wire types of protocol buffers."""


@dataclass
class _Sequence:
    tokens: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    top: _Likely | None = None
    stopped: bool = False


class _Likely:
    """The k most likely tokens at each place: int32 and float32 [places, k]."""

    def __init__(self, k: int) -> None:
        self._k = k
        self._ids = array("i")
        self._logprobs = array("f")

    def add(self, top: Sequence[tuple[int, float]]) -> None:
        filled = [*top[: self._k], *[(0, _MASK)] * (self._k - len(top))]
        self._ids.extend(token_id for token_id, _ in filled)
        self._logprobs.extend(logprob for _, logprob in filled)

    def message(self) -> bytes:
        return (
            _data(1, _little(self._ids))
            + _data(2, _little(self._logprobs))
            + _number(3, self._k)
            + _number(4, len(self._ids) // self._k)
        )


class SampleAnswer:
    """The answer to `asked`, whose prompt has `prompt_tokens` tokens. A sequence has the tokens that end it, those of
    a stop string too, each with its log probability."""

    def __init__(self, asked: SampleRequest, prompt_tokens: int) -> None:
        self._asked = asked
        self._prompt_tokens = prompt_tokens
        self._sequences = [_Sequence() for _ in range(asked.num_samples)]
        if asked.topk_sample_logprobs:
            for sequence in self._sequences:
                sequence.top = _Likely(asked.topk_sample_logprobs)
        last = asked.prompt_logprobs_last_n
        self._unscored = 1 if last is None else prompt_tokens - last
        self._prompt = array("f", [float("nan")])
        self._top = _Likely(asked.topk_prompt_logprobs) if asked.topk_prompt_logprobs else None
        if self._top is not None:
            self._top.add(())

    def add(self, choice: WholeChoice, delta: Delta) -> None:
        sequence = self._sequences[delta.index]
        sequence.tokens.extend(delta.token_ids)
        for token in delta.tokens or ():
            assert token.logprob is not None
            sequence.logprobs.append(token.logprob)
            if sequence.top is not None:
                sequence.top.add(token.top)
        if delta.prompt is not None:
            self._add_prompt(delta.prompt)
        if delta.finish_reason is not None:
            sequence.stopped = delta.finish_reason == "stop"

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        body = b"".join(_data(1, _sequence(sequence)) for sequence in self._sequences)
        if self._asked.prompt_logprobs:
            body += _data(2, _little(self._prompt))
        if self._top is not None:
            body += _data(3, self._top.message())
        return body + _number(4, min(usage.cached_tokens, self._prompt_tokens))

    def _add_prompt(self, logprobs: Logprobs) -> None:
        for own, top in logprobs.rows():
            shown = len(self._prompt) >= self._unscored
            self._prompt.append(own if shown else float("nan"))
            if self._top is not None:
                self._top.add(top if shown else ())


def _sequence(sequence: _Sequence) -> bytes:
    assert len(sequence.tokens) == len(sequence.logprobs)
    body = _number(1, 0 if sequence.stopped else 1)
    body += _data(2, _little(sequence.tokens)) + _data(3, _little(sequence.logprobs))
    return body if sequence.top is None else body + _data(4, sequence.top.message())


def _little(values: array[int] | array[float]) -> bytes:
    return struct.pack(f"<{len(values)}{values.typecode}", *values)


def _varint(value: int) -> bytes:
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    data.append(value)
    return bytes(data)


def _number(number: int, value: int) -> bytes:
    """A field with this number that holds a number of at least 0."""
    return _varint(number << 3 | _VARINT) + _varint(value)


def _data(number: int, data: bytes) -> bytes:
    """A field with this number that holds bytes or a message."""
    return _varint(number << 3 | _BYTES) + _varint(len(data)) + data
