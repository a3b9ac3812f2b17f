"""Reads one block of calls, character by character, whatever pieces they come in.

The readers are generators: each `yield` waits for the next character. None recurses with the nesting of the JSON, so
that the time is linear and the memory bounded by the text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TypeVar

from loraplex.serving.output.formats import ARGUMENT_KEYS, OTHER_KEYS, Notation, Shape
from loraplex.serving.output.parts import CallArguments, CallStart, Part

WHITE = " \t\r\n"
"""JSON's white space."""
MAX_NAME = 256
T = TypeVar("T")
Reading = Generator[None, str, T]

_ESCAPED = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")
_FIRST_HALF, _SECOND_HALF = ("d800", "dbff"), ("dc00", "dfff")
"""Bounds of the halves of a surrogate pair, in hexadecimal."""
_DIGITS = frozenset("0123456789")
_WORDS = {"t": "rue", "f": "alse", "n": "ull"}


class Malformed(Exception):
    """This character cannot stand here. `again`: characters before it to look at once more, which may belong to a
    marker."""

    def __init__(self, again: int = 0) -> None:
        self.again = again


@dataclass(slots=True)
class Block:
    """The calls of one block, from behind its opening marker. `names` are the tools that may be called. `streams`:
    parts are given out while a call comes; else with the end of the block, once nothing can be wrong with it any
    more.

    After `push`: `parts` to be shown; `held`, the text since the last part; `ended`; `complete`, where the end of the
    text would end it too."""

    notation: Notation
    names: frozenset[str]
    first_position: int
    new_id: Callable[[], str]
    streams: bool = False
    parts: list[Part] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    ended: bool = False
    complete: bool = False
    num_calls: int = 0
    _text: str = ""
    _at: int = 0
    _held_from: int | None = 0
    _captured: list[str] = field(default_factory=list)
    _captured_from: int | None = None
    _live: bool = False  # the captured text is arguments that are streamed
    _reading: Reading[None] | None = None

    def push(self, text: str) -> int:
        """How many characters belong to the block. Raises Malformed, with `at` characters read."""
        if self._reading is None:
            self._reading = self._block()
            next(self._reading)
        self._text = text
        self._held_from = None if self._live else 0
        if self._captured_from is not None:
            self._captured_from = 0
        send = self._reading.send
        for self._at, char in enumerate(text):
            try:
                send(char)
            except StopIteration:
                self.ended = True
                self._keep(self._at + 1)
                return self._at + 1
            except Malformed:
                self._keep(self._at)
                raise
        self._keep(len(text))
        return len(text)

    @property
    def at(self) -> int:
        """Where in the text of the last `push` reading stopped."""
        return self._at

    def _keep(self, end: int) -> None:
        """Remember what this piece of text leaves behind."""
        if self._captured_from is not None:
            piece = self._text[self._captured_from : end]
            if self._live:
                self._arguments(piece)
            else:
                self._captured.append(piece)
        if self._held_from is not None:
            self.held.append(self._text[self._held_from : end])

    def _arguments(self, text: str) -> None:
        if text:
            self.parts.append(CallArguments(self.first_position + self.num_calls - 1, text))

    def _capture(self) -> None:
        """From the current character on."""
        self._captured, self._captured_from = [], self._at

    def _take_captured(self) -> str:
        """Up to the current character, without it."""
        assert self._captured_from is not None
        self._captured.append(self._text[self._captured_from : self._at])
        self._captured_from = None
        return "".join(self._captured)

    def _start(self, name: str) -> None:
        self.parts.append(CallStart(self.first_position + self.num_calls, name, self.new_id()))
        self.num_calls += 1

    def _block(self) -> Reading[None]:
        notation = self.notation
        char = yield from _skip((yield))
        if char == "{" and Shape.OBJECT in notation.shapes:
            yield from self._call()
        elif char == "[" and Shape.LIST in notation.shapes:
            yield from self._list()
        elif Shape.NAMED in notation.shapes:
            yield from self._named(char)
        else:
            raise Malformed
        self.complete = True
        if notation.closes:
            yield from _literal(notation.closes, (yield from _skip((yield))))
        elif notation.whole:
            yield from _skip((yield))
            raise Malformed

    def _list(self) -> Reading[None]:
        """Behind the bracket."""
        char = yield
        again = 1  # the bracket may begin a marker
        while True:
            if char in WHITE:
                again = 0
                char = yield from _skip(char)
            if char != "{":
                raise Malformed(again)
            again = 0
            yield from self._call()
            char = yield from _skip((yield))
            if char == "]":
                return
            if char != ",":
                raise Malformed
            char = yield

    def _named(self, char: str) -> Reading[None]:
        """`name[ARGS]{…}`, or `name[CALL_ID]id[ARGS]{…}`."""
        notation = self.notation
        name = ""
        while char != "[":
            name += char
            if not any(known.startswith(name) for known in self.names):
                raise Malformed
            char = yield
        if name not in self.names:
            raise Malformed
        marker = yield from _one_of((notation.args_marker, notation.id_marker), char)
        if marker == notation.id_marker:
            length = 0
            while (char := (yield)) != "[":
                length += 1
                if length > MAX_NAME:
                    raise Malformed
            yield from _literal(notation.args_marker, char)
        char = yield from _skip((yield))
        if char != "{":
            raise Malformed
        if self.streams:
            self._begin(name)
            yield from self._live_object()
        else:
            self._capture()
            yield from _rest_of_object()
            arguments = self._taken_object()
            self._start(name)
            self._arguments(arguments)

    def _call(self) -> Reading[None]:
        """Behind the brace."""
        name: str | None = None
        arguments: str | None = None
        began = False
        seen: set[str] = set()
        char = yield from _skip((yield))
        while True:
            if char != '"':
                raise Malformed
            key = yield from self._string()
            kind = ARGUMENT_KEYS[0] if key in ARGUMENT_KEYS else key
            if kind in seen or key not in ("name", *ARGUMENT_KEYS, *OTHER_KEYS):
                raise Malformed
            seen.add(kind)
            if (yield from _skip((yield))) != ":":
                raise Malformed
            char = yield from _skip((yield))
            if char != ("{" if key in ARGUMENT_KEYS else '"'):
                raise Malformed
            if key == "name":
                name = yield from self._string()
                if name not in self.names:
                    raise Malformed
            elif key not in ARGUMENT_KEYS:
                yield from _rest_of_string()
            elif self.streams and name is not None:
                self._begin(name)
                began = True
                yield from self._live_object()
            else:
                self._capture()
                yield from _rest_of_object()
                arguments = self._taken_object()
            char = yield from _skip((yield))
            if char == "}":
                break
            if char != ",":
                raise Malformed
            char = yield from _skip((yield))
        if name is None:
            raise Malformed
        if not began:
            self._start(name)
            self._arguments("{}" if arguments is None else arguments)
            if self.streams:
                self._told()

    def _begin(self, name: str) -> None:
        """A call whose arguments begin with the current character is told from here on."""
        self._start(name)
        self._capture()
        self._live = True
        self.held.clear()
        self._held_from = None

    def _live_object(self) -> Reading[None]:
        yield from _rest_of_object()
        assert self._captured_from is not None
        self._arguments(self._text[self._captured_from : self._at + 1])
        self._captured_from, self._live = None, False
        self._told()

    def _told(self) -> None:
        """The text up to the current character has been told of."""
        self.held.clear()
        self._held_from = self._at + 1

    def _taken_object(self) -> str:
        return self._take_captured() + "}"

    def _string(self) -> Reading[str]:
        """Behind the quote: what the string says. Raises Malformed for a long one."""
        self._capture()
        yield from _rest_of_string(MAX_NAME * 6)
        raw = self._take_captured()
        value = json.loads(raw + '"')
        assert isinstance(value, str)
        return value


def _skip(char: str) -> Reading[str]:
    """The first character that is no white space, from this one on."""
    while char in WHITE:
        char = yield
    return char


def _literal(text: str, char: str) -> Reading[None]:
    """`char` is its first character."""
    yield from _one_of((text,), char)


def _one_of(texts: tuple[str, ...], char: str) -> Reading[str]:
    """Which of these it is; none is the beginning of another."""
    length = 0
    while True:
        texts = tuple(text for text in texts if text[length : length + 1] == char)
        if not texts:
            raise Malformed(length)
        length += 1
        if length == len(texts[0]):
            return texts[0]
        char = yield


def _rest_of_string(max_length: int | None = None) -> Reading[None]:
    """Read the rest of a JSON string whose quote has been read. Half a surrogate pair is no text: most libraries refuse
    it."""
    length = 0
    half = False  # the first half of a pair came last
    while (char := (yield)) != '"' or half:
        length += 1
        if char < " " or length == max_length or (half and char != "\\"):
            raise Malformed
        if char == "\\":
            char = yield
            if char == "u":
                code = ""
                for _ in range(4):
                    if (char := (yield)) not in _HEX:
                        raise Malformed
                    code += char
                is_second = _SECOND_HALF[0] <= code.lower() <= _SECOND_HALF[1]
                if is_second != half:
                    raise Malformed
                half = _FIRST_HALF[0] <= code.lower() <= _FIRST_HALF[1]
            elif half or char not in _ESCAPED:
                raise Malformed


def _rest_of_object() -> Reading[None]:
    """Read the rest of a JSON object whose brace has been read."""
    open_brackets = bytearray(b"}")  # what closes them
    char = yield from _skip((yield))
    first = True  # in its bracket
    while True:
        in_object = open_brackets[-1] == ord("}")
        if not (first and ord(char) == open_brackets[-1]):
            if in_object:
                if char != '"':
                    raise Malformed
                yield from _rest_of_string()
                if (yield from _skip((yield))) != ":":
                    raise Malformed
                char = yield from _skip((yield))
            if char in "{[":
                open_brackets.append(ord("}") if char == "{" else ord("]"))
                first = True
                char = yield from _skip((yield))
                continue
            char = yield from _scalar(char)
            char = yield from _skip(char)
        while ord(char) == open_brackets[-1]:
            open_brackets.pop()
            if not open_brackets:
                return
            char = yield from _skip((yield))
        if char != ",":
            raise Malformed
        first = False
        char = yield from _skip((yield))


def _scalar(char: str) -> Reading[str]:
    """A JSON string, number or word whose first character this is. Returns the character behind it."""
    if char == '"':
        yield from _rest_of_string()
    elif char in _WORDS:
        for expected in _WORDS[char]:
            if (yield) != expected:
                raise Malformed
    else:
        return (yield from _number(char))
    return (yield)


def _number(char: str) -> Reading[str]:
    if char == "-":
        char = yield
    if char == "0":
        char = yield
    else:
        char = yield from _digits(char)
    if char == ".":
        char = yield from _digits((yield))
    if char in "eE":
        char = yield
        if char in "+-":
            char = yield
        char = yield from _digits(char)
    return char


def _digits(char: str) -> Reading[str]:
    """One at least. Returns the character behind them."""
    if char not in _DIGITS:
        raise Malformed
    while char in _DIGITS:
        char = yield
    return char
