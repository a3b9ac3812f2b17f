"""What is recorded of calls that were refused or failed."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from loraplex.admin.operation import Operation
from loraplex.admin.plane import NoteRefusal
from loraplex.admin.problem import Problem
from loraplex.admin.services import AdminServices
from loraplex.control import rules
from loraplex.control.audit import Actor, Outcome
from loraplex.control.errors import InvalidValue

MAX_PARAMETER_CHARS = 80


def refusals_of(services: AdminServices) -> NoteRefusal:
    """Writes them into the audit log: the answer's code, and neither its words nor what was sent."""

    async def note(by: Actor, operation: Operation, path: Mapping[str, str], problem: Problem) -> None:
        assert operation.action is not None
        outcome: Outcome = "failed" if problem.status >= 500 else "refused"
        named = {name: value[:MAX_PARAMETER_CHARS] for name, value in path.items()}
        write = partial(
            services.audit.note_refusal,
            by,
            operation.action,
            operation.path.strip("/").format(**named),
            tenant_id=_tenant_id(path.get("tenant")),
            outcome=outcome,
            code=problem.code,
        )
        await services.database.run(write)

    return note


def _tenant_id(given: str | None) -> str | None:
    """What a path names, where it could be a tenant's id."""
    try:
        return None if given is None else rules.check_tenant_id(given)
    except InvalidValue:
        return None
