"""A guarded release on a running server: users meet a bad version until the guard goes back by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.releases.planted import Crowd, write_brief_adapter, write_endless_adapter
from support.servers.live_server import Shop, checked

pytestmark = pytest.mark.slow
TENANT = "careful"
RELEASE = f"tenants/{TENANT}/adapters/bot/release"


def test_a_version_that_never_stops_is_rolled_back_by_itself(tiny: Shop, tmp_path: Path) -> None:
    server, admin = tiny.server, tiny.server.admin
    server.create_tenant(TENANT)
    key = server.create_key(TENANT)
    server.upload(TENANT, "bot", write_brief_adapter(tmp_path / "v1"))
    server.upload(TENANT, "bot", write_endless_adapter(tmp_path / "v2"))
    targets = [{"version": "v1", "weight": 50}, {"version": "v2", "weight": 50}]
    begun = checked(admin.put(RELEASE, json={"targets": targets, "sticky": "user", "guard": {}}))
    assert (begun["run"]["status"], begun["run"]["candidate"]) == ("running", "v2")

    def release() -> dict[str, Any]:
        return dict(checked(admin.get(RELEASE)))

    crowd = Crowd(server, key, "bot")
    try:
        server.wait(lambda: release()["run"]["status"] == "rolled_back", 120)
        met = len(crowd.asked)
        server.wait(lambda: len(crowd.asked) > met + 20)
    finally:
        crowd.stop()
    assert [asked for asked in crowd.asked if asked.code is not None] == []
    after = release()
    assert after["targets"] == [{"version": "v1", "weight": 100}]
    assert (after["origin"], after["restores"], after["actor"]) == ("rollback", 1, "guard")
    assert after["reason"].startswith("guard: ")
    breach = after["reason"].split()[1].removesuffix(":")
    assert breach in ("output_length", "length_share")
    assert after["run"]["reason"] == after["reason"]

    history = checked(admin.get(f"{RELEASE}/history"))["data"]
    assert [(row["origin"], row["reason"]) for row in history] == [
        ("rollback", after["reason"]),
        ("set", None),
        ("upload", None),
    ]
    (row,) = checked(admin.get("audit", params={"tenant": TENANT, "action": "release.rolled_back"}))["data"]
    assert (row["actor"], row["after"]["targets"]) == ("guard", after["targets"])
    compared = checked(admin.get(f"{RELEASE}/comparison"))
    assert (compared["guard"]["verdict"], compared["guard"]["breach"]) == ("breach", breach)
    shares = {arm["version"]: arm["length_share"] for arm in compared["arms"]}
    assert shares["v1"] < 0.5 < shares["v2"]
    checked(admin.delete(f"tenants/{TENANT}"))
