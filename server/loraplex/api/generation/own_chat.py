"""Chats of versions that bring a chat template of their own, where the server renders with it."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from loraplex.adapters.admission.chat_files import OwnChat
from loraplex.api.deps import OwnChats
from loraplex.serving.output.formats import OutputFormats
from loraplex.serving.templates.messages import Encoded, RenderJob

InThread = Callable[..., Awaitable[Any]]


async def own_tokens(
    chats: OwnChats,
    in_thread: InThread,
    tenant: str,
    own: OwnChat,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    formats: OutputFormats,
    *,
    add_generation_prompt: bool = True,
    effort: str | None = None,
) -> Encoded:
    """A conversation's tokens by a version's own template. `in_thread` runs a function in the tenant's threads. Raises
    as `OwnChats.encode`."""
    content = await in_thread(partial(_content, messages, tools))
    return await chats.encode(
        tenant,
        RenderJob(
            own,
            own.digest,
            content,
            add_generation_prompt,
            None if formats.tools is None else formats.tools.name,
            effort,
        ),
    )


def _content(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> bytes:
    # Not as msgpack, which has no number of more than 64 bits.
    return json.dumps({"messages": list(messages), "tools": list(tools)}).encode()
