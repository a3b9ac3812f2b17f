"""Requests and answers of `/tokenize` and `/detokenize`, as vLLM has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, Field

from loraplex.api.openai.messages import Messages
from loraplex.api.openai.sampling import TokenId
from loraplex.api.openai.strict import Strict, or_neutral
from loraplex.api.openai.tools import Tools

UNSUPPORTED_TOKENIZE_CHAT: Mapping[str, tuple[object, ...]] = {
    "add_special_tokens": (),
    "chat_template": (),
    "chat_template_kwargs": (),
    "continue_final_message": (),
    "mm_processor_kwargs": (),
}
"""A conversation has the special tokens that its template writes; the template is the model's own."""

ModelName = Annotated[str, Field(min_length=1, max_length=512)]


class TokenizeText(Strict):
    """A null is the same as leaving a field out. Without `model`: the base model."""

    model: ModelName | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChat(Strict):
    """The tokens that a chat of these messages would have as its prompt."""

    model: ModelName | None = None
    messages: Messages
    tools: Annotated[Tools | None, BeforeValidator(or_neutral)] = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    UNSUPPORTED = UNSUPPORTED_TOKENIZE_CHAT


class Detokenize(Strict):
    model: ModelName | None = None
    tokens: list[TokenId]


class Tokenized(BaseModel):
    """`token_strs`: the vocabulary's own names of the tokens, where they are asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(BaseModel):
    prompt: str
