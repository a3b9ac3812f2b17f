"""The audit log as tests read it."""

from __future__ import annotations

from typing import Any

from loraplex.control.audit.log import AuditEntry, AuditFilter, AuditLog
from loraplex.control.audit.recorder import Actor
from support.control.plane import ControlPlane

ACTOR = Actor("key", "acme", "0123456789abcdef", "192.0.2.7", "req-1")


def entries(plane: ControlPlane, **chosen: Any) -> list[AuditEntry]:
    """The oldest first."""
    page = AuditLog(plane.database).list(AuditFilter(**chosen), limit=500)
    return list(reversed(page.items))
