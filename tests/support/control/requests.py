"""Requests as the list of the last ones has them."""

from __future__ import annotations

from typing import Any

from loraplex.control.recent_requests import EndedRequest


def ended_request(number: int = 0, **changes: Any) -> EndedRequest:
    """One of acme to support@v3 that was answered; they end a millisecond after each other."""
    fields: dict[str, Any] = {
        "label": f"req-{number}",
        "id": f"{number:032x}",
        "at": 1_000_000 + number / 1000,
        "tenant_id": "acme",
        "key_id": "k",
        "route": "/v1/chat/completions",
        "model": None,
        "adapter": "support",
        "version": 3,
        "status": 200,
        "code": None,
        "total_s": 2.0,
        "queue_s": 0.1,
        "load_s": None,
        "first_token_s": 0.5,
        "prompt_tokens": 7,
        "cached_tokens": 0,
        "completion_tokens": 5,
        "trace_id": None,
    }
    return EndedRequest(**(fields | changes))
