"""Control tokens in what clients send: none of them becomes one."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import Tokenizer

from loraplex.serving.errors import TemplateError
from loraplex.serving.output.formats import ALL_MARKERS
from loraplex.serving.text.chat_template import ChatTemplate


class Marker:
    """A pair of random marks that the input's author cannot know."""

    def __init__(self) -> None:
        number = secrets.token_hex(12)
        self.start, self.end = f"\ue000{number}", f"\ue001{number}"
        self.used = False

    def wrap(self, match: re.Match[str]) -> str:
        self.used = True
        return f"{self.start}{match[0]}{self.end}"

    def length_in(self, text: str) -> int:
        """Characters of `text` that are marks."""
        if not self.used:
            return 0
        return text.count(self.start) * len(self.start) + text.count(self.end) * len(self.end)


class Controls:
    """The control tokens of a template: every special token, and of the other added tokens those that the template
    writes itself (such as Qwen's "<think>") and the markers of calls, results and reasoning, which versions may have
    though the template does not know them."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        tokens = {
            token.content: (token_id, token.normalized)
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.content
            and (
                token.special
                or token.content in ALL_MARKERS
                or (token.content in template.literals and not token.content.isspace())
            )
        }
        self._ids = frozenset(token_id for token_id, _ in tokens.values())
        longest_first = sorted(tokens, key=len, reverse=True)
        self._any = "|".join(map(re.escape, longest_first)) or "(?!)"
        self._pattern = re.compile(self._any)
        # Those that are looked for in the normalised text, where something else may have become one of them.
        self._normalized = [content for content, (_, normalized) in tokens.items() if normalized]
        self._newline = token_ids_of(tokenizer, "\n")

    def mark(self, value: Any, marker: Marker) -> Any:
        """`value` as plain data with every control token in a string marked. Raises TemplateError for one in a
        key, or one that only normalising makes."""
        if isinstance(value, str):
            self._check_normalized(value)
            return self._pattern.sub(marker.wrap, value)
        if isinstance(value, Mapping):
            for key in value:
                if self._pattern.search(str(key)):
                    raise TemplateError("a field's name holds one of the model's control tokens")
            return {str(key): self.mark(item, marker) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(item, marker) for item in value]
        if value is None or isinstance(value, bool | int | float):
            return value
        raise TemplateError(f"messages hold a value of the unknown kind {type(value).__name__}")

    def encode(self, text: str, marker: Marker) -> list[int]:
        """A rendered text with marks. A lone mark, which a template that cuts strings can leave, still parts the
        text, so that nothing joins into a control token across it."""
        marks = re.compile(f"{marker.start}({self._any}){marker.end}|{marker.start}|{marker.end}")
        ids: list[int] = []
        # [text, token or None, text, …, text]
        for index, piece in enumerate(marks.split(text)):
            if not piece:
                continue
            if index % 2:
                ids += self._encode_plain(piece)
            elif index == 0:
                ids += self._encode(piece)
            else:
                ids += self._encode_inner(self._encode, piece)
        return ids

    def _encode(self, text: str) -> list[int]:
        return token_ids_of(self._tokenizer, text)

    def _encode_plain(self, token: str) -> list[int]:
        """A control token's letters. Where even these make the token (a vocabulary that holds it as a word), its
        first letter is encoded apart."""
        ids = self._encode_inner(self._without_added_tokens, token)
        if self._ids.isdisjoint(ids):
            return ids
        if len(token) == 1:
            raise TemplateError("a message holds a control token that cannot be written as text")
        return self._encode_plain(token[0]) + self._encode_plain(token[1:])

    def _encode_inner(self, encode: Callable[[str], list[int]], piece: str) -> list[int]:
        """A piece from the middle of a text: encoded behind a newline that is cut off again, as SentencePiece
        would put a space before what begins a text (the way transformers does it)."""
        ids = encode("\n" + piece)
        if ids[: len(self._newline)] == self._newline:
            return ids[len(self._newline) :]
        return encode(piece)

    def _without_added_tokens(self, text: str) -> list[int]:
        normalizer, pre_tokenizer = self._tokenizer.normalizer, self._tokenizer.pre_tokenizer
        if normalizer is not None:
            text = normalizer.normalize_str(text)
        words = [text] if pre_tokenizer is None else [w for w, _ in pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for word in words for token in self._tokenizer.model.tokenize(word)]

    def _check_normalized(self, text: str) -> None:
        normalizer = self._tokenizer.normalizer
        if normalizer is None or not self._normalized:
            return
        normal = normalizer.normalize_str(text)
        if any(normal.count(content) > text.count(content) for content in self._normalized):
            raise TemplateError("a message holds characters that turn into one of the model's control tokens")


def token_ids_of(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = False) -> list[int]:
    """Token ids as `tokenizer.encode` gives them. That holds the interpreter lock all the while; a batch of one does
    not, and leaves out the offsets that no caller needs."""
    (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return list(encoding.ids)
