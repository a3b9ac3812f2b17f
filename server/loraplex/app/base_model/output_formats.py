"""The formats of the base model's output, from settings or its chat template, and the check of others."""

from __future__ import annotations

from loraplex.app.settings import Settings, SettingsInvalid
from loraplex.serving.errors import ServingError
from loraplex.serving.output.formats import NO_FORMATS, TOOL_FORMATS, OutputFormats, ToolFormat
from loraplex.serving.text.processor import TextProcessor


def base_formats(settings: Settings, text: TextProcessor) -> OutputFormats:
    """A model whose template writes calls in no known format is told to write JSON: agents send `tools` to every model.
    Raises SettingsInvalid for a format that this model's tokenizer or template does not keep."""
    tools = None if settings.tool_format == "auto" else settings.tool_format
    reasoning = None if settings.reasoning_format == "auto" else settings.reasoning_format
    for option, formats in (("--tool-format", (tools, None)), ("--reasoning-format", (None, reasoning))):
        try:
            check_named_formats(text, *formats)
        except ServingError as error:
            raise SettingsInvalid(f"{option} {formats[0] or formats[1]}: {error.message}.") from error
    found = OutputFormats(text.chat.tool_format or _generic(text), text.chat.reasoning_format)
    return found.of_version(tools, reasoning)


def _generic(text: TextProcessor) -> ToolFormat | None:
    """None where a call does not come back as it was written, or there is no template."""
    try:
        check_named_formats(text, "json", None)
    except ServingError:
        return None
    return TOOL_FORMATS["json"]


def check_named_formats(text: TextProcessor, tool_format: str | None, reasoning_format: str | None) -> None:
    """Raises ServingError for a format that this model's tokenizer or template does not keep."""
    named = NO_FORMATS.of_version(tool_format, reasoning_format)
    text.check_formats(named.tools, named.reasoning)
