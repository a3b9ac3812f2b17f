"""The tokens that chat templates write behind an answer: there the model has learned to end its turn."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from loraplex.adapters.admission.chat_files import TEMPLATE_NAMES
from loraplex.serving.errors import TemplateError
from loraplex.serving.output.formats import ALL_MARKERS
from loraplex.serving.text.chat_template import ChatTemplate

_ANSWER = "Fortythree"
_TALK = ({"role": "user", "content": "Hello"}, {"role": "assistant", "content": _ANSWER})

_KNOWN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>")
"""Names that no model gives to anything but the end of a turn. A template may write them in some turns alone: Llama
3.1's ends a call of a built-in tool with "<|eom_id|>"."""


def written_ends(templates: Mapping[str, ChatTemplate], added: Collection[str]) -> tuple[str, ...]:
    """The tokens by the templates that chats use: that which stands behind an answer, and known ends that it writes
    anywhere. `added`: the added tokens of the tokenizer."""
    used = [templates[name] for name in TEMPLATE_NAMES if name in templates] or [*templates.values()][:1]
    ends = (_end(template, added) for template in used)
    written = (end for end in _KNOWN if end in added and any(end in template.literals for template in used))
    return tuple(dict.fromkeys(end for end in (*ends, *written) if end))


def _end(template: ChatTemplate, added: Collection[str]) -> str | None:
    try:
        text = template.render(template.normalize_messages(_TALK), add_generation_prompt=False)
    except TemplateError:
        return None
    _, answer, behind = text.rpartition(_ANSWER)
    found = [token for token in added if answer and token.strip() and behind.lstrip().startswith(token)]
    end = max(found, key=len, default=None)
    return None if end in ALL_MARKERS else end
