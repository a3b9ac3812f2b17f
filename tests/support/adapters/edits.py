"""What a refusal must not advise: to change the config of an adapter whose weights are trained."""

from __future__ import annotations

import re

_EDIT = re.compile(
    r"\b(leave \w+ out|take [\w ]+ out|remove|delete|drop|turns? (it|\w+) off|set (it|\w+) to|give it|change it"
    r"|change the field|edit|instead of|write|replace|add|rename)\b",
    re.IGNORECASE,
)


def advised_edits(message: str) -> list[str]:
    """The words of a message that ask for an edit of a file."""
    return [found[0] for found in _EDIT.finditer(message)]
