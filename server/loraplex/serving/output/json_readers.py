"""Readers of JSON that comes character by character.

They are generators: each `yield` waits for the next character. None recurses with the nesting of the JSON, so that the
time is linear and the memory bounded by the text.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import TypeVar

WHITE = " \t\r\n"
"""JSON's white space."""
MAX_WRAPPED = 3
"""How often arguments may be a JSON string within a JSON string."""
T = TypeVar("T")
Reading = Generator[None, str, T]

_ESCAPED = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")
_FIRST_HALF, _SECOND_HALF = ("d800", "dbff"), ("dc00", "dfff")
"""Bounds of the halves of a surrogate pair, in hexadecimal."""
_DIGITS = frozenset("0123456789")
_WORDS = {"t": "rue", "f": "alse", "n": "ull"}


class Malformed(Exception):
    """A character that cannot stand here. `again`: characters before it to look at once more, which may belong to a
    marker."""

    def __init__(self, again: int = 0) -> None:
        self.again = again


def skip(char: str) -> Reading[str]:
    """The first character that is no white space, from this one on."""
    while char in WHITE:
        char = yield
    return char


def literal(text: str, char: str) -> Reading[None]:
    """Read a word whose first character is `char`."""
    yield from one_of((text,), char)


def one_of(texts: tuple[str, ...], char: str) -> Reading[str]:
    """Read one of these words; none is the beginning of another."""
    length = 0
    while True:
        texts = tuple(text for text in texts if text[length : length + 1] == char)
        if not texts:
            raise Malformed(length)
        length += 1
        if length == len(texts[0]):
            return texts[0]
        char = yield


def rest_of_string(max_length: int | None = None) -> Reading[None]:
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


def rest_of_object() -> Reading[None]:
    """Read the rest of a JSON object whose brace has been read."""
    open_brackets = bytearray(b"}")  # what closes them
    char = yield from skip((yield))
    first = True  # in its bracket
    while True:
        in_object = open_brackets[-1] == ord("}")
        if not (first and ord(char) == open_brackets[-1]):
            if in_object:
                if char != '"':
                    raise Malformed
                yield from rest_of_string()
                if (yield from skip((yield))) != ":":
                    raise Malformed
                char = yield from skip((yield))
            if char in "{[":
                open_brackets.append(ord("}") if char == "{" else ord("]"))
                first = True
                char = yield from skip((yield))
                continue
            char = yield from scalar(char)
            char = yield from skip(char)
        while ord(char) == open_brackets[-1]:
            open_brackets.pop()
            if not open_brackets:
                return
            char = yield from skip((yield))
        if char != ",":
            raise Malformed
        first = False
        char = yield from skip((yield))


def scalar(char: str) -> Reading[str]:
    """A JSON string, number or word whose first character this is. Returns the character behind it."""
    if char == '"':
        yield from rest_of_string()
    elif char in _WORDS:
        yield from word(char)
    else:
        return (yield from _number(char))
    return (yield)


def word(char: str) -> Reading[None]:
    """Read the rest of the word that begins so."""
    for expected in _WORDS[char]:
        if (yield) != expected:
            raise Malformed


def unwrapped(written: str) -> str:
    """The object within a JSON string, as text. Raises Malformed where it holds another value."""
    text = written
    for _ in range(MAX_WRAPPED):
        if not text.startswith('"'):
            break
        text = json.loads(text).strip(WHITE)
        if text in ("", "null"):
            return "{}"
        if text.startswith('"') and not _is_read(rest_of_string(), text):
            raise Malformed
    if not text.startswith("{") or not _is_read(rest_of_object(), text):
        raise Malformed
    return text


def _is_read(reading: Reading[None], text: str) -> bool:
    """Whether a reader that follows the first character ends with the last one."""
    rest = iter(text[1:])
    next(reading)
    try:
        for char in rest:
            reading.send(char)
    except StopIteration:
        return not list(rest)
    except Malformed:
        pass
    return False


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
    """Read at least one digit. Returns the character behind them."""
    if char not in _DIGITS:
        raise Malformed
    while char in _DIGITS:
        char = yield
    return char
