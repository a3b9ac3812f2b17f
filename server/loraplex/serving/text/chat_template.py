"""A model's chat template, rendered as transformers renders it (`apply_chat_template`), without transformers.

The template is a Jinja program that comes with the model, so it runs in Jinja's immutable sandbox and sees plain
JSON values only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from jinja2.utils import Namespace

from loraplex.serving.errors import TemplateError

EFFORT_VARIABLES = frozenset(("enable_thinking", "reasoning_effort"))
ROLES = ("system", "developer", "user", "assistant", "tool")
PAIR_ROLES = ("query", "document")
"""Roles of the texts that a reranker compares, as sentence-transformers and vLLM name them."""
MAX_MESSAGES = 4096


class _Generation(jinja2.ext.Extension):
    """`{% generation %} … {% endgeneration %}`, which marks the assistant's part in training, renders its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja reads it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=lineno)


class _TemplateNamespace(Namespace):
    """Jinja's `namespace`, which here refuses names that could reach an object's insides."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # Jinja's own way to leave `self` free as a name
        self, args = args[0], args[1:]
        values = dict(*args, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a template may not set '{name}' on a namespace")


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes HTML; a prompt is no HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(format_: str) -> str:
    return datetime.now().strftime(format_)


def _effort_variables(effort: str | None) -> dict[str, Any]:
    """The effort as templates of models that reason expect it: some by name, some as a switch."""
    if effort is None:
        return {}
    if effort in ("none", "some"):
        return {"enable_thinking": effort == "some"}
    return {"enable_thinking": True, "reasoning_effort": effort}


class ChatTemplate:
    """One compiled template. `variables` are the special tokens by name ("bos_token", …); `whose` it is, for messages.
    Safe to use from several threads. Raises TemplateError at construction where the template does not compile."""

    def __init__(self, source: str, variables: Mapping[str, str], whose: str = "the model's") -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        environment.globals["namespace"] = _TemplateNamespace
        try:
            parsed = environment.parse(source)
            self._template = environment.from_string(source)
        except jinja2.exceptions.TemplateError as error:
            line = f"line {error.lineno}: " if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise TemplateError(f"{whose} chat template does not compile: {line}{error.message}") from error
        self._whose = whose
        self._variables = dict(variables)
        literals = [node.data for node in parsed.find_all(jinja2.nodes.TemplateData)]
        literals += [
            node.value for node in parsed.find_all(jinja2.nodes.Const) if isinstance(node.value, str)
        ]
        self.literals = "\0".join(literals)
        """All text that the template itself may write, joined by null characters."""
        self.knows_effort = not EFFORT_VARIABLES.isdisjoint(jinja2.meta.find_undeclared_variables(parsed))
        """The template reads how much the model is to think."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        effort: str | None = None,
    ) -> str:
        """The prompt of a conversation in the form that `normalize_messages` gives. `effort` says how much the model is
        to think: "none" not to, "some" as much as the template chooses. Raises TemplateError with the template's own
        words where it refuses the conversation."""
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **_effort_variables(effort),
                **self._variables,
            )
        except jinja2.exceptions.TemplateError as error:
            said = encodable(str(error))
            raise TemplateError(f"{self._whose} chat template refuses these messages: {said}") from error
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError) as error:
            said = encodable(str(error))
            raise TemplateError(
                f"{self._whose} chat template cannot render these messages: {said}"
            ) from error

    def normalize_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Messages as templates expect them: no null fields, text parts joined by a newline to one text, and
        `developer` said as `system` where the template does not know it. Raises TemplateError for an empty
        conversation, an unknown role and a part that is no text."""
        if not messages:
            raise TemplateError("messages must hold at least one message")
        if len(messages) > MAX_MESSAGES:
            raise TemplateError(f"messages holds {len(messages)} messages; at most {MAX_MESSAGES} are taken")
        normal = []
        for index, message in enumerate(messages):
            role = message.get("role")
            if role not in ROLES and role not in PAIR_ROLES:
                raise TemplateError(f"messages[{index}].role must be one of {', '.join(ROLES)}")
            kept = {key: value for key, value in message.items() if value is not None}
            if role == "developer" and "developer" not in self.literals:
                kept["role"] = "system"
            if "content" in kept:
                kept["content"] = _join_parts(kept["content"], index)
            normal.append(kept)
        return normal


def writes_pairs(templates: Mapping[str, str]) -> bool:
    """Whether the template for conversations without tools names the roles of a reranker's texts."""
    source = templates.get("default", "")
    return all(f"'{role}'" in source or f'"{role}"' in source for role in PAIR_ROLES)


def encodable(text: str) -> str:
    """Lone surrogates (from "\\ud800" in JSON) are no characters and cannot be encoded: they read as U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _join_parts(content: Any, index: int) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for number, part in enumerate(content if isinstance(content, list | tuple) else [content]):
        text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else None
        if not isinstance(text, str):
            raise TemplateError(f"messages[{index}].content[{number}] must be a text part")
        texts.append(text)
    return "\n".join(texts)
