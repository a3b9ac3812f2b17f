"""What an operator and a tenant do to adapters, releases and keys while the server runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.servers.live_server import (
    LiveServer,
    Shop,
    checked,
    write_tiny_adapter,
)
from support.servers.live_streams import Streams

pytestmark = pytest.mark.slow

_NUMBERS = itertools.count()


@dataclass
class Tenant:
    """A tenant of the shared server, with a key that may infer."""

    server: LiveServer
    id: str
    key: str
    root: Path

    def folder(self, seed: int) -> Path:
        return write_tiny_adapter(self.root / str(seed), seed=seed)

    def upload(self, name: str, seed: int) -> dict[str, Any]:
        return self.server.upload(self.id, name, self.folder(seed))

    def post(self, model: str, **fields: Any) -> httpx.Response:
        body = {"model": model, "prompt": "one", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        with self.server.client(self.key) as client:
            return client.post("/v1/completions", json={**body, **fields})

    def say(self, model: str, **fields: Any) -> str:
        return str(checked(self.post(model, **fields))["choices"][0]["text"])

    def served(self, model: str) -> str:
        answer = self.post(model, max_tokens=1)
        assert answer.status_code == 200, answer.text
        return answer.headers["x-loraplex-adapter"]

    def models(self) -> list[str]:
        with self.server.client(self.key) as client:
            return [card["id"] for card in checked(client.get("/v1/models"))["data"]]

    @property
    def path(self) -> str:
        return f"tenants/{self.id}"


@pytest.fixture
def tenant(tiny: Shop, tmp_path: Path) -> Iterator[Tenant]:
    name = f"t{next(_NUMBERS)}"
    tiny.server.create_tenant(name)
    yield Tenant(tiny.server, name, tiny.server.create_key(name), tmp_path)
    assert tiny.server.admin.delete(f"tenants/{name}").status_code == 200


def test_a_second_version_takes_traffic_when_it_is_released(tenant: Tenant) -> None:
    admin, release = tenant.server.admin, f"{tenant.path}/adapters/bot/release"
    assert tenant.upload("bot", 1)["version"] == "v1"
    first = tenant.say("bot")
    assert tenant.upload("bot", 2)["version"] == "v2"
    assert tenant.upload("bot", 1)["version"] == "v1"  # the same bytes
    second = tenant.say("bot@v2")
    assert first != second
    assert tenant.say("bot") == first
    assert tenant.served("bot") == "bot@v1"

    checked(admin.put(release, json={"targets": [{"version": "v2", "weight": 1}]}))
    assert tenant.say("bot") == second
    checked(admin.post(f"{release}/rollback"))
    assert tenant.say("bot") == first
    promoted = checked(admin.post(f"{release}/promote"))
    assert (
        promoted["targets"] == [{"version": "v2", "weight": 1}] or promoted["targets"][0]["version"] == "v2"
    )
    assert tenant.say("bot") == second

    shares = {"targets": [{"version": "v1", "weight": 1}, {"version": "v2", "weight": 1}]}
    checked(admin.put(release, json=shares))
    assert {tenant.served("bot") for _ in range(40)} == {"bot@v1", "bot@v2"}
    checked(admin.put(release, json={**shares, "sticky": "user"}))
    by_user = {user: {tenant.say("bot", user=user) for _ in range(3)} for user in map(str, range(12))}
    assert all(len(said) == 1 for said in by_user.values())
    assert set().union(*by_user.values()) == {first, second}


def test_deleting_an_adapter_lets_what_runs_finish(tenant: Tenant) -> None:
    for name, max_tokens in (("short", 4000), ("long", 16_000), ("bot", 64_000)):
        tenant.upload(name, 3)
        expected = tenant.say(name, max_tokens=400)[:200]
        streams = Streams(tenant.server, tenant.key, [name, name], max_tokens=max_tokens)
        streams.wait_until_all_run()
        assert tenant.server.admin.delete(f"{tenant.path}/adapters/{name}").status_code == 204
        gone = tenant.post(name)
        assert gone.status_code == 404
        assert gone.json()["error"]["code"] == "model_not_found"
        if streams.all_run_on:
            break
    else:
        raise AssertionError("the streams were too short for this test")
    assert tenant.models() == ["tiny"]
    for story in streams.join(120):
        assert story.finished
        assert story.finish_reason == "length"
        assert story.text[:200] == expected
    tenant.server.wait(tenant.server.idle)
    assert f"{name}@v1" not in tenant.server.residency()
    # The name is free again, and stands for what is uploaded now.
    assert tenant.upload(name, 4)["version"] == "v2"
    assert tenant.say(name, max_tokens=400)[:200] != expected


def test_the_cache_tells_where_versions_are(tenant: Tenant) -> None:
    tenant.upload("bot", 8)
    streams = Streams(tenant.server, tenant.key, ["bot"], max_tokens=100_000)
    streams.wait_until_all_run()
    rows = checked(tenant.server.admin.get("cache", params={"limit": 100}))["data"]
    (row,) = [row for row in rows if row["tenant_id"] == tenant.id]
    assert row["residency"] == ["device", "host", "disk"]
    assert row["leases"] == 1
    assert row["device_bytes"] > 0
    assert row["disk_bytes"] > 0
    assert row["load_seconds"]
    assert all(seconds >= 0 for seconds in row["load_seconds"].values())
    engine = tenant.server.engine()
    assert engine["live_requests"] >= 1
    assert row["digest"] in engine["stats"]["running_adapters"]
    assert engine["stats"]["tenants"][tenant.id]["running"] == 1
    assert streams.all_run_on
    streams.hang_up()
    pin = f"{tenant.path}/adapters/bot/versions/v1/pin"
    assert checked(tenant.server.admin.put(pin))["pinned"] is True
    assert checked(tenant.server.admin.delete(pin))["pinned"] is False
