r"""A schema's patterns, written so that llguidance enforces them in JSON.

llguidance spells a pattern's characters as JSON does, and errs in two places. It drops a control character without a
short escape from a literal. It adds the quote and the backslash to a set that holds all control characters, as `[^"]`
does. No answer holds such a control character: each set goes without them, and a literal with one is refused.
A pattern's text is read once, in linear time. It is never compiled here.
"""

from __future__ import annotations

import re

_UNWRITTEN = r"\x00-\x07\x0b\x0e-\x1f\x7f"
_NEEDS_ESCAPE = re.compile(f"[{_UNWRITTEN}]")
_OPENING = r"(?P<opening>\[\^?\]?)"
"""The opening of a set. A bracket that closes the set cannot be its first character."""
_OUTSIDE = re.compile(
    r"(?P<code>\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[xuU]\{[0-9a-fA-F]+\}))"
    rf"|(?P<property>\\[pP](?:\{{[^}}\\]*\}}|[^{{]))|\\(?P<escaped>.)|{_OPENING}"
    r"|\(\?P?<[^>(]*>|\(\?(?P<flags>[a-zA-Z-]+)|(?P<literal>[^\\\[(]+|.)",
    re.DOTALL,
)
_INSIDE = re.compile(rf"\\.|{_OPENING}|(?P<closing>\])|[^\\\[\]]+|.", re.DOTALL)
_PLAIN_SET = re.compile(r"\[[^\^\\\[\x00-\x1f]*")
_NAMED = {"a": "\a", "v": "\v"}
"""Escapes of control characters without a short one in JSON."""


def is_written(text: str) -> bool:
    r"""Whether an answer can hold `text` as a string, which needs no `\u`."""
    return _NEEDS_ESCAPE.search(text) is None


def enforced(pattern: str) -> str:
    """A pattern that llguidance enforces, for the same strings of those that an answer can hold.

    Raises ValueError, with the reason, for one with a literal that no answer can hold.
    """
    written: list[str] = []
    depth = start = at = 0
    while found := (_INSIDE if depth else _OUTSIDE).match(pattern, at):
        at = found.end()
        if found["opening"] is not None:
            depth += 1
            start = found.start() if depth == 1 else start
        elif depth:
            depth -= found["closing"] is not None
            if depth == 0:
                written.append(_set(pattern[start:at]))
        else:
            written.append(_outside(found))
    # llguidance refuses a set that does not end.
    return "".join(written) + (pattern[start:] if depth else "")


def _outside(found: re.Match[str]) -> str:
    if found["property"] is not None:
        return _without_unwritten(found[0])
    if "x" in (found["flags"] or ""):
        # A comment could hold the beginning of a set.
        raise ValueError("has the flag 'x', which is not supported")
    if found["code"] is not None:
        code = int(found[0][2:].strip("{}"), 16)
        char = chr(code) if code < 0x80 else ""
    else:
        escaped = found["escaped"]
        char = found["literal"] or "" if escaped is None else _NAMED.get(escaped, escaped)
    if not is_written(char):
        raise ValueError("has a control character that only '\\u' could write, which would be left out")
    return found[0]


def _set(text: str) -> str:
    # Most need nothing, and stay as they are in messages.
    return text if _PLAIN_SET.fullmatch(text) else _without_unwritten(text)


def _without_unwritten(text: str) -> str:
    return f"[{text}--{_UNWRITTEN}]"
