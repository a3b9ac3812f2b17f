"""/tenants/{tenant}/adapters/{name}/versions/{version}/agreement."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

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
from loraplex.control.agreement import compare, record_agreement
from loraplex.control.types import Principal
from loraplex.engine.reports import EngineInfo
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
    tokens, theirs = checked(body, services.engine.info)
    ours = await services.score(await _payer(services, who, tenant), info, tokens)
    found = compare(theirs, ours)
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


def checked(body: shown.AgreementRequest, info: EngineInfo) -> tuple[list[list[int]], list[list[float]]]:
    """The token ids, and the trainer's log probabilities of all but the first of each sequence. Raises Problem (400)
    that names the place of what is wrong."""
    tokens, given = _several("tokens", body.tokens), _several("logprobs", body.logprobs)
    if len(tokens) != len(given):
        raise _wrong("logprobs", f"has {len(given)} sequences, and tokens has {len(tokens)}")
    if (count := sum(map(len, tokens))) > shown.MAX_TOKENS:
        raise _wrong("tokens", f"has {count} tokens; at most {shown.MAX_TOKENS} are compared at a time")
    ids = [_ids(one, f"tokens.{index}", info) for index, one in enumerate(tokens)]
    theirs = [_from_second(one, len(ids[index]), f"logprobs.{index}") for index, one in enumerate(given)]
    return ids, theirs


def _several(field: str, given: list[Any]) -> list[list[Any]]:
    """One sequence, or several, as several."""
    if not any(isinstance(one, list) for one in given):
        return [given]
    if not all(isinstance(one, list) for one in given):
        raise _wrong(field, "is neither one sequence nor a list of sequences")
    if len(given) > shown.MAX_SEQUENCES:
        raise _wrong(
            field, f"has {len(given)} sequences; at most {shown.MAX_SEQUENCES} are compared at a time"
        )
    return given


def _ids(given: list[Any], where: str, info: EngineInfo) -> list[int]:
    if not 2 <= len(given) <= info.max_model_len:
        raise _wrong(where, f"has {len(given)} tokens; a sequence has from 2 to {info.max_model_len}")
    for place, token_id in enumerate(given):
        if type(token_id) is not int or not 0 <= token_id < info.vocab_size:  # true is an int to Python
            told = f"is no token id, which is a whole number from 0 to {info.vocab_size - 1}"
            raise _wrong(f"{where}.{place}", told)
    return given


def _from_second(given: list[Any], num_tokens: int, where: str) -> list[float]:
    if len(given) not in (num_tokens - 1, num_tokens):
        told = f"has {len(given)} entries for {num_tokens} tokens: one for each, null for the first, or that left out"
        raise _wrong(where, told)
    start = len(given) - num_tokens + 1
    if start and given[0] is not None:
        raise _wrong(f"{where}.0", "has to be null: nothing precedes the first token")
    for place, value in enumerate(given[start:], start):
        low, high = shown.LOWEST_LOGPROB, shown.HIGHEST_LOGPROB
        if type(value) not in (int, float) or not low <= value <= high:
            told = f"is no log probability, which is a number from {low:g} to 0 ({high:g} more is taken for rounding)"
            raise _wrong(f"{where}.{place}", told)
    return [float(value) for value in given[start:]]


def _wrong(where: str, told: str) -> Problem:
    return Problem("invalid_value", f"{where} {told}.", param=where)


async def _payer(services: AdminServices, who: Principal, tenant: str) -> Principal:
    """Whose limits and usage the request counts for: the key's, or of the admin token the tenant's alone."""
    if not who.is_admin:
        return who
    found = await services.database.run(services.tenants.get, tenant)
    return Principal(tenant, None, frozenset(), weight=found.weight, tenant_limits=found.limits)
