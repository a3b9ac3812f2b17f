"""The process that renders versions' own chat templates: `python -m loraplex.serving.templates.worker FD`.

A template is a tenant's program. Jinja's sandbox keeps it from everything but its conversation, and a fork's limits
from more time and memory than it may have. A fork renders the templates of one version alone.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec

from loraplex.adapters.store.files import shown
from loraplex.serving.errors import ServingError, TemplateError, TextTooLong
from loraplex.serving.forks.worker import SetupFailed, Work, serve_forks
from loraplex.serving.output.formats import NO_FORMATS
from loraplex.serving.templates.messages import (
    Body,
    Compared,
    Encoded,
    OtherTokenizer,
    RenderAnswer,
    RendererSetup,
    RenderJob,
    RenderRefused,
    Trial,
    Tried,
)
from loraplex.serving.text.chat_encoder import ChatEncoder
from loraplex.serving.text.chat_template import encodable
from loraplex.serving.text.processor import TextProcessor

MAX_REASON = 600
_PANIC = "PanicException"
"""The BaseException for a panic of a library in Rust. Each such library has a class of its own, which none exports."""
_TALKS: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
    [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "Bye"},
    ],
)
"""A template that renders them as the base's does is taken for the base's."""


def set_up(setup: bytes) -> Work:
    # Its threads would not be there in a fork.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    model = msgspec.msgpack.decode(setup, type=RendererSetup)
    try:
        text = TextProcessor(model.model_dir, max_model_len=model.max_model_len)
    except ServingError as error:
        raise SetupFailed(error.message) from error
    return _Renderer(text, model.max_model_len).work


class _Renderer:
    """In a fork: what it has compiled serves its next jobs too."""

    def __init__(self, text: TextProcessor, max_model_len: int) -> None:
        self._text = text
        self._max_model_len = max_model_len
        self._chats: dict[str, ChatEncoder] = {}

    def work(self, body: bytes) -> bytes:
        return msgspec.msgpack.encode(self._answer(msgspec.msgpack.decode(body, type=Body)))

    def _answer(self, job: Body) -> RenderAnswer:
        try:
            if isinstance(job, OtherTokenizer):
                return self._compared(job)
            return self._encoded(job) if isinstance(job, RenderJob) else self._tried(job)
        except TextTooLong as error:
            return RenderRefused(_reason(error.message), is_length=True)
        except TemplateError as error:
            return RenderRefused(_reason(error.message))
        except (RecursionError, MemoryError):
            raise
        except Exception as error:  # a program's, whatever it is
            return RenderRefused(
                _reason(f"this version's chat template fails: {type(error).__name__}: {error}")
            )

    def _encoded(self, job: RenderJob) -> RenderAnswer:
        chat = self._chats.get(job.digest)
        if chat is None:
            chat = self._chats[job.digest] = self._text.own_chat(job.own)
        content = json.loads(job.content)
        tools = content["tools"] or None
        counts = chat.knows_effort(with_tools=bool(tools))
        ids = chat.encode(
            content["messages"],
            tools,
            add_generation_prompt=job.add_generation_prompt,
            tool_format=NO_FORMATS.of_version(job.tool_format, None).tools,
            effort=job.effort if counts else None,
        )
        if len(ids) > self._max_model_len:
            raise TextTooLong(
                f"This model's maximum context length is {self._max_model_len} tokens. However, your prompt is too "
                f"long: it has {len(ids)} tokens by this version's chat template. Please shorten it."
            )
        return Encoded(ids, counts)

    def _compared(self, job: OtherTokenizer) -> RenderAnswer:
        try:
            difference = self._text.compare_tokenizer(Path(job.path).read_text("utf-8"))
        except (RecursionError, MemoryError):
            raise
        except OSError:
            return RenderRefused("the upload has ended")
        except BaseException as error:  # the library's, over a stranger's file
            if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
                raise
            return RenderRefused(_reason(f"it is no tokenizer: {shown(str(error), 200)}"))
        told = (
            "" if difference is None else difference.told("by the tokenizer that serves", "by the version's")
        )
        return Compared(encodable(told))

    def _tried(self, job: Trial) -> RenderAnswer:
        chat = self._text.own_chat(job.own)
        formats = NO_FORMATS.of_version(job.tool_format, job.reasoning_format)
        reason = ""
        try:
            self._text.check_formats(formats.tools, formats.reasoning, chat)
        except ServingError as error:
            reason = _reason(error.message)
        mine = [_rendered(chat, talk) for talk in _TALKS]
        is_base = mine == [_rendered(self._text.chat, talk) for talk in _TALKS]
        return Tried(is_base, reason, chat.turn_ends)


def _reason(message: str) -> str:
    """The text for an answer, in which a template's own words may be no text."""
    return encodable(message[:MAX_REASON])


def _rendered(chat: ChatEncoder, talk: list[dict[str, Any]]) -> list[int] | None:
    """None where it refuses."""
    try:
        return chat.encode(talk)
    except ServingError:
        return None


if __name__ == "__main__":
    serve_forks(set_up)
