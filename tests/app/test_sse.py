"""Events survive any cutting of the bytes that carry them."""

from __future__ import annotations

import pytest

from loraplex.app.sse import MAX_EVENT_BYTES, EventTooLarge, SseParser

STREAM = (
    'data: {"a": "größe"}\n\n: a comment\n\nevent: x\r\ndata:one\r\ndata: two\r\n\r\n'
    "data\n\ndata: [DONE]\n\ndata: cut"
)
EVENTS = ['{"a": "größe"}', "one\ntwo", "", "[DONE]"]


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 1000])
def test_events_are_the_same_however_the_bytes_are_cut(piece: int) -> None:
    parser, raw = SseParser(), STREAM.encode()
    found = [e for i in range(0, len(raw), piece) for e in parser.feed(raw[i : i + piece])]
    assert found == EVENTS


def test_an_event_without_end_is_refused_before_it_fills_the_memory() -> None:
    parser = SseParser()
    with pytest.raises(EventTooLarge):
        for _ in range(MAX_EVENT_BYTES // 65536 + 2):
            parser.feed(b"data: " + b"x" * 65530 if _ == 0 else b"x" * 65536)
