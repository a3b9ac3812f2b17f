"""Where the invocation of an activated LoRA (aLoRA) is in a prompt."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

_ID_BYTES = array("I").itemsize


def find_invocation(prompt: Sequence[int], invocation: Sequence[int]) -> int | None:
    """The place of the last occurrence of `invocation`, which is not empty; None where there is none. Ids are below
    2**32."""
    text, wanted = (array("I", ids).tobytes() for ids in (prompt, invocation))
    at = text.rfind(wanted)
    while at > 0 and at % _ID_BYTES:  # the bytes of parts of ids
        at = text.rfind(wanted, 0, at + len(wanted) - 1)
    return None if at < 0 else at // _ID_BYTES
