"""The limits of the control groups of this process: those of a container, or of a service."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ControlGroups:
    """`root` is where they are mounted, `membership` lists those that this process is in. A group's own limit and those
    of all groups around it count. Knows version 2, and version 1 where its controllers lie side by side."""

    root: Path = Path("/sys/fs/cgroup")
    membership: Path = Path("/proc/self/cgroup")

    def cpus(self) -> float | None:
        """How many processors' time may be used; None without a limit."""
        quotas = [_v2_cpus(group / "cpu.max") for group in self._groups("")]
        for group in self._groups("cpu"):
            quota, period = _read_int(group / "cpu.cfs_quota_us"), _read_int(group / "cpu.cfs_period_us")
            quotas.append(quota / period if quota and period and quota > 0 else None)
        return min((quota for quota in quotas if quota is not None), default=None)

    def free_memory(self) -> int | None:
        """How many bytes are left to use; None without a limit."""
        limits = [(group / "memory.max", group / "memory.current") for group in self._groups("")]
        limits += [
            (group / "memory.limit_in_bytes", group / "memory.usage_in_bytes")
            for group in self._groups("memory")
        ]
        read = [(_read_int(limit), _read_int(used)) for limit, used in limits]
        free = [limit - used for limit, used in read if limit is not None and used is not None]
        return max(0, min(free)) if free else None

    def _groups(self, controller: str) -> Iterator[Path]:
        """This process's group and those around it. Version 2 has one hierarchy for all controllers, named ""."""
        top = self.root / controller
        yield top
        for line in _lines(self.membership):
            _number, controllers, path = line.split(":", 2)
            if controller in controllers.split(","):
                group = top / path.lstrip("/")
                while group != top and group.is_relative_to(top):
                    yield group
                    group = group.parent


def _v2_cpus(path: Path) -> float | None:
    """CPUs of "QUOTA PERIOD" in microseconds, or of "max PERIOD"."""
    quota, _, period = _text(path).partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def _read_int(path: Path) -> int | None:
    try:
        return int(_text(path))
    except ValueError:  # "max", or no file
        return None


def _lines(path: Path) -> list[str]:
    return [line for line in _text(path).splitlines() if line.count(":") >= 2]


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return ""
