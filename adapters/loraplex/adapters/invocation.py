"""Where the invocation of an activated LoRA (aLoRA) is in a prompt."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

_CODEC = f"utf-32-{sys.byteorder[0]}e"


def find_invocation(prompt: Sequence[int], invocation: Sequence[int]) -> int | None:
    """The place of the last occurrence of `invocation`, which is not empty and has ids of a vocabulary; None where
    there is none. Ids are from 0 to 2**32 - 1."""
    at = _as_text(prompt).rfind(_as_text(invocation))
    return None if at < 0 else at


def _as_text(ids: Sequence[int]) -> str:
    # A character an id, so that the search compares whole ids. In bytes it would stop at parts of them, too: a hostile
    # prompt takes some ten times as long then, and no other thread runs meanwhile.
    try:
        return array("I", ids).tobytes().decode(_CODEC, "surrogatepass")
    except UnicodeDecodeError:  # an id above any vocabulary's
        return "".join([chr(min(token, sys.maxunicode)) for token in ids])
