"""The files of an upload for its chats: a chat template, special tokens by name, and the tokens that end an answer.

Nothing of it is compiled or run here: a template is text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loraplex.adapters.end_tokens import NAMED_ENDS
from loraplex.adapters.errors import AdapterRefused
from loraplex.adapters.store.files import CHAT_FILE_BYTES, TOKENIZER_NAME, open_regular, shown

TEMPLATE_FILE, TOKENIZER_FILE, TOKENS_FILE, GENERATION_FILE, TOOL_TEMPLATE_FILE = CHAT_FILE_BYTES
MAX_TEMPLATE_BYTES = CHAT_FILE_BYTES[TEMPLATE_FILE]
"""The largest size of a version's templates together."""
NAMED_TOKENS = ("bos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token", *NAMED_ENDS)
_NAMED_GROUPS = ("model_specific_special_tokens", "extra_special_tokens")
"""Objects of tokens by name, in a tokenizer's config. As a list the second names none."""
_NO_NAMES = frozenset({"self", "messages", "tools", "documents", "add_generation_prompt"})
"""Names under which every template is given something else."""
TEMPLATE_NAMES = ("default", "tool_use")
"""The templates that chats use, of those that a tokenizer may have."""
MORE_TEMPLATES = "additional_chat_templates"
"""The folder that save_pretrained writes templates into whose name is not "default"."""
MAX_EOS_IDS = 64
MAX_TOKEN_CHARS = 256
_MAX_DIGITS = 18
_Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class OwnChat:
    """The part of a version's chats that differs from its base's: `templates` by name (none: the base's serve), and
    their `special_tokens` by name; `eos_ids`, tokens of the base that end an answer beside the base's own."""

    templates: Mapping[str, str] = field(default_factory=dict)
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    eos_ids: tuple[int, ...] = ()

    @classmethod
    def of_json(cls, value: Mapping[str, Any]) -> OwnChat:
        return cls(value["templates"], value["special_tokens"], tuple(value["eos_ids"]))

    def as_json(self) -> _Json:
        return {
            "templates": dict(self.templates),
            "special_tokens": dict(self.special_tokens),
            "eos_ids": list(self.eos_ids),
        }

    @property
    def canonical(self) -> bytes:
        return json.dumps(self.as_json(), sort_keys=True, separators=(",", ":")).encode()

    @property
    def digest(self) -> str:
        """64 hex characters of SHA-256: equal for equal chats."""
        return hashlib.sha256(self.canonical).hexdigest()

    def files(self) -> dict[str, bytes]:
        """The same as an upload's files, by name: read again, they give an equal value."""
        found: dict[str, bytes] = {}
        if set(self.templates) == {"default"}:
            found[TEMPLATE_FILE] = self.templates["default"].encode()
        elif self.templates:
            listed = [{"name": name, "template": text} for name, text in self.templates.items()]
            found[TOKENIZER_FILE] = _pretty({"chat_template": listed})
        if self.special_tokens:
            found[TOKENS_FILE] = _pretty(dict(self.special_tokens))
        if self.eos_ids:
            found[GENERATION_FILE] = _pretty({"eos_token_id": list(self.eos_ids)})
        return found


@dataclass(frozen=True, slots=True)
class ChatFiles:
    """The content of an upload's files. `eos_ids` are those of its generation config; `added`: the tokens that its
    tokenizer's config lists; `tokenizer`: where its tokenizer.json lies; `generation`: its generation config."""

    templates: Mapping[str, str]
    special_tokens: Mapping[str, str]
    eos_ids: tuple[int, ...]
    added: tuple[str, ...]
    tokenizer: Path | None = None
    generation: Mapping[str, Any] = field(default_factory=dict)


def read_chat_files(folder: Path) -> ChatFiles | None:
    """None where none of the files is there. Raises AdapterRefused (config_invalid, too_large), OSError."""
    found = {name: data for name in CHAT_FILE_BYTES if (data := _content(folder, name)) is not None}
    tokenizer = folder / TOKENIZER_NAME if (folder / TOKENIZER_NAME).is_file() else None
    if not found and tokenizer is None:
        return None
    config = _object(found, TOKENIZER_FILE)
    templates = _templates(found, config)
    written = "\0".join(templates.values())
    named = named_tokens(_object(found, TOKENS_FILE), config).items()
    generation = _object(found, GENERATION_FILE)
    return ChatFiles(
        templates,
        {name: text for name, text in named if name in NAMED_TOKENS or name in written},
        _eos_ids(generation.get("eos_token_id")),
        _added(config.get("added_tokens_decoder")),
        tokenizer,
        generation,
    )


def _content(folder: Path, name: str) -> bytes | None:
    most = CHAT_FILE_BYTES[name]
    try:
        with open_regular(folder / name) as file:
            data = b"".join(iter(lambda: file.read(most + 1), b""))
    except (FileNotFoundError, NotADirectoryError):
        return None
    if len(data) > most:
        raise AdapterRefused("too_large", f"{name} has more than {most} bytes; leave it out.")
    return data


def _object(found: Mapping[str, bytes], name: str) -> _Json:
    if name not in found:
        return {}
    try:
        value = json.loads(found[name].decode("utf-8"), parse_int=_number)
    except RecursionError:
        raise _invalid(name, "it is nested too deeply") from None
    except ValueError as error:
        raise _invalid(name, shown(error, 160)) from None
    if not isinstance(value, dict):
        raise _invalid(name, "it is not a JSON object")
    return value


def _number(digits: str) -> int | float:
    """Usual files have numbers of more than 64 bits, such as model_max_length, which nobody reads."""
    return int(digits) if len(digits) <= _MAX_DIGITS else float(digits)


def _templates(found: Mapping[str, bytes], config: _Json) -> dict[str, str]:
    """Templates by the names that chats use, from the first place that has a default one, in the order of
    transformers."""
    files = {"default": TEMPLATE_FILE, "tool_use": TOOL_TEMPLATE_FILE}
    given = {name: _text(found[file], file) for name, file in files.items() if file in found}
    where = TEMPLATE_FILE
    if "default" not in given:
        where = f"{TOKENIZER_FILE}: chat_template"
        given = _listed(config.get("chat_template"), where) | given
    given = {name: text for name, text in given.items() if text.strip()}
    if "default" not in given:  # an empty one is none
        return {}
    for text in given.values():
        if "\0" in text or not _is_encodable(text):
            raise _invalid(where, "a template holds what is no character")
    if sum(len(text.encode()) for text in given.values()) > MAX_TEMPLATE_BYTES:
        raise AdapterRefused(
            "too_large",
            f"{where} has more than {MAX_TEMPLATE_BYTES} bytes; leave it out, and the base's template serves.",
        )
    return given


def _text(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _invalid(where, f"it is not UTF-8 (byte {error.start})") from None


def _listed(value: Any, where: str) -> dict[str, str]:
    if value is None:
        return {}
    by_name = used_templates(named_templates(value))
    if not by_name:
        raise _invalid(where, "it is neither a template nor a list of them by name")
    return by_name


def named_templates(value: object) -> dict[str, str]:
    """Templates by name, of a `chat_template` in a tokenizer's config: one, a list of them, or an object."""
    if isinstance(value, str):
        return {"default": value}
    listed = value if isinstance(value, list) else []
    pairs = [(item.get("name"), item.get("template")) for item in listed if isinstance(item, dict)]
    pairs += value.items() if isinstance(value, dict) else ()
    return {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}


def named_tokens(special_map: _Json, config: _Json) -> dict[str, str]:
    """The special tokens that templates know by name, as in transformers: of special_tokens_map.json and of
    tokenizer_config.json, which goes before the other if it lists the added tokens."""
    given: _Json = {}
    order = (special_map, config) if "added_tokens_decoder" in config else (config, special_map)
    for source in order:
        given |= {name: value for name, value in source.items() if name.endswith("_token")}
        for group in _NAMED_GROUPS:
            named = source.get(group)
            given |= named if isinstance(named, dict) else {}
    return {
        name: text
        for name, value in given.items()
        if (text := _token_text(value)) is not None and name.isidentifier() and name not in _NO_NAMES
    }


def used_templates(by_name: Mapping[str, str]) -> dict[str, str]:
    """The templates that chats use. Without a default one, the first serves."""
    chosen = {name: by_name[name] for name in TEMPLATE_NAMES if name in by_name}
    if by_name and "default" not in chosen:
        chosen["default"] = next(iter(by_name.values()))
    return chosen


def _eos_ids(value: Any) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if len(ids) > MAX_EOS_IDS or any(type(number) is not int or not 0 <= number < 1 << 31 for number in ids):
        raise _invalid(GENERATION_FILE, f"eos_token_id is a token id, or a list of at most {MAX_EOS_IDS}")
    return tuple(ids)


def _added(value: Any) -> tuple[str, ...]:
    listed = value.values() if isinstance(value, dict) else ()
    return tuple(text for item in listed if (text := _token_text(item)) is not None)


def _token_text(value: Any) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str) or not 0 < len(text) <= MAX_TOKEN_CHARS:
        return None
    return text if _is_encodable(text) and "\0" not in text else None


def _is_encodable(text: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _pretty(value: _Json) -> bytes:
    return json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"


def _invalid(where: str, why: str) -> AdapterRefused:
    return AdapterRefused("config_invalid", f"{where} cannot be used: {why}. Mend it, or leave it out.")
