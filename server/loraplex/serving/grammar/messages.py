"""Between the server and the process that checks grammars: the bodies of its jobs."""

from __future__ import annotations

import msgspec


class CheckerSetup(msgspec.Struct, frozen=True):
    """The model, for its tokenizer."""

    model_dir: str
    eos_ids: tuple[int, ...]


class Check(msgspec.Struct, frozen=True):
    """`gbnf`: the text has to be converted to Lark first."""

    text: str
    gbnf: bool = False


class Checked(msgspec.Struct, frozen=True):
    """`reason`: the library's, of a refusal; None where it is accepted. `lark`: of an accepted GBNF, its grammar."""

    reason: str | None = None
    lark: str = ""
