"""Between text and tokens on the API's side: the model's tokenizer and chat template, and streams of output text.

Nothing here imports torch or transformers. Encoding takes its time, without the interpreter lock: call `encode` and
`encode_chat` in a worker thread.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from loraplex.adapters.admission.chat_files import OwnChat, named_templates, named_tokens, used_templates
from loraplex.adapters.end_tokens import added_tokens
from loraplex.serving.errors import TemplateError, TokenizerUnsupported
from loraplex.serving.output.format_parser import FormatParser
from loraplex.serving.output.formats import Notation, ReasoningFormat, ToolFormat
from loraplex.serving.output.parts import AnswerText, ReasoningPart, merge_parts
from loraplex.serving.output.writing import written_notation
from loraplex.serving.text.chat_encoder import MAX_CHARS_PER_TOKEN, ChatEncoder, check_length
from loraplex.serving.text.chat_template import ChatTemplate, encodable
from loraplex.serving.text.controls import token_ids_of
from loraplex.serving.text.detokenize import IncrementalDetokenizer, TextStream, TokenTable, build_token_table
from loraplex.serving.text.text_build import template_files
from loraplex.serving.text.tokenizer_comparison import Difference, compare, load_tokenizer
from loraplex.serving.text.tool_rendering import PROBE_TOOLS, probes, reads_probe
from loraplex.serving.text.turn_ends import written_ends

_OPENING_TOKENS = 16
"""Tokens at the end of a prompt that are searched for the opening of the reasoning."""


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
            self._tokenizer = load_tokenizer(raw)
            decoder = json.loads(raw).get("decoder")
        except Exception as error:  # the library raises plain Exceptions
            raise TokenizerUnsupported(f"cannot load {path / 'tokenizer.json'}: {error}") from error
        self.tokenizer_digest = sha256(raw.encode()).hexdigest()
        self._max_chars = max_model_len * MAX_CHARS_PER_TOKEN
        added = self._tokenizer.get_added_tokens_decoder()
        special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.table: TokenTable = build_token_table(
            self._tokenizer.get_vocab(with_added_tokens=True), special_ids, decoder
        )
        self.special_ids = special_ids
        self._written = {token_id: token.content for token_id, token in added.items()}
        self._special_ids = {token.content: token_id for token_id, token in added.items() if token.special}
        config = _read_json(path / "tokenizer_config.json")
        self.template_sources: Mapping[str, str] = _template_sources(path, config)
        """The chat templates by name."""
        self._named_tokens = named_tokens(_read_json(path / "special_tokens_map.json"), config)
        self._added = frozenset(self._special_ids) | frozenset(self._written.values())
        self.chat = self._chat(self.template_sources, self._named_tokens, "the model's")
        """The encoder by the model's own templates."""

    @property
    def vocab_size(self) -> int:
        """Tokens that have a text or a meaning; the model's own count may be padded beyond it."""
        return len(self.table.token_bytes)

    def token_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary writes it."""
        number: int | None = self._tokenizer.token_to_id(token)
        return number

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """A raw prompt's tokens. Control tokens written in it are control tokens: a client that sends a raw prompt
        writes the template himself. Raises TextTooLong."""
        check_length(len(text), self._max_chars)
        return token_ids_of(self._tokenizer, encodable(text), add_special_tokens=add_special_tokens)

    def encode_answer(self, text: str) -> list[int] | None:
        """The tokens that spell the beginning of an answer. None if none do: a normaliser changes the text, or a part
        of it is a control token."""
        for before in ("\n", ""):  # SentencePiece puts a space before what begins a text
            cut = len(token_ids_of(self._tokenizer, before)) if before else 0
            ids = token_ids_of(self._tokenizer, encodable(before + text))[cut:]
            if b"".join(self.table[token_id] for token_id in ids) == text.encode("utf-8", "surrogatepass"):
                return ids
        return None

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Tokens of two texts in the form that the tokenizer gives a pair, as transformers' (text, text_pair). Raises
        TextTooLong."""
        check_length(len(first) + len(second), self._max_chars)
        (encoding,) = self._tokenizer.encode_batch_fast([(encodable(first), encodable(second))])
        return list(encoding.ids)

    def compare_tokenizer(self, text: str) -> Difference | None:
        """The difference from the tokenizer of a tokenizer.json. The library raises plain Exceptions."""
        return compare(self._tokenizer, load_tokenizer(text))

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        tool_format: ToolFormat | None = None,
        effort: str | None = None,
    ) -> list[int]:
        """Encode a chat as `ChatEncoder.encode` does, by the model's own templates."""
        return self.chat.encode(
            messages,
            tools,
            add_generation_prompt=add_generation_prompt,
            tool_format=tool_format,
            effort=effort,
        )

    def knows_effort(self, *, with_tools: bool) -> bool:
        """Whether the model's chat template says how much the model is to think."""
        return self.chat.knows_effort(with_tools=with_tools)

    def check_formats(
        self,
        tool_format: ToolFormat | None,
        reasoning: ReasoningFormat | None,
        chat: ChatEncoder | None = None,
    ) -> None:
        """Whether a call comes back as it was after a round trip: through the chat template (the model's, without
        `chat`), the tokenizer, the text of
        the tokens and the format's parser; and so for reasoning, without the template. Raises TemplateError."""
        if reasoning is not None:
            ids = self.encode(f"{reasoning.opens}x{reasoning.closes}y", add_special_tokens=False)
            parser = FormatParser((), frozenset(), str, reasoning)
            text = self._read(ids, reasoning.markers)
            if merge_parts([*parser.push(text), *parser.finish()]) != [ReasoningPart("x"), AnswerText("y")]:
                raise TemplateError(
                    f"this model's tokenizer does not keep '{reasoning.opens}' as it is written"
                )
        if tool_format is not None:
            turns = (
                (chat or self.chat).encode(
                    turn, PROBE_TOOLS, add_generation_prompt=False, tool_format=tool_format
                )
                for turn in probes("text")
            )
            plain, text = (self._read(ids, tool_format.markers) for ids in turns)
            if not reads_probe(tool_format, plain, text):
                raise TemplateError(
                    "a call does not come back as it was written after it has gone through this model's chat "
                    "template and tokenizer"
                )

    def _read(self, token_ids: Sequence[int], shown: Collection[str]) -> str:
        stream = self.stream(shown=shown)
        return stream.push(token_ids).text + stream.finish().text

    def notation(self, tool_format: ToolFormat) -> Notation:
        """How this tokenizer's model writes calls in the format."""
        return written_notation(tool_format, self._added)

    def control_id(self, text: str) -> int | None:
        """The id of the special token that is written so."""
        return self._special_ids.get(text)

    def opens_reasoning(self, prompt_ids: Sequence[int], reasoning: ReasoningFormat) -> bool:
        """Whether the prompt ends with what opens it."""
        return self.spell(prompt_ids[-_OPENING_TOKENS:]).text.rstrip().endswith(reasoning.opens)

    def stream(
        self,
        stops: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        continues: bool = False,
        by_token: bool = False,
        shown: Collection[str] = (),
    ) -> TextStream:
        """The text of one choice as its tokens come. `continues`: it goes on where the prompt's text ended, as a
        completion does and a chat answer does not. `by_token`: pieces name the tokens that they complete. Of special
        tokens only those have a text that are written as one of `shown`."""
        ids = ((self._special_ids.get(content), content) for content in shown)
        return TextStream(
            self.table,
            stops,
            min_tokens=min_tokens,
            continues=continues,
            by_token=by_token,
            shown={token_id: content.encode() for token_id, content in ids if token_id is not None},
        )

    def decode(self, token_ids: Sequence[int], *, continues: bool = False) -> str:
        """The text of a whole output, special tokens left out."""
        stream = self.stream(continues=continues)
        return stream.push(token_ids).text + stream.finish().text

    def token(self, token_id: int) -> TokenText:
        """One token by itself, for log probabilities."""
        if data := self.table[token_id]:
            return TokenText(data.decode("utf-8", "backslashreplace"), data)
        return TokenText(self._written.get(token_id, f"token_id:{token_id}"), None)

    def names(self, token_ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary writes it; "" for an id that it does not have."""
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in token_ids]

    def spell(self, token_ids: Sequence[int], written: str | None = None) -> Spelling:
        """A prompt as its tokens have it. Control tokens are written out, except those that are not in the text that
        they were made from, `written`: the tokenizer added them."""
        written = None if written is None else encodable(written)
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

    def _chat(self, sources: Mapping[str, str], named_tokens: Mapping[str, str], whose: str) -> ChatEncoder:
        templates = {name: ChatTemplate(source, named_tokens, whose) for name, source in sources.items()}
        return ChatEncoder(self._tokenizer, templates, added=self._added, max_chars=self._max_chars)

    def own_chat(self, own: OwnChat) -> ChatEncoder:
        """The encoder by a version's templates. Call it where their cost is bounded. Raises TemplateError, and what
        Jinja and Python's compiler raise for what is too large."""
        return self._chat(own.templates, {**self._named_tokens, **own.special_tokens}, "this version's")


def base_turn_ends(model_dir: Path) -> tuple[str, ...]:
    """The tokens that a base model's templates write behind an answer; the tokenizer itself is not loaded. Raises
    BaseModelInvalid, TokenizerUnsupported."""
    config = _read_json(model_dir / "tokenizer_config.json")
    named = named_tokens(_read_json(model_dir / "special_tokens_map.json"), config)
    try:
        templates = {
            name: ChatTemplate(source, named) for name, source in _template_sources(model_dir, config).items()
        }
    except TemplateError:
        return ()  # the server says so when it makes the templates its own
    return written_ends(templates, added_tokens(model_dir))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise TokenizerUnsupported(f"{path} is not JSON: {error}") from error
    return value if isinstance(value, dict) else {}


def _template_sources(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name that chats use, from the first place that has a default one, in the order of transformers."""
    files = {name: file.read_text("utf-8") for name, file in template_files(path).items()}
    if "default" not in files:
        value = _read_json(path / "chat_template.json").get("chat_template") or config.get("chat_template")
        files = named_templates(value) | files
    return used_templates(files)
