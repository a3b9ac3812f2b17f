"""Reads one block of calls, character by character, whatever pieces they come in."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field

from loraplex.serving.output.formats import ARGUMENT_KEYS, NESTED_KEY, OTHER_KEYS, Notation, Shape
from loraplex.serving.output.json_readers import (
    WHITE,
    Malformed,
    Reading,
    literal,
    one_of,
    rest_of_object,
    rest_of_string,
    scalar,
    skip,
    unwrapped,
    word,
)
from loraplex.serving.output.parts import CallArguments, CallStart, Part

MAX_NAME = 256


@dataclass(slots=True)
class _Call:
    """A call while it is read. `began`: it has been told, and its arguments as they came. `nested`: its fields stand in
    an object `function`."""

    name: str | None = None
    arguments: str = "{}"
    began: bool = False
    nested: bool = False


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
        char = yield from skip((yield))
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
            yield from literal(notation.closes, (yield from skip((yield))))
        elif notation.whole:
            yield from skip((yield))
            raise Malformed

    def _list(self) -> Reading[None]:
        """The calls of a list, from behind its bracket."""
        char = yield
        again = 1  # the bracket may begin a marker
        while True:
            if char in WHITE:
                again = 0
                char = yield from skip(char)
            if char != "{":
                raise Malformed(again)
            again = 0
            yield from self._call()
            char = yield from skip((yield))
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
        marker = yield from one_of((notation.args_marker, notation.id_marker), char)
        if marker == notation.id_marker:
            length = 0
            while (char := (yield)) != "[":
                length += 1
                if length > MAX_NAME:
                    raise Malformed
            yield from literal(notation.args_marker, char)
        char = yield from skip((yield))
        if char == "{" and self.streams:
            self._begin(name)
            yield from self._live_object()
        else:
            arguments = yield from self._value(char)
            self._start(name)
            self._arguments(arguments)

    def _call(self) -> Reading[None]:
        """A call, from behind its opening brace."""
        call = _Call()
        yield from self._fields(call)
        if call.name is None:
            raise Malformed
        if not call.began:
            self._start(call.name)
            self._arguments(call.arguments)
            if self.streams:
                self._told()

    def _fields(self, call: _Call) -> Reading[None]:
        """The fields of a call up to the brace that closes them. They may stand in an object `function`."""
        seen: set[str] = set()
        char = yield from skip((yield))
        while True:
            if char != '"':
                raise Malformed
            key = yield from self._string()
            kind = ARGUMENT_KEYS[0] if key in ARGUMENT_KEYS else "name" if key == NESTED_KEY else key
            if kind in seen or key not in ("name", NESTED_KEY, *ARGUMENT_KEYS, *OTHER_KEYS):
                raise Malformed
            seen.add(kind)
            if (yield from skip((yield))) != ":":
                raise Malformed
            char = yield from skip((yield))
            if char == "{" and key == NESTED_KEY and not call.nested:
                call.nested = True
                yield from self._fields(call)
                seen.add(ARGUMENT_KEYS[0])
            elif char == "{" and key in ARGUMENT_KEYS and self.streams and call.name is not None:
                self._begin(call.name)
                call.began = True
                yield from self._live_object()
            elif key in ARGUMENT_KEYS:
                call.arguments = yield from self._value(char)
            elif key in OTHER_KEYS:
                char = yield from scalar(char)
            elif char != '"':
                raise Malformed
            else:
                call.name = yield from self._string()
                if call.name not in self.names:
                    raise Malformed
            char = yield from skip(char if key in OTHER_KEYS else (yield))
            if char == "}":
                return
            if char != ",":
                raise Malformed
            char = yield from skip((yield))

    def _value(self, char: str) -> Reading[str]:
        """Arguments as the text of an object: an object, a JSON string that holds one, or null for an empty one. `char`
        is their first character."""
        self._capture()
        if char == "{":
            yield from rest_of_object()
            return self._take_captured() + "}"
        if char == "n":
            yield from word(char)
            self._captured_from = None
            return "{}"
        if char != '"':
            raise Malformed
        yield from rest_of_string()
        return unwrapped(self._take_captured() + '"')

    def _begin(self, name: str) -> None:
        """A call whose arguments begin with the current character is told from here on."""
        self._start(name)
        self._capture()
        self._live = True
        self.held.clear()
        self._held_from = None

    def _live_object(self) -> Reading[None]:
        yield from rest_of_object()
        assert self._captured_from is not None
        self._arguments(self._text[self._captured_from : self._at + 1])
        self._captured_from, self._live = None, False
        self._told()

    def _told(self) -> None:
        """The text up to the current character has been told of."""
        self.held.clear()
        self._held_from = self._at + 1

    def _string(self) -> Reading[str]:
        """Behind the quote: what the string says. Raises Malformed for a long one."""
        self._capture()
        yield from rest_of_string(MAX_NAME * 6)
        raw = self._take_captured()
        value = json.loads(raw + '"')
        assert isinstance(value, str)
        return value
