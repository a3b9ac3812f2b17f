"""Errors of a device, without torch. `device_faults` maps torch's errors to them."""

from __future__ import annotations


class DeviceOutOfMemory(RuntimeError):
    """A step did not fit into the device's memory. Nothing of it counts as computed; a smaller one may fit."""


class DeviceLost(RuntimeError):
    """The device computes nothing any more for this process; a new process may get on with it."""
