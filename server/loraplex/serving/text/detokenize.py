"""From tokens to text while they come: whole characters only, and never a piece of a stop string.

All decoders of causal models are sums of bytes: each token stands for some bytes whatever its neighbours, and the
text is their concatenation read as UTF-8 (what is invalid reads as U+FFFD, one for each maximal subpart, as both
Unicode and the tokenizers library have it). So a table from id to bytes and an incremental UTF-8 decoder are exact,
at constant cost a token; decoding windows of tokens again and again is neither.
"""

from __future__ import annotations

import codecs
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from loraplex.serving.errors import TokenizerUnsupported

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class TokenTable:
    """`token_bytes[id]` is what a token adds to the text: b"" for special tokens and for ids that have no token.
    `strips_leading_space`: a text of its own loses one space at its start (SentencePiece's dummy prefix)."""

    token_bytes: tuple[bytes, ...]
    strips_leading_space: bool = False

    def __getitem__(self, token_id: int) -> bytes:
        return self.token_bytes[token_id] if 0 <= token_id < len(self.token_bytes) else b""


def build_token_table(
    vocab: Mapping[str, int], special_ids: Iterable[int], decoder: Mapping[str, Any] | None
) -> TokenTable:
    """The table of a tokenizer. `vocab` holds the added tokens too; `decoder` is the part of that name of a
    tokenizer.json. Knows the byte-level and the SentencePiece families. Raises TokenizerUnsupported."""
    steps = _decoder_steps(decoder)
    kinds = [str(step.get("type")) for step in steps]
    if kinds == ["ByteLevel"]:
        to_bytes, strips = _byte_level, False
    elif steps and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        space, fallback = "▁", "ByteFallback" in kinds
        strips = False
        for step in steps:
            if step["type"] == "Replace":
                space = _replaced(step)
            elif step["type"] == "Metaspace":
                space = str(step.get("replacement", space))
                strips = step.get("prepend_scheme", "always") != "never"
            elif step["type"] == "Strip":
                strips = step.get("content") == " " and step.get("start", 0) > 0

        def to_bytes(piece: str) -> bytes:
            match = _BYTE_TOKEN.fullmatch(piece) if fallback else None
            return bytes([int(match[1], 16)]) if match else piece.replace(space, " ").encode()

    else:
        raise TokenizerUnsupported(
            f"the tokenizer's decoder {'+'.join(kinds) or 'null'} is not of a kind that can be streamed "
            "(byte-level or SentencePiece)"
        )
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    special = frozenset(special_ids)
    for piece, token_id in vocab.items():
        if token_id not in special:
            table[token_id] = to_bytes(piece)
    return TokenTable(tuple(table), strips)


def _decoder_steps(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    if decoder.get("type") == "Sequence":
        return [step for part in decoder.get("decoders", []) for step in _decoder_steps(part)]
    return [decoder]


def _replaced(step: Mapping[str, Any]) -> str:
    pattern = step.get("pattern", {})
    if "String" not in pattern or step.get("content") != " ":
        raise TokenizerUnsupported("the tokenizer's decoder replaces something other than a space's stand-in")
    return str(pattern["String"])


def _unicode_to_byte() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes (openai/gpt-2, encoder.py, bytes_to_unicode)."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(256 + position): byte for position, byte in enumerate(others)})
    return table


CHAR_TO_BYTE = _unicode_to_byte()


def _byte_level(piece: str) -> bytes:
    try:
        return bytes([CHAR_TO_BYTE[char] for char in piece])
    except KeyError:
        return piece.encode()  # an added token, which is written as it reads


class IncrementalDetokenizer:
    """The text of one output, token by token. `continues` keeps the leading space of a text that goes on where
    the prompt ended (a completion), which a text of its own (an answer) loses. `shown` gives special tokens a text."""

    def __init__(
        self, table: TokenTable, *, continues: bool = False, shown: Mapping[int, bytes] | None = None
    ) -> None:
        self._table = table
        self._shown = shown or {}
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.in_character = False
        """The last token ended inside a character."""
        self._at_start = table.strips_leading_space and not continues

    def push(self, token_id: int) -> str:
        """The characters that this token completes, often one or more, sometimes none."""
        data = self._table[token_id] or self._shown.get(token_id, b"")
        if self._at_start and data:
            self._at_start = False
            data = data.removeprefix(b" ")
        if data.isascii() and not self.in_character:
            return data.decode("ascii")  # the incremental decoder is Python, and takes three times as long
        text = self._utf8.decode(data)
        self.in_character = bool(self._utf8.getstate()[0])
        return text

    def finish(self) -> str:
        """The rest: U+FFFD for a character that was never completed."""
        self.in_character = False
        return self._utf8.decode(b"", final=True)


class TokenSpans:
    """Which tokens' text has been shown: a token's log probabilities are sent with the text that holds its end. A
    token that ends inside a character waits for that character."""

    def __init__(self) -> None:
        self._spans: deque[tuple[int, int]] = deque()
        self._length = 0

    def add_token(self, num_chars: int, *, in_character: bool = False) -> None:
        """The next token has completed `num_chars` characters."""
        start = self._length
        self._length += num_chars
        self._spans.append((start, self._length + in_character))

    def take_shown(self, shown: int, *, ended: bool = False) -> tuple[int, ...]:
        """The places where tokens' texts begin, in order, of those that have not been taken and whose text lies within
        the first `shown` characters. With `ended`, these are all that will be shown: a token that begins in them
        counts."""
        taken = []
        while self._spans and (self._spans[0][1] <= shown or (ended and self._spans[0][0] < shown)):
            taken.append(self._spans.popleft()[0])
        return tuple(taken)

    def take_all(self) -> tuple[int, ...]:
        taken = tuple(start for start, _ in self._spans)
        self._spans.clear()
        return taken


class StopChecker:
    """Finds the first of several stop strings in a text that comes in pieces, and holds back just what may yet
    turn out to be the beginning of one: the longest suffix that is a prefix of a stop string.

    One Knuth-Morris-Pratt automaton a stop string: each character is looked at once (amortised), whatever the
    pieces. Empty stop strings are ignored.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(dict.fromkeys(stop for stop in stops if stop))
        self._failures = [_failure_function(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        self._held = ""

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """(what is safe to show, the stop string that ended it or None). The stop string that is complete first
        counts, the longest of several complete at once; it is not shown. With `may_stop` false, strings that are
        completed by this piece are ordinary text, but those that begin in it count later."""
        if not self._stops:
            return text, None
        for position, char in enumerate(text):
            found = None
            for index, (stop, failure) in enumerate(zip(self._stops, self._failures, strict=True)):
                matched = self._matched[index]
                while matched and stop[matched] != char:
                    matched = failure[matched - 1]
                if stop[matched] == char:
                    matched += 1
                if matched == len(stop):
                    if may_stop and (found is None or len(stop) > len(found)):
                        found = stop
                    matched = failure[-1]
                self._matched[index] = matched
            if found is not None:
                shown = self._held + text[: position + 1]
                self._held = ""
                self._matched = [0] * len(self._stops)
                return shown[: -len(found)], found
        text = self._held + text
        shown_len = len(text) - max(self._matched)
        self._held = text[shown_len:]
        return text[:shown_len], None

    def finish(self) -> str:
        """The held-back text: no stop string will complete it now."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held


def _failure_function(stop: str) -> list[int]:
    """failure[i]: the length of the longest proper prefix of stop[:i+1] that is also its suffix."""
    failure = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = failure[length - 1]
        if stop[i] == stop[length]:
            length += 1
        failure[i] = length
    return failure


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    """`text` may be shown now. `finished_by_stop` is the stop string that has ended the output. `tokens`, of a stream
    that tells of them: where the text of each of the next tokens begins, for those whose text is shown by now."""

    text: str
    finished_by_stop: str | None = None
    tokens: tuple[int, ...] = ()


class TextStream:
    """The text of one choice: detokenising and stop strings together.

    `num_tokens` counts the output tokens up to the end, the one that completed a stop string and a stop or eos token
    included; tokens pushed after the end are ignored. Stop strings that are complete before `min_tokens` outputs do not
    count. `by_token`: deltas name the tokens that they complete; a stop or eos token is none of them, and of the tokens
    of a stop string only one that began before it. `shown` gives special tokens a text.
    """

    def __init__(
        self,
        table: TokenTable,
        stops: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        continues: bool = False,
        by_token: bool = False,
        shown: Mapping[int, bytes] | None = None,
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(table, continues=continues, shown=shown)
        self._checker = StopChecker(stops)
        self._min_tokens = min_tokens
        self._spans = TokenSpans() if by_token else None
        self._num_shown = 0
        self._ended: str | None = None
        self.num_tokens = 0

    @property
    def finished_by_stop(self) -> str | None:
        return self._ended

    def push(self, token_ids: Sequence[int], *, stop_token_id: int | None = None) -> TextDelta:
        """The text that these tokens make safe to show. `stop_token_id` is the terminal event's: a last token
        equal to it is counted but is no text."""
        parts = []
        last = len(token_ids) - 1
        for index, token_id in enumerate(token_ids):
            if self._ended is not None:
                break
            self.num_tokens += 1
            if index == last and token_id == stop_token_id:
                break
            text = self._detokenizer.push(token_id)
            if self._spans is not None:
                self._spans.add_token(len(text), in_character=self._detokenizer.in_character)
            if text:
                shown, self._ended = self._checker.push(text, may_stop=self.num_tokens >= self._min_tokens)
                parts.append(shown)
        return self._delta("".join(parts))

    def finish(self) -> TextDelta:
        """The rest, once the terminal event has come. Nothing after a stop string."""
        if self._ended is not None:
            return TextDelta("", self._ended)
        shown, self._ended = self._checker.push(
            self._detokenizer.finish(), may_stop=self.num_tokens >= self._min_tokens
        )
        if self._ended is not None:
            return self._delta(shown)
        tokens = () if self._spans is None else self._spans.take_all()
        return TextDelta(shown + self._checker.finish(), None, tokens)

    def _delta(self, shown: str) -> TextDelta:
        if self._spans is None:
            return TextDelta(shown, self._ended)
        self._num_shown += len(shown)
        return TextDelta(
            shown, self._ended, self._spans.take_shown(self._num_shown, ended=self._ended is not None)
        )
