"""Between the server and the process that checks grammars: msgpack frames over a Unix stream socket."""

from __future__ import annotations

import struct
from typing import Literal

import msgspec

HEADER = struct.Struct(">I")

Outcome = Literal[
    "accepted",
    "refused",  # the library says why
    "too_slow",  # it took more CPU time than it may
    "too_large",  # it took more memory than it may, or its nesting more stack
    "timed_out",  # the machine did not give it enough CPU time
]


class Start(msgspec.Struct, frozen=True):
    """The first frame: the model, for its tokenizer, and the limits of each check. `memory` in bytes, beyond what the
    process has before it."""

    model_dir: str
    eos_ids: tuple[int, ...]
    cpu_s: float
    wall_s: float
    memory: int


class Started(msgspec.Struct, frozen=True):
    """`error`: why no grammar can be checked with this tokenizer."""

    error: str | None = None


class Check(msgspec.Struct, frozen=True):
    """`gbnf`: the text has to be converted to Lark first."""

    id: int
    text: str
    gbnf: bool = False


class Checked(msgspec.Struct, frozen=True):
    """`text`: the reason of a refusal; of an accepted GBNF, its grammar."""

    id: int
    outcome: Outcome
    text: str = ""
    cpu_s: float = 0.0


def frame(message: msgspec.Struct) -> bytes:
    payload = msgspec.msgpack.encode(message)
    return HEADER.pack(len(payload)) + payload
