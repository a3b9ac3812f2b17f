"""The multipart body of a push, cut into its two parts while it arrives. No I/O here."""

from __future__ import annotations

from loraplex.adapters.store.files import TENSORS_NAME, shown
from loraplex.admin.problem import Problem
from loraplex.http.form import FormReader

AGREEMENT_NAME = "agreement"
MAX_AGREEMENT_BYTES = 512 << 10
"""The most tokens that are compared have some 270 KB as JSON, and 380 KB with ids and numbers of most digits."""
_WANTED = f"Send {TENSORS_NAME} and {AGREEMENT_NAME}."


class PushForm(FormReader):
    """Feed it the body; it gives the bytes of the tensors, none of them kept. `agreement` has the part of that name."""

    def __init__(self, content_type: str) -> None:
        """Raises Problem (415, 400) for what is no multipart form."""
        super().__init__(content_type, _WANTED)
        self.agreement = bytearray()
        self._seen: list[str] = []
        self._tensors = bytearray()

    def damaged(self, message: str, param: str | None = None) -> Problem:
        return Problem("invalid_multipart", message, param=param)

    def unsupported(self, message: str) -> Problem:
        return Problem("unsupported_media_type", message, param="Content-Type")

    def feed(self, chunk: bytes) -> bytes:
        """The tensors' bytes that `chunk` has. Raises Problem."""
        self.write(chunk)
        found = bytes(self._tensors)
        self._tensors.clear()
        return found

    def finish(self) -> None:
        """Raises Problem (400) where the body has not ended, or a part is missing."""
        self.check_ended()
        for name in (TENSORS_NAME, AGREEMENT_NAME):
            if name not in self._seen:
                raise Problem("invalid_multipart", f"The part {name} is missing. {_WANTED}", param=name)

    def begin_part(self, name: str, filename: str | None) -> None:
        if name not in (TENSORS_NAME, AGREEMENT_NAME):
            told = f"The part {shown(name)} is none that a push has. {_WANTED}"
            raise Problem("invalid_multipart", told, param=name[:80])
        if name in self._seen:
            raise Problem("invalid_multipart", f"The part {name} comes twice.", param=name)
        self._seen.append(name)

    def part_data(self, data: bytes) -> None:
        if self._seen[-1] == TENSORS_NAME:
            self._tensors += data
            return
        self.agreement += data
        if len(self.agreement) > MAX_AGREEMENT_BYTES:
            told = f"{AGREEMENT_NAME} is larger than {MAX_AGREEMENT_BYTES} bytes."
            raise Problem("too_large", told, param=AGREEMENT_NAME)
