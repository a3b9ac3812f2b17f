"""The form that uploads a file: `purpose`, `file`, and when it expires. No I/O here."""

from __future__ import annotations

from loraplex.api.errors import ApiError, invalid
from loraplex.control.rules import check_text, is_plain_text
from loraplex.http.form import FormReader
from loraplex.http.text import printable

MAX_FIELD_BYTES = 256
ANCHOR, SECONDS = "expires_after[anchor]", "expires_after[seconds]"
MIN_EXPIRES_S, MAX_EXPIRES_S = 3600, 2_592_000
_FIELDS = ("purpose", ANCHOR, SECONDS)
_WANTED = "Send the fields 'purpose' (batch) and 'file' (a file of JSON lines)."


class FileForm(FormReader):
    """`feed` gives the file's bytes as they come. The name is known when the first of them are."""

    def __init__(self, content_type: str) -> None:
        """Raises ApiError (400, 415)."""
        super().__init__(content_type, _WANTED)
        self.filename: str | None = None
        self._fields: dict[str, bytearray] = {}
        self._field: str | None = None
        self._pieces: list[bytes] = []

    def damaged(self, message: str, param: str | None = None) -> ApiError:
        return invalid(param, message)

    def unsupported(self, message: str) -> ApiError:
        return ApiError("unsupported_media_type", message, param="Content-Type")

    def begin_part(self, name: str, filename: str | None) -> None:
        if name == "file":
            if self.filename is not None:
                raise invalid("file", "The field 'file' comes twice; send one file at a time.")
            self._field, self.filename = None, _filename(filename)
            return
        if name not in _FIELDS:
            raise ApiError(
                "unsupported_field", f"Unknown field: '{printable(name)}'. {_WANTED}", param=name[:80]
            )
        if name in self._fields:
            raise invalid(name, f"The field '{name}' comes twice.")
        self._field = name
        self._fields[name] = bytearray()

    def part_data(self, data: bytes) -> None:
        if self._field is None:
            self._pieces.append(data)
            return
        value = self._fields[self._field]
        value += data
        if len(value) > MAX_FIELD_BYTES:
            raise invalid(self._field, f"'{self._field}' is longer than {MAX_FIELD_BYTES} bytes.")

    def feed(self, chunk: bytes) -> bytes:
        """More of the file. Raises ApiError (400)."""
        self.write(chunk)
        data, self._pieces = b"".join(self._pieces), []
        return data

    def finish(self) -> float | None:
        """Seconds after which the file expires, where the client says so. Raises ApiError (400)."""
        self.check_ended()
        if self.filename is None:
            raise invalid("file", f"The field 'file' is missing. {_WANTED}")
        purpose = self._text("purpose")
        if purpose != "batch":
            given = "is missing" if purpose is None else f"has the value '{printable(purpose)}'"
            raise invalid("purpose", f"'purpose' {given}; files of the purpose 'batch' are kept here.")
        anchor, seconds = self._text(ANCHOR), self._text(SECONDS)
        if anchor is None and seconds is None:
            return None
        if anchor != "created_at":
            raise invalid(ANCHOR, f"'{ANCHOR}' has to be 'created_at'.")
        number = int(seconds) if seconds and seconds.isascii() and seconds.isdigit() else 0
        if not MIN_EXPIRES_S <= number <= MAX_EXPIRES_S:
            raise invalid(SECONDS, f"'{SECONDS}' is a whole number from {MIN_EXPIRES_S} to {MAX_EXPIRES_S}.")
        return float(number)

    def _text(self, name: str) -> str | None:
        value = self._fields.get(name)
        return None if value is None else value.decode("utf-8", "replace")


def _filename(given: str | None) -> str:
    # The parser's text is Latin-1, whatever the client wrote.
    name = (given or "upload.jsonl").encode("latin-1").decode("utf-8", "replace")
    if not is_plain_text(name):
        raise invalid("file", "The file's name has characters that cannot be printed.")
    return check_text(name[-200:], "file") or "upload.jsonl"
