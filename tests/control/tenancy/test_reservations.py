"""Reservations of device memory that all tenants make together."""

from __future__ import annotations

import pytest

from loraplex.control.errors import InvalidValue
from support.control.plane import ControlPlane

GIB = 1 << 30


def test_reservations_beyond_what_can_be_kept_are_refused(plane: ControlPlane) -> None:
    reserve = {"limits": {"device_bytes_reserved": 3 * GIB}}
    plane.tenants.create("one", limits=reserve["limits"], reservable=5 * GIB)
    plane.tenants.create("two")
    with pytest.raises(InvalidValue, match=f"{2 * GIB} of them are left") as refused:
        plane.tenants.update("two", reserve, reservable=5 * GIB)
    assert refused.value.param == "limits.device_bytes_reserved"
    with pytest.raises(InvalidValue):
        plane.tenants.create("three", limits=reserve["limits"], reservable=5 * GIB)
    assert plane.tenants.get("two").limits.device_bytes_reserved is None
    plane.tenants.update("two", {"limits": {"device_bytes_reserved": 2 * GIB}}, reservable=5 * GIB)


def test_a_tenants_own_reservation_does_not_count_against_its_change(plane: ControlPlane) -> None:
    plane.tenants.create("one", limits={"device_bytes_reserved": 3 * GIB}, reservable=4 * GIB)
    changed = plane.tenants.update("one", {"limits": {"device_bytes_reserved": 4 * GIB}}, reservable=4 * GIB)
    assert changed.limits.device_bytes_reserved == 4 * GIB


def test_a_device_that_became_smaller_refuses_no_other_change(plane: ControlPlane) -> None:
    plane.tenants.create("one", limits={"device_bytes_reserved": 3 * GIB})
    plane.tenants.update("one", {"limits": {"max_concurrency": 3}}, reservable=GIB)
    plane.tenants.update("one", {"limits": {"device_bytes_reserved": None}}, reservable=GIB)


def test_more_cannot_be_reserved_than_the_cap(plane: ControlPlane) -> None:
    with pytest.raises(InvalidValue, match="device_bytes_max"):
        plane.tenants.create("one", limits={"device_bytes_reserved": 3, "device_bytes_max": 2})


def test_keys_have_no_limits_on_memory(plane: ControlPlane) -> None:
    plane.tenants.create("one")
    for name in ("device_bytes_reserved", "device_bytes_max", "host_bytes_max"):
        with pytest.raises(InvalidValue, match="limits of a tenant"):
            plane.keys.create("one", limits={name: 5})
