from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import CollectorRegistry

from loraplex.api.metrics import collectors
from loraplex.api.metrics.collectors import DiskCollector


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def figures(directories: dict[str, Path]) -> dict[tuple[str, str], float]:
    registry = CollectorRegistry()
    registry.register(DiskCollector(directories))
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {(s.name, s.labels["directory"]): s.value for family in families for s in family.samples}


@pytest.fixture
def disks(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[Path, Usage]], None]:
    def put(found: dict[Path, Usage]) -> None:
        def usage(path: Path) -> Usage:
            if path not in found:
                raise FileNotFoundError(path)
            return found[path]

        monkeypatch.setattr(collectors.shutil, "disk_usage", usage)

    return put


def test_what_is_left_is_told_and_what_cannot_be_asked_is_left_out(
    disks: Callable[[dict[Path, Usage]], None],
) -> None:
    data, cache = Path("/data"), Path("/cache")
    disks({data: Usage(100, 91, 9)})
    assert figures({"data": data, "cache": cache}) == {
        ("loraplex_disk_free_bytes", "data"): 9,
        ("loraplex_disk_bytes", "data"): 100,
    }
    disks({data: Usage(100, 50, 50), cache: Usage(10, 0, 10)})
    assert figures({"data": data, "cache": cache})["loraplex_disk_free_bytes", "cache"] == 10


def test_a_real_disk(tmp_path: Path) -> None:
    told = figures({"data": tmp_path, "gone": tmp_path / "gone"})
    assert 0 <= told["loraplex_disk_free_bytes", "data"] <= told["loraplex_disk_bytes", "data"]
    assert told.keys() == {("loraplex_disk_free_bytes", "data"), ("loraplex_disk_bytes", "data")}
