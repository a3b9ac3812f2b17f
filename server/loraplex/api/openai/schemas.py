"""Fields of a request. Every field of OpenAI's request types is here: supported, or known and not supported.

A field that is not supported passes with a neutral value (one that asks for nothing) and is refused by name with
any other. So is a field that nobody knows, of whose values only the empty ones are neutral. Nothing is silently
ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from loraplex.api.openai import described
from loraplex.api.openai.messages import Messages
from loraplex.api.openai.sampling import (
    TOKEN_ID_LIMIT,
    SamplingFields,
    TokenId,
)
from loraplex.api.openai.strict import (
    Strict,
    must,
    or_neutral,
    refuse,
    refuse_unsupported,
)
from loraplex.api.openai.structured_output.fields import Format, Structure
from loraplex.api.openai.tools import (
    Choice,
    ToolChoice,
    Tools,
    check_tools,
    choice_or_neutral,
    chosen,
    switch_or_neutral,
)
from loraplex.engine.logprobs import MAX_LOGPROB_TOKEN_IDS, MAX_TOP_LOGPROBS
from loraplex.engine.pooling import Pooling

MAX_CHOICES = 16
MAX_PROMPTS = 16
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
MAX_METADATA = 16
MAX_COMPLETION_LOGPROBS = 5

UNSUPPORTED_CHAT: Mapping[str, tuple[object, ...]] = {
    "audio": (),
    "function_call": ("none",),
    "functions": (),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_cache_options": (),
    "store": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}
UNSUPPORTED_COMPLETION: Mapping[str, tuple[object, ...]] = {
    "suffix": ("",),
    "store": (),
}
UNSUPPORTED_STREAM_OPTIONS: Mapping[str, tuple[object, ...]] = {"include_obfuscation": ()}
"""Fields that are known and not supported, each with its own neutral values beside `NEUTRAL`."""


def _one_or_many_strings(value: object) -> object:
    """`stop`: a string, a list of strings or nothing, as a list."""
    strings = [value] if isinstance(value, str) else value if value is not None else []
    if not isinstance(strings, list) or not all(isinstance(s, str) for s in strings):
        raise must("must be a string or a list of strings")
    if len(strings) > MAX_STOP_STRINGS:
        raise must(f"must have at most {MAX_STOP_STRINGS} strings")
    if any(not 1 <= len(s) <= MAX_STOP_LENGTH for s in strings):
        raise must(f"each string must have 1 to {MAX_STOP_LENGTH} characters")
    return tuple(dict.fromkeys(strings))


def _metadata(value: object) -> object:
    if isinstance(value, dict) and len(value) > MAX_METADATA:
        raise must(f"must have at most {MAX_METADATA} entries")
    return value


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    UNSUPPORTED = UNSUPPORTED_STREAM_OPTIONS
    RULES = (described.RUNNING_USAGE,)


TopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
NamedTokens = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_LOGPROB_TOKEN_IDS)]
Choices = Annotated[int, Field(ge=1, le=MAX_CHOICES)]
MetadataText = Annotated[str, Field(max_length=512)]

# What clients send, for the OpenAPI document, where a validator makes something else of it.
_GivenStop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
_GivenStops = _GivenStop | Annotated[list[_GivenStop], Field(max_length=MAX_STOP_STRINGS)] | None
_GivenMetadata = Annotated[dict[MetadataText, MetadataText], Field(max_length=MAX_METADATA)]

StopStrings = Annotated[
    tuple[str, ...], BeforeValidator(_one_or_many_strings, json_schema_input_type=_GivenStops)
]
Metadata = Annotated[
    dict[MetadataText, MetadataText], BeforeValidator(_metadata, json_schema_input_type=_GivenMetadata)
]


class GenerationFields(SamplingFields):
    """Fields that chat and text completions share. A null is the same as leaving the field out."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    max_tokens: Annotated[int, Field(ge=1, lt=TOKEN_ID_LIMIT)] | None = None
    n: Choices | None = None
    stop: StopStrings = ()
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
    metadata: Metadata | None = None
    service_tier: Annotated[str, Field(max_length=64)] | None = None
    prompt_logprobs: TopLogprobs | None = None
    logprob_token_ids: NamedTokens | None = None
    return_token_ids: bool | None = None
    response_format: Format = None
    structured_outputs: Structure = None
    ENDS_WITH_CONTEXT: ClassVar[bool] = False
    """An answer may be asked for that is longer than the context has room for. It is cut there, and not refused."""
    TELLS_ALL_TOKENS: ClassVar[bool] = False
    """Log probabilities are told of each token of an answer, also of those of the stop string that ended it."""
    RULES: ClassVar[tuple[described.Rule, ...]] = (
        described.USAGE_OF_STREAMS,
        described.PROMPT_SCORES_ARE_WHOLE,
    )

    @property
    def wanted_logprobs(self) -> int | None:
        """How many of the most likely tokens go with each one; None where nothing is asked for."""
        raise NotImplementedError

    def client_field(self, field: str) -> str:
        """The client's name for the field that has this name here."""
        return field

    @property
    def pooling(self) -> Pooling | None:
        """How hidden states are pooled that are wanted in place of text."""
        return None

    @property
    def form_field(self) -> str | None:
        """The field that says what form the answer must have; None where it is free."""
        if self.structured_outputs is not None:
            return "structured_outputs"
        asked = self.response_format
        return None if asked is None or asked.type == "text" else "response_format"

    @property
    def include_usage(self) -> bool:
        """Asking for the usage so far asks for the whole as well."""
        options = self.stream_options
        return options is not None and bool(options.include_usage or options.continuous_usage_stats)

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    @model_validator(mode="after")
    def _fits_together(self) -> GenerationFields:
        options = self.stream_options
        if options is not None and options.continuous_usage_stats and options.include_usage is False:
            refuse(
                "stream_options.continuous_usage_stats",
                "'continuous_usage_stats' is only allowed with \"include_usage\": true.",
            )
        if self.include_usage and not self.stream:
            refuse("stream_options", "'stream_options' is only allowed with \"stream\": true.")
        if self.prompt_logprobs is not None and self.stream:
            refuse("prompt_logprobs", "'prompt_logprobs' is not available with \"stream\": true.")
        if self.logprob_token_ids is not None and self.wanted_logprobs is None:
            refuse("logprob_token_ids", "'logprob_token_ids' is only allowed with 'logprobs'.")
        return self


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Hint = Annotated[str, Field(max_length=256)]


class ChatTemplateKwargs(Strict):
    """The one common key of vLLM's field of this name, which sets variables of the chat template."""

    enable_thinking: bool | None = None


class ChatRequest(GenerationFields):
    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1, lt=TOKEN_ID_LIMIT)] | None = None
    logprobs: Annotated[bool | None, BeforeValidator(or_neutral)] = None
    top_logprobs: Annotated[TopLogprobs | None, BeforeValidator(or_neutral)] = None
    # Hints that change no output.
    prompt_cache_key: Annotated[Hint | None, BeforeValidator(or_neutral)] = None
    prompt_cache_retention: Annotated[Hint | None, BeforeValidator(or_neutral)] = None
    safety_identifier: Annotated[Hint | None, BeforeValidator(or_neutral)] = None
    tools: Annotated[Tools | None, BeforeValidator(or_neutral)] = None
    tool_choice: Annotated[ToolChoice | None, BeforeValidator(choice_or_neutral)] = None
    reasoning_effort: Annotated[Effort | None, BeforeValidator(or_neutral)] = None
    chat_template_kwargs: Annotated[ChatTemplateKwargs | None, BeforeValidator(or_neutral)] = None
    EFFORT_IS_A_HINT: ClassVar[bool] = False
    """Whether an effort passes if the model's chat template does not know it."""
    parallel_tool_calls: Annotated[bool | None, BeforeValidator(switch_or_neutral)] = None
    UNSUPPORTED = UNSUPPORTED_CHAT
    RULES = (
        *GenerationFields.RULES,
        described.LIKELY_TOKENS,
        described.NAMED_TOKENS_OF_CHATS,
        described.CHOICE_AMONG_TOOLS,
    )

    @property
    def wanted_logprobs(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def asked_tokens(self) -> tuple[str, int | None]:
        """The field that says how long the answer may be, and what it says."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    @property
    def asked_effort(self) -> tuple[str, str | None]:
        """The field that says how much the model is to think, and what it says; "some" means that it is to think."""
        thinks = None if self.chat_template_kwargs is None else self.chat_template_kwargs.enable_thinking
        if self.reasoning_effort is not None or thinks is None:
            return "reasoning_effort", self.reasoning_effort
        return "chat_template_kwargs.enable_thinking", "some" if thinks else "none"

    @property
    def chosen_tools(self) -> Choice:
        return chosen(self.tools or (), self.tool_choice)

    @model_validator(mode="after")
    def _choice_fits_tools(self) -> ChatRequest:
        check_tools(self.tools or (), self.tool_choice)
        return self

    @model_validator(mode="after")
    def _one_effort(self) -> ChatRequest:
        switch = self.chat_template_kwargs
        if self.reasoning_effort is None or switch is None or switch.enable_thinking is None:
            return self
        if switch.enable_thinking is (self.reasoning_effort == "none"):
            refuse(
                "chat_template_kwargs.enable_thinking",
                "'chat_template_kwargs.enable_thinking' and 'reasoning_effort' contradict each other; give one.",
            )
        return self

    @model_validator(mode="after")
    def _fits_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            refuse("top_logprobs", "'top_logprobs' is only allowed with \"logprobs\": true.")
        return self

    @model_validator(mode="after")
    def _one_length(self) -> ChatRequest:
        if (
            None not in (self.max_tokens, self.max_completion_tokens)
            and self.max_tokens != self.max_completion_tokens
        ):
            refuse("max_tokens", "'max_tokens' and 'max_completion_tokens' contradict each other; give one.")
        return self


Prompt = str | list[int]

_GivenTokens = Annotated[list[TokenId], Field(min_length=1)]
_GivenPrompts = Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
_GivenTokenLists = Annotated[list[_GivenTokens], Field(min_length=1, max_length=MAX_PROMPTS)]
_GivenPrompt = str | _GivenPrompts | _GivenTokens | _GivenTokenLists

_PROMPT_KINDS = "must be a string, a list of strings, token ids or lists of token ids, not empty"


def _prompts(value: object) -> object:
    return prompts_of(value, MAX_PROMPTS, "prompts")


def prompts_of(value: object, most: int, what: str) -> list[Any]:
    """A string, strings, token ids or lists of token ids, as a list of `most` prompts at most, which the client knows
    as `what`."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise must(_PROMPT_KINDS)
    prompts = [value] if _is_token_list(value) else value
    if len(prompts) > most:
        raise must(f"must have at most {most} {what}")
    if not (all(isinstance(p, str) for p in prompts) or all(_is_token_list(p) for p in prompts)):
        raise must(_PROMPT_KINDS)
    return prompts


def _is_token_list(value: object) -> bool:
    """A non-empty list of token ids. By their types, because a JSON true is an int to Python."""
    return (
        isinstance(value, list)
        and set(map(type, value)) == {int}
        and min(value) >= 0
        and max(value) < TOKEN_ID_LIMIT
    )


CompletionLogprobs = Annotated[int, Field(ge=0, le=MAX_COMPLETION_LOGPROBS)]


class CompletionRequest(GenerationFields):
    prompt: Annotated[list[Any], BeforeValidator(_prompts, json_schema_input_type=_GivenPrompt)]
    max_tokens: Annotated[int, Field(ge=0, lt=TOKEN_ID_LIMIT)] | None = None
    logprobs: Annotated[CompletionLogprobs | None, BeforeValidator(or_neutral)] = None
    echo: Annotated[bool | None, BeforeValidator(or_neutral)] = None
    best_of: Annotated[Choices | None, BeforeValidator(or_neutral)] = None
    UNSUPPORTED = UNSUPPORTED_COMPLETION
    RULES = (*GenerationFields.RULES, described.SCORED_ALONE, described.NAMED_TOKENS_OF_TEXTS)

    @property
    def wanted_logprobs(self) -> int | None:
        return self.logprobs

    @model_validator(mode="after")
    def _fits_the_choices(self) -> CompletionRequest:
        if self.best_of not in (None, self.n or 1):
            refuse_unsupported(
                "best_of", "'best_of' is only supported where it equals 'n': all are answered."
            )
        if self.max_tokens == 0 and not self.echo:
            refuse("max_tokens", "'max_tokens' must be at least 1, but with \"echo\": true.")
        if self.max_tokens == 0 and (field := self.form_field) is not None:
            refuse(field, f"'{field}' is only allowed where tokens are generated.")
        if self.max_tokens == 0 and self.logprob_token_ids is not None:
            refuse("logprob_token_ids", "'logprob_token_ids' is only allowed where tokens are generated.")
        return self

    @property
    def prompts(self) -> list[Prompt]:
        return self.prompt

    @property
    def asked_tokens(self) -> tuple[str, int | None]:
        return "max_tokens", self.max_tokens
