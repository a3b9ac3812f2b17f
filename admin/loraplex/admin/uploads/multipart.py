"""The multipart body of an upload, cut into its known parts while it arrives. No I/O here.

Around python-multipart's incremental parser: which parts there may be, how many, how long their headers and their
contents are. What a client calls its file never becomes a path.
"""

from __future__ import annotations

import logging
from enum import Enum
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from loraplex.adapters.contents.places import foreign_weights, weights_kind
from loraplex.adapters.store.files import (
    CONFIG_NAME,
    MAX_CONFIG_BYTES,
    MLX_TENSORS_NAME,
    TENSORS_NAME,
    TOKENIZER_NAME,
    UPLOAD_FILE_BYTES,
    shown,
)
from loraplex.admin.problem import Problem

ARCHIVE_NAME = "archive"
SERVING_NAME = "serving"
MAX_SERVING_BYTES = 4096
MAX_HEADERS = 8
MAX_HEADER_BYTES = 4096
_PLAIN_ENCODINGS = frozenset({"", "7bit", "8bit", "binary", "identity"})
_WHAT_IS_WANTED = f"Send {CONFIG_NAME} and {TENSORS_NAME} as files, or one {ARCHIVE_NAME}."


class Part(Enum):
    """A part that an upload may have, by its name in the form."""

    CONFIG = CONFIG_NAME
    TENSORS = TENSORS_NAME
    ARCHIVE = ARCHIVE_NAME
    SERVING = SERVING_NAME
    CHAT_TEMPLATE = "chat_template.jinja"
    TOKENIZER_CONFIG = "tokenizer_config.json"
    SPECIAL_TOKENS = "special_tokens_map.json"
    GENERATION_CONFIG = "generation_config.json"
    TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"
    TOKENIZER = TOKENIZER_NAME


_PARTS = {part.value: part for part in Part} | {MLX_TENSORS_NAME: Part.TENSORS}
_SMALL = {
    Part.CONFIG: MAX_CONFIG_BYTES,
    Part.SERVING: MAX_SERVING_BYTES,
    **{Part(name): most for name, most in UPLOAD_FILE_BYTES.items()},
}


class UploadParser:
    """Feed it the body; it gives (part, bytes) pieces, in order, none of them kept.

    A part is known by its form name; a part named `file` or `files` by its file name, which must be one of
    the files'. The tensors may have mlx-lm's name too. Each part comes once; an archive comes without them. `max_bytes`
    bounds the parts' contents together.
    `serving` has the field of that name, which is no file.
    """

    def __init__(self, content_type: str, *, max_bytes: int) -> None:
        """Raises Problem (415, 400) for what is no multipart form."""
        kind, options = parse_options_header(content_type[:1024])
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data":
            raise Problem(
                "unsupported_media_type", f"Send multipart/form-data. {_WHAT_IS_WANTED}", param="Content-Type"
            )
        if not 1 <= len(boundary) <= 70:
            raise Problem(
                "invalid_multipart",
                "Content-Type needs a boundary of 1 to 70 characters.",
                param="Content-Type",
            )
        self._max_bytes = max_bytes
        self._room = {
            **_SMALL,
            Part.TENSORS: max_bytes,
            Part.ARCHIVE: max_bytes,
        }
        self.serving = bytearray()
        self._total = 0
        self._seen: set[Part] = set()
        self._current: Part | None = None
        self._headers: dict[str, str] = {}
        self._num_headers = 0
        self._name = bytearray()
        self._value = bytearray()
        self._header_bytes = 0
        self._pieces: list[tuple[Part, bytes]] = []
        self._has_begun = False
        self._ended = False
        callbacks: Any = {
            "on_part_begin": self._begin_part,
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

    @property
    def seen(self) -> frozenset[Part]:
        """The parts that have begun."""
        return frozenset(self._seen)

    def feed(self, chunk: bytes) -> list[tuple[Part, bytes]]:
        """The parts that `chunk` completes. Raises Problem, and AdapterRefused for weights of another format."""
        try:
            self._parser.write(chunk)
        except FormParserError:
            if not self._has_begun:
                # MIME allows a preamble, but no client sends one with a form. So it is another boundary, or no form.
                raise Problem(
                    "invalid_multipart",
                    "The body does not begin with the boundary that Content-Type names. Send no text before the first "
                    f"boundary. {_WHAT_IS_WANTED}",
                ) from None
            raise Problem("invalid_multipart", f"The multipart body is damaged. {_WHAT_IS_WANTED}") from None
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self) -> frozenset[Part]:
        """The files of a body that has ended: two and those of its chats, or the archive. Raises Problem."""
        if not self._ended:
            raise Problem("invalid_multipart", "The multipart body ends before its last boundary.")
        if Part.ARCHIVE in self._seen:
            return self.seen - {Part.SERVING}
        for part in (Part.CONFIG, Part.TENSORS):
            if part not in self._seen:
                raise Problem(
                    "invalid_multipart",
                    f"The part {part.value} is missing. {_WHAT_IS_WANTED}",
                    param=part.value,
                )
        return self.seen - {Part.SERVING}

    # What the parser calls.

    def _begin_part(self) -> None:
        self._has_begun = True
        self._current = None
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
            raise Problem("invalid_multipart", f"A part's headers are longer than {MAX_HEADER_BYTES} bytes.")

    def _end_header(self) -> None:
        self._num_headers += 1
        if self._num_headers > MAX_HEADERS:
            raise Problem("invalid_multipart", f"A part has more than {MAX_HEADERS} headers.")
        name = self._name.decode("latin-1").lower()
        if name in self._headers:
            raise Problem("invalid_multipart", f"A part has the header {shown(name)} twice.")
        self._headers[name] = self._value.decode("latin-1")
        self._name.clear()
        self._value.clear()

    def _begin_data(self) -> None:
        part = self._which_part()
        if part in self._seen:
            raise Problem("invalid_multipart", f"The part {part.value} comes twice.", param=part.value)
        files = (self._seen | {part}) - {Part.SERVING}
        if len(files) > 1 and Part.ARCHIVE in files:
            raise Problem(
                "invalid_multipart",
                f"An archive comes without other files. {_WHAT_IS_WANTED}",
                param=ARCHIVE_NAME,
            )
        encoding = self._headers.get("content-transfer-encoding", "").strip().lower()
        if encoding not in _PLAIN_ENCODINGS:
            raise Problem(
                "invalid_multipart",
                f"The part {part.value} is encoded as {shown(encoding)}; send its bytes as they are.",
                param=part.value,
            )
        self._seen.add(part)
        self._current = part

    def _which_part(self) -> Part:
        disposition, options = parse_options_header(self._headers.get("content-disposition", ""))
        if disposition != b"form-data" or b"name" not in options:
            raise Problem("invalid_multipart", "A part has no Content-Disposition: form-data with a name.")
        name = options[b"name"].decode("latin-1")
        wanted = options.get(b"filename", b"").decode("latin-1") if name in ("file", "files") else name
        if (kind := weights_kind(wanted)) is not None:
            raise foreign_weights(wanted, kind)
        if wanted not in _PARTS or (wanted in (ARCHIVE_NAME, SERVING_NAME) and wanted != name):
            raise Problem(
                "invalid_multipart",
                f"There is no part {shown(wanted)}. {_WHAT_IS_WANTED}",
                param=name[:80],
            )
        return _PARTS[wanted]

    def _data(self, data: bytes, start: int, end: int) -> None:
        part = self._current
        if part is None:
            raise Problem("invalid_multipart", "A part has no headers.")
        size = end - start
        self._total += size
        self._room[part] -= size
        if part in _SMALL and self._room[part] < 0:
            raise Problem("too_large", f"{part.value} is larger than {_SMALL[part]} bytes.", param=part.value)
        if part is Part.SERVING:
            self.serving += data[start:end]
            return
        if self._total > self._max_bytes:
            raise too_large(self._max_bytes)
        self._pieces.append((part, data[start:end]))

    def _end(self) -> None:
        self._ended = True


def too_large(max_bytes: int) -> Problem:
    return Problem(
        "too_large",
        f"The upload is larger than {max_bytes} bytes, which is the most that this server takes "
        "(--max-adapter-upload).",
    )
