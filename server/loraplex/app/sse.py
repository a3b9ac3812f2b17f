"""Server-sent events as a client reads them: bytes in, the `data` of whole events out."""

from __future__ import annotations

MAX_EVENT_BYTES = 8 * 1024 * 1024


class EventTooLarge(ValueError):
    """The other side sent an event without end."""


class SseParser:
    """Cuts a byte stream into events (WHATWG HTML, "event stream"); fields other than `data` are dropped, and an
    event that the stream's end cuts off is never handed out. Holds one incomplete event at most."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._data: list[str] = []
        self._held = 0

    def feed(self, chunk: bytes) -> list[str]:
        """The events that `chunk` completes, each event's `data` lines joined by newlines. Raises EventTooLarge."""
        self._buffer += chunk
        *lines, rest = self._buffer.split(b"\n") if b"\n" in chunk else [self._buffer]
        # A lone carriage return may be half of a CRLF; no server that this client talks to ends lines with it.
        self._buffer = bytearray(rest)
        events = []
        for line in lines:
            text = line.removesuffix(b"\r")
            if not text:
                if self._data:
                    events.append("\n".join(self._data))
                self._data, self._held = [], 0
            elif text == b"data" or text.startswith(b"data:"):
                value = bytes(text[5:]).decode("utf-8", "replace")
                self._data.append(value[1:] if value.startswith(" ") else value)
                self._held += len(value)
        if self._held + len(self._buffer) > MAX_EVENT_BYTES:
            raise EventTooLarge(f"the server sent an event of more than {MAX_EVENT_BYTES} bytes")
        return events
