"""Types of the parameters that route functions take: the caller, the services, and the parameters of a path.

A route's `Security` names the one scope that it needs. `route.AdminRoute` checks it before it reads the request; the
dependency only returns the caller that was found.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, cast

from fastapi import Depends, Header, Path, Request, Security

from loraplex.adapters.store.files import shown
from loraplex.admin.schemas import described
from loraplex.admin.schemas.fields import OmittedNull
from loraplex.admin.services import AdminServices
from loraplex.control.audit.recorder import Actor
from loraplex.control.errors import VersionNotFound
from loraplex.control.types import Principal
from loraplex.http.context import context_of
from loraplex.http.routing import caller

ANY_SCOPE = "any"
"""In place of a scope, where every valid secret may call."""


@dataclass(frozen=True)
class Audited:
    """Marks the caller of a route that changes something: `action` is what the audit log calls the change."""

    action: str


def actor_of(request: Request, principal: Principal) -> Actor:
    """The caller as the audit log names it."""
    return Actor(
        "admin" if principal.is_admin else "key",
        principal.tenant_id,
        principal.key_id,
        None if request.client is None else request.client.host,
        context_of(request.scope).label,
        principal.scopes,
    )


async def _actor(request: Request, principal: Annotated[Principal, Depends(caller)]) -> Actor:
    return actor_of(request, principal)


async def _services(request: Request) -> AdminServices:
    return cast(AdminServices, request.app.state.services)


async def _version(version: Annotated[str, Path(json_schema_extra={"pattern": described.VERSION})]) -> str:
    """The version's name. It has one spelling, so that names can be compared. Raises VersionNotFound."""
    if not re.fullmatch(described.VERSION, version):
        raise VersionNotFound(f"There is no version {shown(version)}; versions are named v1, v2, ….")
    return version


async def _revisions(
    request: Request,
    _: Annotated[
        str | None,
        OmittedNull(),
        Header(
            alias="If-Match",
            description="The ETag of the state to change, or several; any other state is a 412.",
        ),
    ] = None,
) -> frozenset[int] | None:
    given = ",".join(request.headers.getlist("if-match"))
    if not given or given.strip() == "*":
        return None
    return frozenset(int(digits) for digits in re.findall(r'(?<![\w/])"([0-9]{1,9})"', given))


Operator = Annotated[Actor, Security(_actor, scopes=["operator"])]
"""The admin token alone."""
Reader = Annotated[Actor, Security(_actor, scopes=["adapters:read"])]
"""A scope: the admin token, or a key of the path's tenant that has it."""
Writer = Annotated[Actor, Security(_actor, scopes=["adapters:write"])]
Trainer = Annotated[Actor, Security(_actor, scopes=["adapters:train"])]
UsageReader = Annotated[Actor, Security(_actor, scopes=["usage:read"])]
AnyCaller = Annotated[Actor, Security(_actor, scopes=[ANY_SCOPE])]
"""The admin token, or any key."""

Services = Annotated[AdminServices, Depends(_services)]
TenantId = Annotated[str, Path(json_schema_extra={"pattern": described.TENANT_ID})]
KeyId = Annotated[str, Path(json_schema_extra={"pattern": described.KEY_ID})]
AdapterName = Annotated[str, Path(json_schema_extra={"pattern": described.ADAPTER_NAME})]
VersionName = Annotated[str, Depends(_version)]
IfMatch = Annotated[frozenset[int] | None, Depends(_revisions)]
"""The revisions that If-Match names; None without the header or for `*`. An ETag that is not ours matches no
revision."""
