"""The way to the schema with checks of numbers, and back."""

from __future__ import annotations

from pathlib import Path

from loraplex.control.types import Refusal
from loraplex.migrations.run import downgrade, examine_schema, upgrade
from support.control.plane import ControlPlane, caller

BEFORE = "0007"
WRONG = Refusal("numerical_mismatch", "it is off")


def states(plane: ControlPlane) -> dict[str, str]:
    return {info.version: info.state for info in plane.catalog.list_versions("acme", "pirate").items}


async def test_what_was_ready_before_stays_ready_and_is_not_checked(
    plane: ControlPlane, tmp_path: Path
) -> None:
    plane.add("acme", "pirate", 1)
    plane.add("acme", "pirate", 2)
    plane.catalog.delete_version("acme", "pirate", "v2")
    plane.add_unchecked("acme", "pirate", 3)
    rejected = plane.add_unchecked("acme", "pirate", 4)
    plane.validation.reject(rejected, WRONG, {"verdict": "mismatch"})
    assert states(plane) == {"v1": "ready", "v2": "deleted", "v3": "validating", "v4": "rejected"}
    plane.close()

    # The version before knows of no checks: what waits for one is ready there, and what was rejected is gone.
    downgrade(plane.url, BEFORE)
    assert examine_schema(plane.url).found == BEFORE
    upgrade(plane.url)

    restarted = ControlPlane(tmp_path)
    assert states(restarted) == {"v1": "ready", "v2": "deleted", "v3": "ready", "v4": "deleted"}
    assert restarted.validation.pending() == []
    for model in ("pirate", "pirate@v1", "pirate@v3"):
        assert (await restarted.resolver.resolve(caller("acme"), model)).adapter is not None
    restarted.check_integrity()
    # What comes from now on is checked.
    restarted.add_unchecked("acme", "pirate", 5)
    assert states(restarted)["v5"] == "validating"
    restarted.close()
