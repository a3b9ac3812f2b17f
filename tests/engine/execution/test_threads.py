"""How many threads compute where control groups limit what a process may use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from loraplex.engine.control_groups import ControlGroups
from loraplex.engine.execution.executor import set_threads

MAX = "max 100000"


def groups(tmp_path: Path, membership: str, files: Mapping[str, str]) -> ControlGroups:
    """A mounted hierarchy with these files."""
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    (tmp_path / "self").write_text(membership + "\n")
    return ControlGroups(tmp_path / "cgroup", tmp_path / "self")


@pytest.mark.parametrize(
    ("membership", "files", "cpus"),
    [
        ("0::/", {"cpu.max": "150000 100000"}, 1.5),
        ("0::/", {"cpu.max": MAX}, None),
        ("0::/", {}, None),
        ("0::/", {"cpu.max": "nonsense"}, None),
        ("0::/system.slice/ours.service", {"system.slice/ours.service/cpu.max": "50000 100000"}, 0.5),
        ("0::/a/b", {"a/b/cpu.max": "800000 100000", "a/cpu.max": "300000 100000", "cpu.max": MAX}, 3.0),
        ("0::/a/b", {"a/other/cpu.max": "100000 100000"}, None),
        ("4:cpu,cpuacct:/", {"cpu/cpu.cfs_quota_us": "250000", "cpu/cpu.cfs_period_us": "100000"}, 2.5),
        ("4:cpu,cpuacct:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("4:cpu,cpuacct:/x", {"cpu/x/cpu.cfs_quota_us": "50000", "cpu/x/cpu.cfs_period_us": "50000"}, 1.0),
        ("4:memory:/x", {"cpu/x/cpu.cfs_quota_us": "50000", "cpu/x/cpu.cfs_period_us": "50000"}, None),
    ],
)
def test_quota_is_that_of_the_group_and_of_those_around_it(
    membership: str, files: Mapping[str, str], cpus: float | None, tmp_path: Path
) -> None:
    assert groups(tmp_path, membership, files).cpus() == cpus


@pytest.mark.parametrize(
    ("membership", "files", "free"),
    [
        ("0::/", {"memory.max": "1000", "memory.current": "400"}, 600),
        ("0::/", {"memory.max": "max", "memory.current": "400"}, None),
        ("0::/a", {"a/memory.max": "1000", "a/memory.current": "1200", "memory.max": "max"}, 0),
        (
            "9:memory:/",
            {"memory/memory.limit_in_bytes": "1000", "memory/memory.usage_in_bytes": "300"},
            700,
        ),
    ],
)
def test_free_memory(membership: str, files: Mapping[str, str], free: int | None, tmp_path: Path) -> None:
    assert groups(tmp_path, membership, files).free_memory() == free


@pytest.fixture
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("quota", "asked", "threads", "words"),
    [
        ("250000 100000", 0, 2, "2 threads for a CPU quota of 2.5"),
        ("50000 100000", 0, 1, "1 thread for a CPU quota of 0.5"),
        ("50000 100000", 3, 3, "3 threads"),
        ("900000 100000", 0, 4, "4 threads"),
        (MAX, 0, 4, "4 threads"),
    ],
)
def test_quota_bounds_the_threads_that_nobody_asked_for(
    four_threads: None, quota: str, asked: int, threads: int, words: str, tmp_path: Path
) -> None:
    assert set_threads(asked, groups(tmp_path, "0::/", {"cpu.max": quota})) == words
    assert torch.get_num_threads() == threads
