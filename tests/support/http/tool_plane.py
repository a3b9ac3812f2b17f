"""A data plane over a scripted engine whose base model calls tools as Hermes does, and thinks between tags."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loraplex.serving.output.formats import REASONING_FORMATS, TOOL_FORMATS, OutputFormats
from loraplex.serving.text.processor import TextProcessor
from support.http.data_plane import DataPlane, running_data_plane
from support.models.byte_tokenizer import write_byte_tokenizer

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}<|start|>{{ message['role'] }}\n"
    "{% if message['reasoning'] %}<think>{{ message['reasoning'] }}</think>{% endif %}{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@contextmanager
def tool_plane(directory: Path, *, max_model_len: int = 1 << 17, **changes: Any) -> Iterator[DataPlane]:
    """`max_model_len` in tokens, which are bytes."""
    formats = OutputFormats(TOOL_FORMATS["hermes"], REASONING_FORMATS["think_tags"])
    model = write_byte_tokenizer(directory / "speaking", chat_template=TEMPLATE)
    text = TextProcessor(model, max_model_len=max_model_len)
    with running_data_plane(
        directory, formats=formats, text=text, max_model_len=max_model_len, **changes
    ) as running:
        yield running
