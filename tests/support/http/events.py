"""Server-sent events, as text."""

from __future__ import annotations


def read_events(text: str) -> list[tuple[str | None, str]]:
    """Name and data of each event."""
    assert text.endswith("\n\n"), "the last event is not whole"
    found: list[tuple[str | None, str]] = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        lines = [line.partition(": ")[::2] for line in block.split("\n")]
        fields = dict(lines)
        assert set(fields) <= {"event", "data"}, block
        found.append((fields.get("event"), fields["data"]))
    return found
