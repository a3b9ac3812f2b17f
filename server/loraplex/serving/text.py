"""Between text and tokens on the API's side: the model's tokenizer and chat template, and streams of output text.

Nothing here imports torch or transformers. Encoding takes its time, without the interpreter lock: call `encode` and
`encode_chat` in a worker thread.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from loraplex.serving.chat_template import ChatTemplate
from loraplex.serving.detokenize import (
    IncrementalDetokenizer,
    TextStream,
    TokenTable,
    build_token_table,
)
from loraplex.serving.errors import TemplateError, TextTooLong, TokenizerUnsupported

MAX_CHARS_PER_TOKEN = 32
"""A generous mean: prose has about 4 characters a token, indented code up to 10."""
MAX_DEPTH = 64
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class TokenText:
    """`data` is what a token adds to the text, None for one that adds nothing. `text` is the same to be read, with
    bytes that are no whole character as "\\xe2", or the name of a token that adds nothing."""

    text: str
    data: bytes | None


@dataclass(frozen=True, slots=True)
class Spelling:
    """The text of a prompt, and for each of its tokens where its part begins and ends. That of a token which ends
    inside a character ends behind the character."""

    text: str
    spans: tuple[tuple[int, int], ...]


class TextProcessor:
    """The tokenizer and the chat template of the model in `model_dir`.

    `max_model_len` caps what is tokenised at all: a text of more than 32 characters for each token of the context
    is refused by its length. Raises TokenizerUnsupported and TemplateError where the files are missing or of an
    unknown kind. Safe to use from several threads.
    """

    def __init__(self, model_dir: str | Path, *, max_model_len: int) -> None:
        path = Path(model_dir)
        try:
            raw = (path / "tokenizer.json").read_text("utf-8")
            self._tokenizer: Tokenizer = Tokenizer.from_str(raw)
            decoder = json.loads(raw).get("decoder")
        except Exception as error:  # the library raises plain Exceptions
            raise TokenizerUnsupported(f"cannot load {path / 'tokenizer.json'}: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._max_chars = max_model_len * MAX_CHARS_PER_TOKEN
        added = self._tokenizer.get_added_tokens_decoder()
        special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.table: TokenTable = build_token_table(
            self._tokenizer.get_vocab(with_added_tokens=True), special_ids, decoder
        )
        self.special_ids = special_ids
        self._written = {token_id: token.content for token_id, token in added.items()}
        config = _read_json(path / "tokenizer_config.json")
        self._templates = {
            name: ChatTemplate(source, _special_tokens(path, config))
            for name, source in _template_sources(path, config).items()
        }
        self._controls = {name: _Controls(self._tokenizer, t) for name, t in self._templates.items()}

    @property
    def vocab_size(self) -> int:
        """Tokens that have a text or a meaning; the model's own count may be padded beyond it."""
        return len(self.table.token_bytes)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """A raw prompt's tokens. Control tokens written in it are control tokens: who sends a raw prompt writes
        the template himself. Raises TextTooLong."""
        self._check_length(len(text))
        return _token_ids(self._tokenizer, _encodable(text), add_special_tokens=add_special_tokens)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The conversation as the template writes it. Raises TemplateError, TextTooLong."""
        template = self._templates[self._template_for(tools)]
        self._check_length(_text_length(messages) + _text_length(tools))
        normal = template.normalize_messages(messages)
        return template.render(normal, tools, add_generation_prompt=add_generation_prompt)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """The conversation's tokens: those of the rendered text, but that no message can forge a control token.

        What a message says may look like the template's own marks ("<|im_end|>") and would then end its turn and
        begin another in the name of the system. So each control token in a string of the input is put between two
        markers with an unguessable number before it is rendered. The rendered text is cut at them; what stands
        between a pair is encoded as plain text, the rest as usual. A conversation without such strings is rendered
        without a marker and encoded in one piece, exactly as transformers does it (whose
        `sanitize_control_tokens` is the same idea, with fixed markers). Raises TemplateError, TextTooLong.
        """
        name = self._template_for(tools)
        template, controls = self._templates[name], self._controls[name]
        self._check_length(_text_length(messages) + _text_length(tools))
        normal = template.normalize_messages(messages)
        marker = _Marker()
        marked = [
            {key: value if key == "role" else controls.mark(value, marker) for key, value in m.items()}
            for m in normal
        ]
        marked_tools = None if tools is None else [controls.mark(dict(tool), marker) for tool in tools]
        text = template.render(marked, marked_tools, add_generation_prompt=add_generation_prompt)
        self._check_length(len(text) - marker.length_in(text))
        if not marker.used:
            return _token_ids(self._tokenizer, _encodable(text))
        return controls.encode(_encodable(text), marker)

    def stream(
        self,
        stops: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        continues: bool = False,
        by_token: bool = False,
    ) -> TextStream:
        """The text of one choice as its tokens come. `continues`: it goes on where the prompt's text ended, as a
        completion does and a chat answer does not. `by_token`: it tells which tokens a piece completes."""
        return TextStream(self.table, stops, min_tokens=min_tokens, continues=continues, by_token=by_token)

    def decode(self, token_ids: Sequence[int], *, continues: bool = False) -> str:
        """The text of a whole output, special tokens left out."""
        stream = self.stream(continues=continues)
        return stream.push(token_ids).text + stream.finish().text

    def token(self, token_id: int) -> TokenText:
        """One token by itself, for log probabilities."""
        if data := self.table[token_id]:
            return TokenText(data.decode("utf-8", "backslashreplace"), data)
        return TokenText(self._written.get(token_id, f"token_id:{token_id}"), None)

    def spell(self, token_ids: Sequence[int], written: str | None = None) -> Spelling:
        """A prompt as its tokens have it. Control tokens are written out, but for those that do not stand in the text
        that they were made from, `written`: the tokenizer added them."""
        written = None if written is None else _encodable(written)
        detokenizer = IncrementalDetokenizer(self.table)
        spans: list[tuple[int, int]] = []
        parts: list[str] = []
        length = 0
        for token_id in token_ids:
            text = detokenizer.push(token_id)
            name = "" if self.table[token_id] else self._written.get(token_id, "")
            if name:
                text += detokenizer.finish()
                if written is None or written.startswith(name, length + len(text)):
                    text += name
            parts.append(text)
            spans.append((length, length + len(text) + detokenizer.in_character))
            length += len(text)
        return Spelling("".join(parts) + detokenizer.finish(), tuple(spans))

    def _template_for(self, tools: Sequence[Mapping[str, Any]] | None) -> str:
        if not self._templates:
            raise TemplateError("this model has no chat template; use /v1/completions")
        if tools and "tool_use" in self._templates:
            return "tool_use"
        return "default" if "default" in self._templates else next(iter(self._templates))

    def _check_length(self, num_chars: int) -> None:
        if num_chars > self._max_chars:
            raise TextTooLong(
                f"This model's maximum context length is {self._max_chars // MAX_CHARS_PER_TOKEN} tokens. However, "
                f"your prompt is too long: {num_chars} characters, more than so many tokens hold. Please shorten it."
            )


class _Marker:
    """A pair of marks that nobody who wrote the input can know."""

    def __init__(self) -> None:
        number = secrets.token_hex(12)
        self.start, self.end = f"\ue000{number}", f"\ue001{number}"
        self.used = False

    def wrap(self, match: re.Match[str]) -> str:
        self.used = True
        return f"{self.start}{match[0]}{self.end}"

    def length_in(self, text: str) -> int:
        """Characters of `text` that are marks."""
        if not self.used:
            return 0
        return text.count(self.start) * len(self.start) + text.count(self.end) * len(self.end)


class _Controls:
    """The control tokens of a template: every special token, and the other added tokens that the template writes
    itself (such as Qwen's "<think>")."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        tokens = {
            token.content: (token_id, token.normalized)
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.content
            and (token.special or (token.content in template.literals and not token.content.isspace()))
        }
        self._ids = frozenset(token_id for token_id, _ in tokens.values())
        longest_first = sorted(tokens, key=len, reverse=True)
        self._any = "|".join(map(re.escape, longest_first)) or "(?!)"
        self._pattern = re.compile(self._any)
        # Those that are looked for in the normalised text, where something else may have become one of them.
        self._normalized = [content for content, (_, normalized) in tokens.items() if normalized]
        self._newline = _token_ids(tokenizer, "\n")

    def mark(self, value: Any, marker: _Marker) -> Any:
        """`value` as plain data with every control token in a string marked. Raises TemplateError for one in a
        key, or one that only normalising makes."""
        if isinstance(value, str):
            self._check_normalized(value)
            return self._pattern.sub(marker.wrap, value)
        if isinstance(value, Mapping):
            for key in value:
                if self._pattern.search(str(key)):
                    raise TemplateError("a field's name holds one of the model's control tokens")
            return {str(key): self.mark(item, marker) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(item, marker) for item in value]
        if value is None or isinstance(value, bool | int | float):
            return value
        raise TemplateError(f"messages hold a value of the unknown kind {type(value).__name__}")

    def encode(self, text: str, marker: _Marker) -> list[int]:
        """A rendered text with marks. A lone mark, which a template that cuts strings can leave, still parts the
        text, so that nothing joins into a control token across it."""
        marks = re.compile(f"{marker.start}({self._any}){marker.end}|{marker.start}|{marker.end}")
        ids: list[int] = []
        # [text, token or None, text, …, text]
        for index, piece in enumerate(marks.split(text)):
            if not piece:
                continue
            if index % 2:
                ids += self._encode_plain(piece)
            elif index == 0:
                ids += self._encode(piece)
            else:
                ids += self._encode_inner(self._encode, piece)
        return ids

    def _encode(self, text: str) -> list[int]:
        return _token_ids(self._tokenizer, text)

    def _encode_plain(self, token: str) -> list[int]:
        """A control token's letters. Where even these make the token (a vocabulary that holds it as a word), its
        first letter is encoded apart."""
        ids = self._encode_inner(self._without_added_tokens, token)
        if self._ids.isdisjoint(ids):
            return ids
        if len(token) == 1:
            raise TemplateError("a message holds a control token that cannot be written as text")
        return self._encode_plain(token[0]) + self._encode_plain(token[1:])

    def _encode_inner(self, encode: Callable[[str], list[int]], piece: str) -> list[int]:
        """A piece from the middle of a text: encoded behind a newline that is cut off again, as SentencePiece
        would put a space before what begins a text (the way transformers does it)."""
        ids = encode("\n" + piece)
        if ids[: len(self._newline)] == self._newline:
            return ids[len(self._newline) :]
        return encode(piece)

    def _without_added_tokens(self, text: str) -> list[int]:
        normalizer, pre_tokenizer = self._tokenizer.normalizer, self._tokenizer.pre_tokenizer
        if normalizer is not None:
            text = normalizer.normalize_str(text)
        words = [text] if pre_tokenizer is None else [w for w, _ in pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for word in words for token in self._tokenizer.model.tokenize(word)]

    def _check_normalized(self, text: str) -> None:
        normalizer = self._tokenizer.normalizer
        if normalizer is None or not self._normalized:
            return
        normal = normalizer.normalize_str(text)
        if any(normal.count(content) > text.count(content) for content in self._normalized):
            raise TemplateError("a message holds characters that turn into one of the model's control tokens")


def _token_ids(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = False) -> list[int]:
    """As `tokenizer.encode` has it, which holds the interpreter lock all the while; a batch of one does not, and
    leaves out the offsets that nobody asks for."""
    (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return list(encoding.ids)


def _encodable(text: str) -> str:
    """Lone surrogates (from "\\ud800" in JSON) are no characters and cannot be encoded: they read as U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _text_length(value: Any, depth: int = 0) -> int:
    """Characters in all strings of a JSON value. Raises TemplateError for one that is nested too deeply."""
    if depth > MAX_DEPTH:
        raise TemplateError(f"messages are nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(len(str(key)) + _text_length(item, depth + 1) for key, item in value.items())
    if isinstance(value, list | tuple):
        return sum(_text_length(item, depth + 1) for item in value)
    return 0


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise TokenizerUnsupported(f"{path} is not JSON: {error}") from error
    return value if isinstance(value, dict) else {}


def _special_tokens(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that templates know by name."""
    tokens = {}
    for source in (_read_json(path / "special_tokens_map.json"), config):
        for name in NAMED_TOKENS:
            value = source.get(name)
            content = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(content, str):
                tokens[name] = content
    return tokens


def _template_sources(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name, from the first place that has one, in the order of transformers."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return {"default": file.read_text("utf-8")}
    value = _read_json(path / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        return {
            str(item["name"]): str(item["template"])
            for item in value
            if isinstance(item, Mapping) and "name" in item and "template" in item
        }
    return {}
