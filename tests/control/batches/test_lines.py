"""A file of JSON lines is cut at line ends, whatever the pieces that it comes in; caps are told by line."""

from __future__ import annotations

import json
import time

import pytest

from loraplex.control.batches import lines
from loraplex.control.batches.lines import LineCutter, Part, is_stream, read_line, value_of
from loraplex.control.errors import InvalidValue


def cut(data: bytes, size: int) -> tuple[LineCutter, list[Part]]:
    cutter = LineCutter()
    parts = [part for start in range(0, len(data), size) for part in cutter.feed(data[start : start + size])]
    return cutter, [*parts, *cutter.finish()]


def line(custom_id: str) -> bytes:
    return json.dumps({"custom_id": custom_id, "body": {}}).encode()


@pytest.mark.parametrize("size", [1, 7, 1000, 1 << 20])
def test_parts_are_the_file_and_end_with_lines(size: int) -> None:
    data = b"\r\n".join([line(f"r{number}") for number in range(200)] + [b"", b"not JSON"])
    cutter, parts = cut(data, size)
    assert b"".join(part.data for part in parts) == data
    assert cutter.requests == 201
    assert [part.first_line for part in parts] == [1, 65, 129, 193]
    assert all(part.data.endswith(b"\n") for part in parts[:-1])


def test_repeated_ids_are_named_wherever_they_stand() -> None:
    data = b"\n".join(line(f"r{number % 100}") for number in range(150))
    _, parts = cut(data, 64)
    assert [number for part in parts for number in part.repeated] == list(range(101, 151))


def test_an_endless_line_is_refused_before_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 1000)
    cutter = LineCutter()
    cutter.feed(line("a") + b"\n")
    with pytest.raises(InvalidValue, match="Line 2 is longer than 1000 bytes"):
        for _ in range(100):
            cutter.feed(b"x" * 100)
    assert len(cutter._rest) <= 1100, "what is kept of it is bounded"


@pytest.mark.parametrize("tiny", [b"\n", b"{}\n"])
def test_a_million_tiny_lines_are_refused_early(tiny: bytes) -> None:
    cutter, taken = LineCutter(), 0
    with pytest.raises(InvalidValue, match="more than 50000 lines"):
        for _ in range(100):
            cutter.feed(tiny * 10_000)
            taken += 10_000
    assert taken == lines.MAX_LINES


def test_a_file_that_is_too_large_or_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_FILE_BYTES", 100)
    with pytest.raises(InvalidValue, match="larger than 100 bytes"):
        LineCutter().feed(b"x" * 101)
    for data in (b"", b"\n \n"):
        with pytest.raises(InvalidValue, match="holds no request"):
            cut(data, 10)


@pytest.mark.parametrize("odd", [b'{"custom_id": 7}', b"[" * 5000, b'{"custom_id": "\xff"}', b"null"])
def test_a_line_that_is_no_request_is_kept_for_the_error_file(odd: bytes) -> None:
    cutter, parts = cut(odd + b"\n" + odd, 100)
    assert cutter.requests == 2
    assert parts[0].repeated == ()


def test_a_line_is_not_read_as_a_whole() -> None:
    """A body of a million values would take a second of a server's time, for which all others would wait."""
    line = b'{"custom_id": "a", "body": {"stream": false, "x": [' + b"[]," * 1_300_000 + b"[]]}}\n"
    cutter = LineCutter()
    began = time.process_time()
    cutter.feed(line)
    assert not is_stream(bytes(read_line(line).body))
    assert time.process_time() - began < 0.6


def test_odd_values_are_none() -> None:
    def custom_id(value: bytes) -> object:
        return value_of(read_line(b'{"url": "/b", "custom_id": ' + value + b"}").custom_id)

    assert custom_id(b'"a"') == "a"
    assert custom_id(b'"' + b"x" * 9000 + b'"') is None
    assert custom_id(b'"\xff"') is None
    for broken in (b'"\\ud800"', b"[" * 4000 + b"]" * 4000, b"nan"):
        with pytest.raises(ValueError):
            custom_id(broken)
    with pytest.raises(TypeError):
        read_line(b"[]")
