"""`/v1/responses/compact`: a conversation becomes one item, with which it goes on.

The model itself writes a summary. The conversation stands in the prompt as it did in its last turn, so its KV blocks
are found in the prefix cache. The summary travels with the client, as reasoning does: no server keeps state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from loraplex.api.codec import dumps
from loraplex.api.errors import fields_told
from loraplex.api.openai.delta import Delta
from loraplex.api.openai.formats import WholeChoice
from loraplex.api.openai.parsing import parse_request
from loraplex.api.openai.schemas import ChatRequest, Hint
from loraplex.api.openai.strict import Strict
from loraplex.api.responses.answers import usage_told
from loraplex.api.responses.conversation import BETWEEN_PARTS, add_user_text, chat_messages
from loraplex.api.responses.items import Input, MessageItem, text_of
from loraplex.api.responses.schemas import told_input
from loraplex.api.sealed import seal
from loraplex.engine.types import Usage

SUMMARIZE = (
    "Summarize this conversation, so that it can be continued from the summary alone. Keep facts, names, numbers, "
    "decisions, results of tools and what is still to be done. Answer with the summary only."
)


class CompactRequest(Strict):
    """A null is the same as leaving a field out."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    input: Input
    instructions: str | None = None
    # Hints that change no output.
    prompt_cache_key: Hint | None = None
    prompt_cache_retention: Hint | None = None
    service_tier: Annotated[str, Field(max_length=64)] | None = None
    UNSUPPORTED = {  # noqa: RUF012 - a class variable of Strict
        "image": ({"context_compression": "auto"},),
        "previous_response_id": (),
        "prompt_cache_options": (),
    }


class CompactChat(ChatRequest):
    """The chat request that `asked` becomes."""

    asked: CompactRequest

    def told(self, field: str) -> str:
        return told_input(field)


def to_chat(asked: CompactRequest) -> CompactChat:
    """The most likely summary, of one token at least. Raises ApiError (400)."""
    messages = chat_messages(asked.instructions, asked.input)
    add_user_text(messages, SUMMARIZE)
    fields = {"model": asked.model, "messages": messages, "temperature": 0, "min_tokens": 1, "asked": asked}
    with fields_told(told_input):
        return parse_request(CompactChat, fields)


class CompactAnswer:
    """System and developer messages as they were, then an item with the summary of everything else."""

    def __init__(self, id_: str, created: int, asked: CompactRequest) -> None:
        self._id, self._created, self._asked = id_, created, asked
        self._texts: list[str] = []
        self._num_reasoning = 0

    def add(self, choice: WholeChoice, delta: Delta) -> None:
        self._texts.append(delta.text)
        self._num_reasoning = delta.num_reasoning

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        number = self._id.removeprefix("resp_")
        item = {"type": "compaction", "id": f"cmp_{number}", "encrypted_content": seal("".join(self._texts))}
        return dumps(
            {
                "id": self._id,
                "object": "response.compaction",
                "created_at": self._created,
                "output": [*self._kept(number), item],
                "usage": usage_told(usage, self._num_reasoning),
            }
        )

    def _kept(self, number: str) -> list[dict[str, Any]]:
        given = self._asked.input
        items = [
            item
            for item in ([] if isinstance(given, str) else given)
            if isinstance(item, MessageItem) and item.role in ("system", "developer")
        ]
        return [
            {
                "type": "message",
                "id": f"msg_{number}_{place}",
                "status": "completed",
                "role": item.role,
                "content": [{"type": "input_text", "text": text_of(item.content, between=BETWEEN_PARTS)}],
            }
            for place, item in enumerate(items)
        ]
