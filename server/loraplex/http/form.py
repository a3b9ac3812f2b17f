"""A multipart form, cut into the contents of its parts while it arrives. No I/O here.

Around python-multipart's incremental parser: how many headers a part has, how long they are, and that its bytes come as
they are.
"""

from __future__ import annotations

import logging
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from loraplex.http.text import printable

MAX_HEADERS = 8
MAX_HEADER_BYTES = 4096
_PLAIN_ENCODINGS = frozenset({"", "7bit", "8bit", "binary", "identity"})


class FormReader:
    """Feed it the body. A subclass says what becomes of each part (`begin_part`, `part_data`), and which error says
    that the form is `damaged` or `unsupported`. `wanted` is the sentence that says what to send."""

    def __init__(self, content_type: str, wanted: str) -> None:
        """Raises `unsupported` and `damaged`."""
        self._wanted = wanted
        kind, options = parse_options_header(content_type[:1024])
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data":
            raise self.unsupported(f"Send multipart/form-data. {wanted}")
        if not 1 <= len(boundary) <= 70:
            raise self.damaged("Content-Type needs a boundary of 1 to 70 characters.", "Content-Type")
        self._headers: dict[str, str] = {}
        self._num_headers = 0
        self._name = bytearray()
        self._value = bytearray()
        self._header_bytes = 0
        self._in_part = False
        self._has_begun = False
        self.ended = False
        callbacks: Any = {
            "on_part_begin": self._begin,
            "on_header_field": self._header_name,
            "on_header_value": self._header_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._begin_data,
            "on_part_data": self._data,
            "on_end": self._end,
        }
        self._parser = MultipartParser(boundary, callbacks)
        # The answer says what was wrong; a stranger's damaged body is no warning in the operator's log.
        self._parser.logger = logging.Logger("multipart", logging.CRITICAL)

    def damaged(self, message: str, param: str | None = None) -> Exception:
        """The error for a body that is no form as it should be."""
        raise NotImplementedError

    def unsupported(self, message: str) -> Exception:
        """The error for a body of another kind."""
        raise NotImplementedError

    def begin_part(self, name: str, filename: str | None) -> None:
        """A part of the form begins; both are the client's words."""
        raise NotImplementedError

    def part_data(self, data: bytes) -> None:
        """More of the part that has begun."""
        raise NotImplementedError

    def write(self, chunk: bytes) -> None:
        """Raises `damaged`, and what a subclass' functions raise."""
        try:
            self._parser.write(chunk)
        except FormParserError:
            if not self._has_begun:
                # MIME allows a preamble, but no client sends one with a form. So it is another boundary, or no form.
                raise self.damaged(
                    "The body does not begin with the boundary that Content-Type names. Send no text before the first "
                    f"boundary. {self._wanted}"
                ) from None
            raise self.damaged(f"The multipart body is damaged. {self._wanted}") from None

    def check_ended(self) -> None:
        """Raises `damaged` where the last boundary has not come."""
        if not self.ended:
            raise self.damaged("The multipart body ends before its last boundary.")

    # What the parser calls.

    def _begin(self) -> None:
        self._has_begun = True
        self._in_part = False
        self._headers = {}
        self._num_headers = self._header_bytes = 0

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._count_header(end - start)
        self._name += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._count_header(end - start)
        self._value += data[start:end]

    def _count_header(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > MAX_HEADER_BYTES:
            raise self.damaged(f"A part's headers are longer than {MAX_HEADER_BYTES} bytes.")

    def _end_header(self) -> None:
        self._num_headers += 1
        if self._num_headers > MAX_HEADERS:
            raise self.damaged(f"A part has more than {MAX_HEADERS} headers.")
        name = self._name.decode("latin-1").lower()
        if name in self._headers:
            raise self.damaged(f"A part has the header '{printable(name, 80)}' twice.")
        self._headers[name] = self._value.decode("latin-1")
        self._name.clear()
        self._value.clear()

    def _begin_data(self) -> None:
        disposition, options = parse_options_header(self._headers.get("content-disposition", ""))
        if disposition != b"form-data" or b"name" not in options:
            raise self.damaged("A part has no Content-Disposition: form-data with a name.")
        name = options[b"name"].decode("latin-1")
        filename = options.get(b"filename")
        self.begin_part(name, None if filename is None else filename.decode("latin-1"))
        encoding = self._headers.get("content-transfer-encoding", "").strip().lower()
        if encoding not in _PLAIN_ENCODINGS:
            shown = printable(encoding, 80)
            raise self.damaged(
                f"The part '{printable(name, 80)}' is encoded as '{shown}'; send its bytes as they are.",
                name[:80],
            )
        self._in_part = True

    def _data(self, data: bytes, start: int, end: int) -> None:
        if not self._in_part:
            raise self.damaged("A part has no headers.")
        self.part_data(data[start:end])

    def _end(self) -> None:
        self.ended = True
