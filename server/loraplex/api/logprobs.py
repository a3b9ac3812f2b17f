"""Log probabilities in OpenAI's two shapes.

What is told of a token becomes JSON at once and is kept so: as Python objects an answer's worth would take ten times
the room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from loraplex.api.codec import dumps
from loraplex.serving.text import TokenText

TokenOf = Callable[[int], TokenText]
Rendered = tuple[bytes, ...]
"""The items of each of a shape's lists, as JSON without the brackets."""


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token with its log probability and the most likely ones at its place, the likeliest first. `offset` is where
    its text begins in the choice's text. The first token of a prompt has no `logprob`."""

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    offset: int

    @property
    def alternatives(self) -> list[tuple[int, float]]:
        """`top`, where of equally likely ones the token itself is the first."""
        if self.logprob is None or not self.top:
            return []
        top = list(self.top)
        if self.logprob >= top[-1][1] and all(token_id != self.token_id for token_id, _ in top):
            top[-1] = (self.token_id, self.logprob)
        return sorted(top, key=lambda entry: (-entry[1], entry[0] != self.token_id))


class ChatLogprobs:
    """`{"content": [{token, logprob, bytes, top_logprobs}, …], "refusal": null}`."""

    def __init__(self, token_of: TokenOf) -> None:
        self._token_of = token_of

    def render(self, tokens: Iterable[ScoredToken]) -> Rendered:
        return (_items(map(self._entry, tokens)),)

    def whole(self, parts: Sequence[Rendered]) -> msgspec.Raw:
        return msgspec.Raw(b'{"content":' + _list(parts, 0) + b',"refusal":null}')

    def _entry(self, token: ScoredToken) -> dict[str, Any]:
        top = [self._one(token_id, logprob) for token_id, logprob in token.alternatives]
        return {**self._one(token.token_id, token.logprob), "top_logprobs": top}

    def _one(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        token = self._token_of(token_id)
        data = None if token.data is None else list(token.data)
        return {"token": token.text, "logprob": logprob, "bytes": data}


class CompletionLogprobs:
    """`{"tokens", "token_logprobs", "top_logprobs", "text_offset"}`, each a list with an item a token. Tokens that are
    no whole characters are written as `bytes:\\\\xe2`, as OpenAI has it."""

    def __init__(self, token_of: TokenOf) -> None:
        self._token_of = token_of

    def render(self, tokens: Sequence[ScoredToken]) -> Rendered:
        return (
            _items(self._name(token.token_id) for token in tokens),
            _items(token.logprob for token in tokens),
            _items(map(self._top, tokens)),
            _items(token.offset for token in tokens),
        )

    def whole(self, parts: Sequence[Rendered]) -> msgspec.Raw:
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        lists = (f'"{name}":'.encode() + _list(parts, index) for index, name in enumerate(names))
        return msgspec.Raw(b"{" + b",".join(lists) + b"}")

    def _top(self, token: ScoredToken) -> dict[str, float] | None:
        """The token itself is always among them, so that there may be one more than was asked for."""
        if token.logprob is None:
            return None
        top: dict[str, float] = {}
        for token_id, logprob in (*token.alternatives, (token.token_id, token.logprob)):
            top.setdefault(self._name(token_id), logprob)
        return top

    def _name(self, token_id: int) -> str:
        token = self._token_of(token_id)
        if token.data is None:
            return token.text
        try:
            return token.data.decode()
        except UnicodeDecodeError:
            return f"bytes:{token.text}"


def _items(values: Iterable[Any]) -> bytes:
    return dumps(list(values))[1:-1]


def _list(parts: Sequence[Rendered], index: int) -> bytes:
    return b"[" + b",".join(items for part in parts if (items := part[index])) + b"]"
