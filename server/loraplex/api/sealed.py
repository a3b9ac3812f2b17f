"""Reasoning in a form that only passes through clients.

OpenAI's `encrypted_content` and Anthropic's `signature` carry the reasoning of a turn to the next request of the same
conversation. Here they hold the text itself, in base64 with a checksum: it is the caller's own, no server keeps state,
and every replica reads what another one wrote. What others made cannot be read.
"""

from __future__ import annotations

import base64
import binascii
import hashlib

PREFIX = "lpx1."
_CHECK_CHARS = 16


def seal(text: str) -> str:
    data = text.encode("utf-8", "replace")
    return f"{PREFIX}{_checksum(data)}.{base64.urlsafe_b64encode(data).decode()}"


def unseal(sealed: str) -> str | None:
    """The text; None where `seal` has not made this."""
    check, dot, content = sealed.removeprefix(PREFIX).partition(".")
    if not sealed.startswith(PREFIX) or not dot or not content.isascii():
        return None
    try:
        data = base64.b64decode(content, altchars=b"-_", validate=True)
        text = data.decode()
    except (binascii.Error, ValueError):
        return None
    return text if check == _checksum(data) else None


def _checksum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:_CHECK_CHARS]
