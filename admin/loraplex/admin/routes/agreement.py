"""/tenants/{tenant}/adapters/{name}/versions/{version}/agreement."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends

from loraplex.admin.framework.dependencies import (
    AdapterName,
    Audited,
    Services,
    TenantId,
    Trainer,
    VersionName,
)
from loraplex.admin.framework.openapi import refused
from loraplex.admin.framework.route import AdminRoute
from loraplex.admin.problem import Problem
from loraplex.admin.schemas import series as shown
from loraplex.admin.services import AdminServices
from loraplex.admin.uploads.trainer_numbers import check_numbers
from loraplex.control.agreement import compare
from loraplex.control.agreement_records import record_agreement
from loraplex.control.types import Principal
from loraplex.http.routing import caller

router = APIRouter(
    prefix="/tenants/{tenant}/adapters/{name}/versions/{version}/agreement", route_class=AdminRoute
)


@router.post("", responses=refused(429, 504))
async def compare_with_trainer(
    tenant: TenantId,
    name: AdapterName,
    version: VersionName,
    body: shown.AgreementRequest,
    by: Annotated[Trainer, Audited("version.agreement")],
    who: Annotated[Principal, Depends(caller)],
    services: Services,
) -> shown.Agreement:
    """Compare a trainer's log probabilities with the server's.

    The server's are computed as a request of the tenant, which counts for its limits and its usage. The figures are
    kept in the version's report.
    """
    info = await services.database.run(services.catalog.get_version, tenant, name, version)
    if info.state != "ready":
        raise Problem("conflict", f"{name}@{version} is {info.state}; only a ready version computes.")
    numbers = check_numbers(body, services.engine.info)
    ours = await services.score(await _payer(services, who, tenant), info, numbers.tokens)
    found = compare(numbers.logprobs, ours)
    await services.database.run(partial(record_agreement, services.database, info, found, by=by))
    services.on_agreement(found.mean)
    return shown.Agreement(
        name=name,
        version=version,
        digest=info.digest,
        base_fingerprint=info.base_fingerprint,
        dtype=services.engine.info.dtype,
        **found.figures(),
        sequences=[shown.SequenceAgreement.of(sequence) for sequence in found.sequences],
    )


async def _payer(services: AdminServices, who: Principal, tenant: str) -> Principal:
    """Whose limits and usage the request counts for: the key's, or of the admin token the tenant's alone."""
    if not who.is_admin:
        return who
    found = await services.database.run(services.tenants.get, tenant)
    return Principal(tenant, None, frozenset(), weight=found.weight, tenant_limits=found.limits)
