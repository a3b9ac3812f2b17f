"""What a device does to a step, in words that need no torch. `device_faults` tells which it was."""

from __future__ import annotations


class DeviceOutOfMemory(RuntimeError):
    """A step did not fit into the device's memory. Nothing of it counts as computed; a smaller one may fit."""


class DeviceLost(RuntimeError):
    """The device computes nothing any more for this process; a new process may get on with it."""
