"""/tenants/{tenant}/adapters/{name}/series."""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Request, Response

from loraplex.admin.admission import admit_version
from loraplex.admin.framework.dependencies import (
    AdapterName,
    Audited,
    Reader,
    Services,
    TenantId,
    Trainer,
    Writer,
)
from loraplex.admin.framework.openapi import LOCATION, PUSH, Responses, refused
from loraplex.admin.framework.route import AdminRoute
from loraplex.admin.problem import Problem
from loraplex.admin.schemas.adapters import Version
from loraplex.admin.schemas.series import Series, SeriesChange
from loraplex.admin.uploads.receive import is_form, receive_tensors
from loraplex.admin.uploads.trainer_numbers import read_numbers
from loraplex.control.catalog.series import SeriesInfo, SeriesRules

router = APIRouter(prefix="/tenants/{tenant}/adapters/{name}/series", route_class=AdminRoute)

_PUSHED: Responses = {201: LOCATION, 200: {"model": Version, **LOCATION}, **refused(422, 503)}


@router.get("")
async def get_series(_: Reader, tenant: TenantId, name: AdapterName, services: Services) -> Series:
    """Show the rules of a series."""
    return _show(await services.database.run(services.series.get, tenant, name))


@router.put("", responses=refused(422))
async def put_series(
    tenant: TenantId,
    name: AdapterName,
    body: SeriesChange,
    by: Annotated[Writer, Audited("series.set")],
    services: Services,
) -> Series:
    """Make a name a series of versions that a training pushes, or change its rules.

    The next version has its numbers checked.
    """
    rules = SeriesRules(
        body.keep_last, body.check_every, body.latest, body.quota, body.config, body.agree_within
    )
    put = partial(services.series.put, tenant, name, rules, by=by)
    return _show(await services.database.run(put))


@router.delete("", status_code=204, response_class=Response)
async def delete_series(
    tenant: TenantId,
    name: AdapterName,
    by: Annotated[Writer, Audited("series.delete")],
    services: Services,
) -> None:
    """Make a series an ordinary name again, with the versions that it has."""
    await services.database.run(partial(services.series.delete, tenant, name, by=by))


@router.post("/versions", status_code=201, responses=_PUSHED, openapi_extra=PUSH)
async def push_to_series(
    tenant: TenantId,
    name: AdapterName,
    by: Annotated[Trainer, Audited("version.upload")],
    services: Services,
    request: Request,
    response: Response,
) -> Version:
    """Push the tensors of the next version of a series.

    The answer waits for the check that the series wants of this version, and not for the disk: `durable` says whether
    the bytes are on it. The same bytes again: 200 and the version that has them. Where the series has `agree_within`,
    the body is a form that has what the trainer computed too, and a version that disagrees is refused.
    """
    series = await services.database.run(services.series.get, tenant, name)
    if series.rules.config is None:
        detail = f"The series '{name}' has no config for tensors alone: PUT one, or upload both files."
        raise Problem("conflict", detail, param="config")
    receive = partial(
        receive_tensors,
        request,
        services.artifacts.store,
        json.dumps(series.rules.config, sort_keys=True).encode(),
        partial(read_numbers, info=services.engine.info),
        max_bytes=services.max_upload_bytes,
    )
    info, is_new = await admit_version(
        services, tenant, name, receive, by=by, durable_first=False, compared=is_form(request)
    )
    services.on_push("known" if not is_new else "durable" if info.durable else "early")
    response.headers["Location"] = f"/admin/v1/tenants/{tenant}/adapters/{name}/versions/{info.version}"
    response.status_code = 201 if is_new else 200
    return Version.of(info)


def _show(info: SeriesInfo) -> Series:
    rules = info.rules
    return Series(
        name=info.name,
        keep_last=rules.keep_last,
        check_every=rules.check_every,
        latest=rules.latest,
        quota=rules.quota,
        agree_within=rules.agree_within,
        config=None if rules.config is None else dict(rules.config),
        created_at=info.created_at,
    )
