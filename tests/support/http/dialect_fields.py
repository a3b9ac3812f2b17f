"""Fields of the dialects' requests that the body's size and the context bound."""

from __future__ import annotations

_RESPONSES = (
    "input",
    "input[].arguments",
    "input[].content",
    "input[].content[].logprobs",
    "input[].content[].logprobs[]",
    "input[].content[].refusal",
    "input[].content[].text",
    "input[].encrypted_content",
    "input[].output",
    "input[].output[].logprobs",
    "input[].output[].logprobs[]",
    "input[].output[].refusal",
    "input[].output[].text",
    "input[].summary[].text",
    "instructions",
    "text.format.description",
    "text.format.schema",
    "tools[].description",
    "tools[].parameters",
)
_MESSAGES = (
    "messages[].content",
    "messages[].content[].content",
    "messages[].content[].content[].text",
    "messages[].content[].data",
    "messages[].content[].input",
    "messages[].content[].signature",
    "messages[].content[].text",
    "messages[].content[].thinking",
    "output_config.format.schema",
    "system",
    "system[].text",
    "tools[].description",
    "tools[].input_schema",
)
OPEN_FIELDS = (
    "EmbeddingsRequest.input",
    "EmbeddingsRequest.input[]",
    *(f"ResponsesRequest.{field}" for field in _RESPONSES),
    *(f"CompactRequest.{field}" for field in _RESPONSES if field.startswith(("input", "instructions"))),
    *(f"{schema}.{field}" for schema in ("MessagesRequest", "CountRequest") for field in _MESSAGES),
)
