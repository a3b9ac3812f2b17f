"""Log probabilities in OpenAI's two shapes, and those of prompts in vLLM's.

What is told of a token becomes JSON at once and is kept so: as Python objects an answer's worth would take ten times
the room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec

from loraplex.api.codec import dumps
from loraplex.engine.logprobs import Logprobs
from loraplex.serving.text.processor import TokenText

REMEMBERED_TOKENS = 1 << 14
"""How many tokens' names as JSON are remembered; some 200 bytes each."""

TokenOf = Callable[[int], TokenText]
Rendered = tuple[bytes, ...]
"""The items of each of a shape's lists, as JSON without the brackets."""


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token with its log probability and the most likely ones at its place, the likeliest first, or itself and then
    those that the request names. `offset` is where its text begins in the choice's text. The first token of a prompt
    has no `logprob`."""

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    offset: int

    @property
    def alternatives(self) -> Sequence[tuple[int, float]]:
        """`top`, where of equally likely ones the token itself is the first."""
        if self.logprob is None:
            return ()
        if not self.top or self.logprob < self.top[-1][1] or self.top[0][0] == self.token_id:
            return self.top
        more = [entry for entry in self.top if entry[1] > self.logprob]
        rest = [entry for entry in self.top[len(more) :] if entry[0] != self.token_id]
        return [*more, (self.token_id, self.logprob), *rest][: len(self.top)]


class _Likely(msgspec.Struct):
    token: msgspec.Raw
    logprob: float | None
    bytes: msgspec.Raw


class _Entry(_Likely):
    top_logprobs: list[_Likely]


class ChatLogprobs:
    """`{"content": [{token, logprob, bytes, top_logprobs}, …], "refusal": null}`."""

    def __init__(self, token_of: TokenOf) -> None:
        def named(token_id: int) -> tuple[msgspec.Raw, msgspec.Raw]:
            token = token_of(token_id)
            data = None if token.data is None else list(token.data)
            return msgspec.Raw(dumps(token.text)), msgspec.Raw(dumps(data))

        self._named = lru_cache(REMEMBERED_TOKENS)(named)

    def render(self, tokens: Iterable[ScoredToken]) -> Rendered:
        return (_items([self._entry(token) for token in tokens]),)

    def whole(self, parts: Sequence[Rendered]) -> msgspec.Raw:
        return msgspec.Raw(b'{"content":' + _list(parts, 0) + b',"refusal":null}')

    def _entry(self, token: ScoredToken) -> _Entry:
        named = self._named
        top = []
        for token_id, logprob in token.alternatives:
            text, data = named(token_id)
            top.append(_Likely(text, logprob, data))
        text, data = named(token.token_id)
        return _Entry(text, token.logprob, data, top)


class CompletionLogprobs:
    """`{"tokens", "token_logprobs", "top_logprobs", "text_offset"}`, each a list with an item a token. Tokens that are
    no whole characters are written as `bytes:\\xe2`, as OpenAI has it."""

    def __init__(self, token_of: TokenOf) -> None:
        self._name = lru_cache(REMEMBERED_TOKENS)(lambda token_id: _name(token_of(token_id)))

    def render(self, tokens: Sequence[ScoredToken]) -> Rendered:
        return (
            _items([self._name(token.token_id) for token in tokens]),
            _items([token.logprob for token in tokens]),
            _items([self._top(token) for token in tokens]),
            _items([token.offset for token in tokens]),
        )

    def whole(self, parts: Sequence[Rendered]) -> msgspec.Raw:
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        lists = (f'"{name}":'.encode() + _list(parts, index) for index, name in enumerate(names))
        return msgspec.Raw(b"{" + b",".join(lists) + b"}")

    def _top(self, token: ScoredToken) -> dict[str, float] | None:
        """The token itself is always among them, so that there may be one more than was asked for. Of several that
        are written alike, the likeliest is told."""
        if token.logprob is None:
            return None
        top: dict[str, float] = {}
        for token_id, logprob in token.alternatives:
            top.setdefault(self._name(token_id), logprob)
        top.setdefault(self._name(token.token_id), token.logprob)
        return top


class _PromptEntry(msgspec.Struct):
    logprob: float
    rank: int
    decoded_token: msgspec.Raw


class PromptLogprobs:
    """`[null, {"ID": {logprob, rank, decoded_token}, …}, …]`: an item a token of the prompt, itself and the most likely
    ones at its place."""

    def __init__(self, token_of: TokenOf) -> None:
        def named(token_id: int) -> msgspec.Raw:
            return msgspec.Raw(dumps(token_of(token_id).text))

        self._named = lru_cache(REMEMBERED_TOKENS)(named)

    def render(self, token_ids: Sequence[int], logprobs: Logprobs, num_top: int) -> bytes:
        """The items of these tokens."""
        rows = zip(token_ids, logprobs.token_ranks(), logprobs.rows(num_top), strict=True)
        return _items([self._entries(token_id, rank, *row) for token_id, rank, row in rows])

    def whole(self, parts: Sequence[bytes]) -> msgspec.Raw:
        return msgspec.Raw(b"[" + b",".join((b"null", *parts)) + b"]")

    def _entries(
        self, token_id: int, rank: int, logprob: float, top: Sequence[tuple[int, float]]
    ) -> dict[str, _PromptEntry]:
        place = next((place for place, entry in enumerate(top, 1) if entry[0] == token_id), rank)
        entries = {str(token_id): _PromptEntry(logprob, place, self._named(token_id))}
        for number, (other, value) in enumerate(top, 1):
            if other != token_id:
                entries[str(other)] = _PromptEntry(value, number, self._named(other))
        return entries


def _name(token: TokenText) -> str:
    if token.data is None:
        return token.text
    try:
        return token.data.decode()
    except UnicodeDecodeError:
        return f"bytes:{token.text}"


def _items(values: list[Any]) -> bytes:
    return dumps(values)[1:-1]


def _list(parts: Sequence[Rendered], index: int) -> bytes:
    return b"[" + b",".join(items for part in parts if (items := part[index])) + b"]"
