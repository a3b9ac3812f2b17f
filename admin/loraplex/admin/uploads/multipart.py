"""The multipart body of an upload, cut into its known parts while it arrives. No I/O here.

Which parts there may be, and how long their contents are. What a client calls its file never becomes a path.
"""

from __future__ import annotations

from enum import Enum

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
from loraplex.http.form import FormReader

ARCHIVE_NAME = "archive"
SERVING_NAME = "serving"
MAX_SERVING_BYTES = 4096
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
    MODEL_CONFIG = "config.json"
    MODULES = "modules.json"
    POOLING = "1_Pooling/config.json"
    PROMPTS = "config_sentence_transformers.json"


_PARTS = {part.value: part for part in Part} | {MLX_TENSORS_NAME: Part.TENSORS}
_SMALL = {
    Part.CONFIG: MAX_CONFIG_BYTES,
    Part.SERVING: MAX_SERVING_BYTES,
    **{Part(name): most for name, most in UPLOAD_FILE_BYTES.items()},
}


class UploadParser(FormReader):
    """Feed it the body; it gives (part, bytes) pieces, in order, none of them kept.

    A part is known by its form name; a part named `file` or `files` by its file name, which must be one of
    the files'. The tensors may have mlx-lm's name too. Each part comes once; an archive comes without them. `max_bytes`
    bounds the parts' contents together.
    `serving` has the field of that name, which is no file.
    """

    def __init__(self, content_type: str, *, max_bytes: int) -> None:
        """Raises Problem (415, 400) for what is no multipart form."""
        super().__init__(content_type, _WHAT_IS_WANTED)
        self._max_bytes = max_bytes
        self._room = {
            **_SMALL,
            Part.TENSORS: max_bytes,
            Part.ARCHIVE: max_bytes,
        }
        self.serving = bytearray()
        self._total = 0
        self._seen: set[Part] = set()
        self._current = Part.CONFIG
        self._pieces: list[tuple[Part, bytes]] = []

    def damaged(self, message: str, param: str | None = None) -> Problem:
        return Problem("invalid_multipart", message, param=param)

    def unsupported(self, message: str) -> Problem:
        return Problem("unsupported_media_type", message, param="Content-Type")

    @property
    def seen(self) -> frozenset[Part]:
        """The parts that have begun."""
        return frozenset(self._seen)

    def feed(self, chunk: bytes) -> list[tuple[Part, bytes]]:
        """The parts that `chunk` completes. Raises Problem, and AdapterRefused for weights of another format."""
        self.write(chunk)
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self) -> frozenset[Part]:
        """The files of a body that has ended: two and those of its chats, or the archive. Raises Problem."""
        self.check_ended()
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

    def begin_part(self, name: str, filename: str | None) -> None:
        part = self._which_part(name, filename or "")
        if part in self._seen:
            raise Problem("invalid_multipart", f"The part {part.value} comes twice.", param=part.value)
        files = (self._seen | {part}) - {Part.SERVING}
        if len(files) > 1 and Part.ARCHIVE in files:
            raise Problem(
                "invalid_multipart",
                f"An archive comes without other files. {_WHAT_IS_WANTED}",
                param=ARCHIVE_NAME,
            )
        self._seen.add(part)
        self._current = part

    def _which_part(self, name: str, filename: str) -> Part:
        wanted = filename if name in ("file", "files") else name
        if (kind := weights_kind(wanted)) is not None:
            raise foreign_weights(wanted, kind)
        if wanted not in _PARTS or (wanted in (ARCHIVE_NAME, SERVING_NAME) and wanted != name):
            raise Problem(
                "invalid_multipart",
                f"The part {shown(wanted)} is none that an upload has. {_WHAT_IS_WANTED}",
                param=name[:80],
            )
        return _PARTS[wanted]

    def part_data(self, data: bytes) -> None:
        part, size = self._current, len(data)
        self._total += size
        self._room[part] -= size
        if part in _SMALL and self._room[part] < 0:
            raise Problem("too_large", f"{part.value} is larger than {_SMALL[part]} bytes.", param=part.value)
        if part is Part.SERVING:
            self.serving += data
            return
        if self._total > self._max_bytes:
            raise too_large(self._max_bytes)
        self._pieces.append((part, data))


def too_large(max_bytes: int) -> Problem:
    return Problem(
        "too_large",
        f"The upload is larger than {max_bytes} bytes, which is the most that this server takes "
        "(--max-adapter-upload).",
    )
