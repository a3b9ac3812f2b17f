"""Between the server and the process that renders versions' own chat templates: the bodies of its jobs."""

from __future__ import annotations

import msgspec

from loraplex.adapters.admission.chat_files import OwnChat


class RendererSetup(msgspec.Struct, frozen=True):
    """The model, for its tokenizer."""

    model_dir: str
    max_model_len: int


class RenderJob(msgspec.Struct, frozen=True, tag=True):
    """To be rendered by `own`, whose digest is `digest`. `content` is JSON: messages and tools; the rest as
    `ChatEncoder.encode` has it, the format by its name."""

    own: OwnChat
    digest: str
    content: bytes
    add_generation_prompt: bool = True
    tool_format: str | None = None
    effort: str | None = None


class Trial(msgspec.Struct, frozen=True, tag=True):
    """A trial of a version's templates at its upload, and of the formats that it names."""

    own: OwnChat
    tool_format: str | None = None
    reasoning_format: str | None = None


class OtherTokenizer(msgspec.Struct, frozen=True, tag=True):
    """The tokenizer.json that a version brings, to be compared with the one that serves."""

    path: str


class Encoded(msgspec.Struct, frozen=True, tag=True):
    """`effort_counts`: the template reads how much the model is to think."""

    token_ids: list[int]
    effort_counts: bool = False


class Tried(msgspec.Struct, frozen=True, tag=True):
    """The outcome of a trial of a template. `is_base`: it renders a few conversations as the base's templates do.
    `format_reason`: why it does not keep the formats that the version names. `turn_ends`: the tokens that it writes
    behind an answer."""

    is_base: bool
    format_reason: str = ""
    turn_ends: tuple[str, ...] = ()


class Compared(msgspec.Struct, frozen=True, tag=True):
    """The `difference` of two tokenizers in one sentence; "" for none."""

    difference: str


class RenderRefused(msgspec.Struct, frozen=True, tag=True):
    """The template, or what it makes of a conversation; `is_length`: it is too long."""

    reason: str
    is_length: bool = False


Body = RenderJob | Trial | OtherTokenizer
RenderAnswer = Encoded | Tried | Compared | RenderRefused
