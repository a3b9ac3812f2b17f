"""Failures of libraries, in words."""

from __future__ import annotations


def describe_failure(library: str, error: Exception) -> str:
    """The failure of a library, in one line."""
    reason = (str(error).strip().splitlines() or [""])[0]
    return f"{library} failed with {type(error).__name__}: {reason}"
