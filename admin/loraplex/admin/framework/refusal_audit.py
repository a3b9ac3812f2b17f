"""Audit rows for changes that were refused or failed."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from loraplex.admin.framework.route import NoteRefusal
from loraplex.admin.problem import Problem
from loraplex.admin.services import AdminServices
from loraplex.control import rules
from loraplex.control.audit.recorder import Actor, Outcome
from loraplex.control.errors import InvalidValue

MAX_PARAMETER_CHARS = 80


def audit_refusals(services: AdminServices) -> NoteRefusal:
    """Writes a refused call into the audit log: the answer's code, but neither its text nor the request's body."""

    async def note(by: Actor, action: str, path: str, names: Mapping[str, str], problem: Problem) -> None:
        outcome: Outcome = "failed" if problem.status >= 500 else "refused"
        write = partial(
            services.audit.note_refusal,
            by,
            action,
            path.strip("/").format(**{name: value[:MAX_PARAMETER_CHARS] for name, value in names.items()}),
            tenant_id=_tenant_id(names.get("tenant")),
            outcome=outcome,
            code=problem.code,
        )
        await services.database.run(write)

    return note


def _tenant_id(given: str | None) -> str | None:
    """The tenant in the path, if it is a valid tenant id."""
    try:
        return None if given is None else rules.check_tenant_id(given)
    except InvalidValue:
        return None
