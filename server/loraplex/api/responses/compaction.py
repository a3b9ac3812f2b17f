"""`/v1/responses/compact`: a conversation becomes a summary, from which it can go on.

The model itself writes it. The conversation stands in the prompt as it did in its last turn, so its KV blocks are found
in the prefix cache if it had no tools. The summary travels with the client, as reasoning does: no server keeps state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from loraplex.api.codec import dumps
from loraplex.api.errors import in_client_terms, invalid
from loraplex.api.openai.delta import Delta
from loraplex.api.openai.formats import WholeChoice
from loraplex.api.openai.parsing import parse_request
from loraplex.api.openai.sampling import TOKEN_ID_LIMIT
from loraplex.api.openai.schemas import ChatRequest, Hint
from loraplex.api.openai.strict import Strict
from loraplex.api.responses.answers import usage_fields
from loraplex.api.responses.conversation import BETWEEN_PARTS, chat_messages
from loraplex.api.responses.items import Input, MessageItem, text_of
from loraplex.api.responses.schemas import client_field
from loraplex.api.sealed import seal
from loraplex.engine.types import Usage

SUMMARY_REQUEST = (
    "Summarize this conversation, so that it can be continued from the summary alone. Keep facts, names, numbers, "
    "decisions, results of tools and what is still to be done. Answer with the summary only."
)


class CompactRequest(Strict):
    """A null is the same as leaving a field out."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    input: Input
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=TOKEN_ID_LIMIT)] | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
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

    def client_field(self, field: str) -> str:
        return client_field(field)


def to_chat(asked: CompactRequest) -> CompactChat:
    """The chat whose answer is the most likely summary. Raises ApiError (400)."""
    fields: dict[str, Any] = {
        "model": asked.model,
        "messages": chat_messages(asked.instructions, asked.input, request=SUMMARY_REQUEST),
        "temperature": 0,
        "reasoning_effort": "none",  # no template is asked for what it does not know
        "asked": asked,
    }
    fields |= {
        name: value
        for name, value in (("max_completion_tokens", asked.max_output_tokens), ("user", asked.user))
        if value is not None
    }
    with in_client_terms(client_field):
        return parse_request(CompactChat, fields)


class CompactAnswer:
    """System and developer messages as they were, then an item with the summary of everything else."""

    def __init__(self, id_: str, created: int, asked: CompactRequest) -> None:
        self._id, self._created, self._asked = id_, created, asked
        self._texts: list[str] = []
        self._num_reasoning = 0
        self._is_cut = False

    def add(self, choice: WholeChoice, delta: Delta) -> None:
        self._texts.append(delta.text)
        self._num_reasoning = delta.num_reasoning
        self._is_cut = self._is_cut or delta.finish_reason == "length"

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        """Raises ApiError (400) where there is no summary: a client that went on without one would have lost all."""
        summary = "".join(self._texts)
        if not summary.strip():
            raise invalid(
                "max_output_tokens" if self._is_cut else "model",
                f"The model wrote no summary in {usage.completion_tokens} tokens; allow more 'max_output_tokens', or "
                "compact with another model.",
            )
        number = self._id.removeprefix("resp_")
        item = {"type": "compaction", "id": f"cmp_{number}", "encrypted_content": seal(summary)}
        return dumps(
            {
                "id": self._id,
                "object": "response.compaction",
                "created_at": self._created,
                "incomplete_details": {"reason": "max_output_tokens"} if self._is_cut else None,
                "output": [*self._kept(number), item],
                "usage": usage_fields(usage, self._num_reasoning),
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
                "id": f"msg_{number}_{index}",
                "status": "completed",
                "role": item.role,
                "content": [{"type": "input_text", "text": text_of(item.content, between=BETWEEN_PARTS)}],
            }
            for index, item in enumerate(items)
        ]
