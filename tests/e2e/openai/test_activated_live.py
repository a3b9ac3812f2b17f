"""An activated LoRA over a conversation that its tenant's base model has read, and the probe of another tenant that has
an adapter of the same bytes: on a whole server with a real engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.servers.live_server import ADAPTER_FILES, Shop, checked, post_version, write_tiny_adapter

pytestmark = pytest.mark.slow

CONVERSATION = [{"role": "user", "content": "Why does bread rise? " * 4}]
"""A token is a byte."""
INVOCATION = b"[judge]"


class Tenant:
    """One with an activated adapter, whose invocation the server appends."""

    def __init__(self, shop: Shop, name: str, adapter: Path) -> None:
        self.server = shop.server
        self.name = name
        self.server.create_tenant(name)
        self.key = self.server.create_key(name)
        files = {part: (part, (adapter / part).read_bytes()) for part in ADAPTER_FILES}
        path = f"tenants/{name}/adapters/judge/versions"
        checked(post_version(self.server.admin, path, files, serving=json.dumps({"alora": "append"})), 201)

    def post(self, path: str, **body: Any) -> Any:
        with self.server.client(self.key) as http:
            return checked(http.post(path, json=body), 200)

    def found(self, model: str) -> tuple[int, int]:
        """The prompt's tokens, and those of them that were in the prefix cache."""
        asked = {"model": model, "messages": CONVERSATION}
        counted = self.post("/tokenize", **asked)["count"]
        usage = self.post("/v1/chat/completions", **asked, max_tokens=1)["usage"]
        assert usage["prompt_tokens"] == counted
        return counted, usage["prompt_tokens_details"]["cached_tokens"]


def shared_tokens(shop: Shop, tenant: str) -> float:
    text = httpx.get(f"{shop.server.admin_url}/metrics").text
    wanted = f'loraplex_alora_shared_tokens_total{{adapter="judge@v1",tenant="{tenant}"}} '
    return sum(float(line.removeprefix(wanted)) for line in text.splitlines() if line.startswith(wanted))


def test_a_conversation_is_shared_within_a_tenant_and_with_no_other(tiny: Shop, tmp_path: Path) -> None:
    adapter = write_tiny_adapter(tmp_path / "judge", alora_invocation_tokens=list(INVOCATION))
    baker, spy = (Tenant(tiny, name, adapter) for name in ("baker", "spy"))
    with tiny.client() as http:
        base = str(http.get("/v1/models").json()["data"][0]["id"])
    length, found = baker.found(base)
    assert found == 0
    # All whole blocks before the invocation; and of an equal request, all but the last position's.
    assert baker.found("judge") == (length + len(INVOCATION), length // 16 * 16)
    assert baker.found("judge")[1] >= length // 16 * 16
    assert shared_tokens(tiny, "baker") == 2 * (length // 16 * 16)
    assert spy.found("judge") == (length + len(INVOCATION), 0)
    # What it finds from now on is its own.
    assert spy.found(base) == (length, (length - 1) // 16 * 16)
    assert shared_tokens(tiny, "spy") == 0
