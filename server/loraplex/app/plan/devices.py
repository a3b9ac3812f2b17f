"""Devices by name, from their vendors' data sheets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from loraplex.app.settings import SettingsInvalid

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class PlannedDevice:
    """`memory` in bytes, as the driver reports it. `bandwidth` in bytes a second and `flops` of dense 16-bit products
    are those of the data sheet, `capability` is a GPU's compute capability; None where they are unknown."""

    name: str
    kind: Literal["cpu", "cuda"]
    memory: int
    bandwidth: float | None
    flops: float | None
    capability: tuple[int, int] | None = None


def _gpu(
    name: str, memory_mib: int, bandwidth_gb: int, teraflops: int, capability: tuple[int, int]
) -> PlannedDevice:
    return PlannedDevice(name, "cuda", memory_mib * MIB, bandwidth_gb * 1e9, teraflops * 1e12, capability)


DEVICES = {
    device.name: device
    for device in (
        _gpu("l4", 23034, 300, 121, (8, 9)),
        _gpu("a10g", 23028, 600, 70, (8, 6)),
        _gpu("rtx4090", 24564, 1008, 165, (8, 9)),
        _gpu("l40s", 46068, 864, 362, (8, 9)),
        _gpu("a100-40", 40960, 1555, 312, (8, 0)),
        _gpu("a100-80", 81920, 2039, 312, (8, 0)),
        _gpu("h100", 81559, 3350, 989, (9, 0)),
        _gpu("h200", 143771, 4800, 989, (9, 0)),
    )
}
"""The SXM versions of A100, H100 and H200."""


def find_device(name: str, memory: int, bandwidth_gb: float, cpu_memory: int) -> PlannedDevice:
    """The device of `--gpu`, with the memory in bytes and the bandwidth in GB/s that were given in its place (0: its
    own). "cpu" has `cpu_memory` bytes free. Raises SettingsInvalid."""
    lowered = name.lower().replace("_", "-").replace(" ", "")
    known = DEVICES.get(lowered)
    if lowered == "cpu":
        known = PlannedDevice("cpu", "cpu", cpu_memory, None, None)
    if known is None and not memory:
        raise SettingsInvalid(
            f"--gpu {name[:40]}: not known by name. Known are cpu, {', '.join(DEVICES)}; for any other GPU give "
            "--gpu-memory, and --bandwidth for the speed."
        )
    known = known or PlannedDevice(lowered, "cuda", memory, None, None)
    bandwidth = bandwidth_gb * 1e9 if bandwidth_gb else known.bandwidth
    return replace(known, memory=memory or known.memory, bandwidth=bandwidth)
