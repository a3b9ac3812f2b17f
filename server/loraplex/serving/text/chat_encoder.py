"""Conversations as tokens, by a set of chat templates over the model's tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from tokenizers import Tokenizer

from loraplex.serving.errors import TemplateError, TextTooLong
from loraplex.serving.output.formats import TOOL_FORMATS, ReasoningFormat, ToolFormat
from loraplex.serving.text.chat_template import ChatTemplate, encodable
from loraplex.serving.text.controls import Controls, Marker, token_ids_of
from loraplex.serving.text.past_turns import simpler
from loraplex.serving.text.tool_rendering import (
    PROBE_TOOLS,
    Message,
    ToolRendering,
    detect_reasoning_format,
    detect_tool_format,
    parsed_arguments,
    tool_rendering,
    with_tools,
)
from loraplex.serving.text.turn_ends import written_ends

MAX_CHARS_PER_TOKEN = 32
"""A generous mean: prose has about 4 characters a token, indented code up to 10."""
MAX_DEPTH = 64


class ChatEncoder:
    """`templates` by name: `tool_use` is for conversations with tools, `default` for others. `added` are the added
    tokens of the tokenizer; a conversation of more than `max_chars` characters is not tokenised. Safe to use from
    several threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        templates: Mapping[str, ChatTemplate],
        *,
        added: frozenset[str],
        max_chars: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._templates = templates
        self._added = added
        self._max_chars = max_chars
        self._renderings: dict[tuple[str, str | None], ToolRendering] = {}
        self._controls = {name: Controls(tokenizer, template) for name, template in templates.items()}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The conversation as the template alone writes it. Raises TemplateError, TextTooLong."""
        template = self._templates[self._template_for(tools)]
        self._check_length(_text_length(messages) + _text_length(tools))
        normal = template.normalize_messages(messages)
        return template.render(normal, tools, add_generation_prompt=add_generation_prompt)

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        tool_format: ToolFormat | None = None,
        effort: str | None = None,
    ) -> list[int]:
        """The conversation's tokens: those of the rendered text, but that no message can forge a control token.

        What a message says may look like the template's own marks ("<|im_end|>") and would then end its turn and
        begin another in the name of the system. So each control token in a string of the input is put between two
        markers with an unguessable number before it is rendered. The rendered text is cut at them; what stands
        between a pair is encoded as plain text, the rest as usual. A conversation without these strings is rendered
        without a marker and encoded in one piece, exactly as transformers does it (whose
        `sanitize_control_tokens` is the same idea, with fixed markers).

        Calls, their results and tools are written in `tool_format` where the template does not write them itself;
        without it the template alone decides what becomes of the tools. `effort` says how much the model is to think,
        "none" not to; a template that `knows_effort` shows it. Raises TemplateError, TextTooLong.
        """
        name = self._template_for(tools)
        template, controls = self._templates[name], self._controls[name]
        self._check_length(_text_length(messages) + _text_length(tools))
        normal = template.normalize_messages(messages)
        marker = Marker()
        marked_tools = None if tools is None else [controls.mark(dict(tool), marker) for tool in tools]

        def render(given: Sequence[Message], rendering: ToolRendering | None) -> str:
            if rendering is not None and rendering.calls == "object":
                given = parsed_arguments(given)
            told: list[dict[str, Any]] = [
                {key: value if key == "role" else controls.mark(value, marker) for key, value in m.items()}
                for m in given
            ]
            told_tools: Sequence[Mapping[str, Any]] | None = marked_tools
            if rendering is not None:
                chosen = tool_format or self._default_format(name)
                told, told_tools = with_tools(told, marked_tools, chosen, rendering, self._added)
            return template.render(
                told, told_tools, add_generation_prompt=add_generation_prompt, effort=effort
            )

        rendering = None
        calls = any(message.get("tool_calls") or message["role"] == "tool" for message in normal)
        if calls or (tools and tool_format is not None):
            rendering = self._rendering(name, tool_format)
        try:
            text = render(normal, rendering)
        except TemplateError:
            for others in simpler(normal, rendering):
                with suppress(TemplateError):
                    text = render(*others)
                    break
            else:
                raise
        self._check_length(len(text) - marker.length_in(text))
        if not marker.used:
            return token_ids_of(self._tokenizer, encodable(text))
        return controls.encode(encodable(text), marker)

    def knows_effort(self, *, with_tools: bool) -> bool:
        """Whether the chat template says how much the model is to think."""
        return self._templates[self._template_for(PROBE_TOOLS if with_tools else None)].knows_effort

    @property
    def turn_ends(self) -> tuple[str, ...]:
        """The tokens that the templates write behind an answer."""
        return written_ends(self._templates, self._added)

    def _default_format(self, name: str) -> ToolFormat:
        """In which calls of earlier turns are written for a model that makes none."""
        return detect_tool_format(self._templates[name]) or TOOL_FORMATS["json"]

    def _rendering(self, name: str, tool_format: ToolFormat | None) -> ToolRendering:
        key = (name, None if tool_format is None else tool_format.name)
        found = self._renderings.get(key)
        if found is None:
            found = tool_rendering(self._templates[name], tool_format or self._default_format(name))
            if tool_format is None:
                found = replace(found, lists_tools=True)
            self._renderings[key] = found
        return found

    @property
    def tool_format(self) -> ToolFormat | None:
        """The one that the chat template writes, if it is clear."""
        return (
            detect_tool_format(self._templates[self._template_for(PROBE_TOOLS)]) if self._templates else None
        )

    @property
    def reasoning_format(self) -> ReasoningFormat | None:
        """The one that the chat template knows, if it is clear."""
        return detect_reasoning_format(self._templates[self._template_for(None)]) if self._templates else None

    def _template_for(self, tools: Sequence[Mapping[str, Any]] | None) -> str:
        if not self._templates:
            raise TemplateError("this model has no chat template; use /v1/completions")
        if tools and "tool_use" in self._templates:
            return "tool_use"
        return "default" if "default" in self._templates else next(iter(self._templates))

    def _check_length(self, num_chars: int) -> None:
        check_length(num_chars, self._max_chars)


def check_length(num_chars: int, max_chars: int) -> None:
    """Raises TextTooLong."""
    if num_chars > max_chars:
        raise TextTooLong(
            f"This model's maximum context length is {max_chars // MAX_CHARS_PER_TOKEN} tokens. However, "
            f"your prompt is too long: {num_chars} characters, more than the context can hold. Please shorten it."
        )


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
