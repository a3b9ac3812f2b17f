"""/caller."""

from __future__ import annotations

from fastapi import APIRouter

from loraplex.admin.framework.dependencies import AnyCaller, Services
from loraplex.admin.framework.route import AdminRoute
from loraplex.admin.schemas.caller import BaseModelShape, Caller
from loraplex.admin.schemas.keys import Key
from loraplex.admin.services import AdminServices
from loraplex.kernels.lora.site_groups import EMBEDDING, HEAD

router = APIRouter(route_class=AdminRoute)


@router.get("/caller")
async def get_caller(by: AnyCaller, services: Services) -> Caller:
    """Show whose secret this is, its scopes and limits, and the base model.

    A client needs no id of a tenant to find its way, and a training can compare its model with the served one before
    it begins.
    """
    key = None
    if by.tenant_id is not None and by.key_id is not None:
        key = Key.of(await services.database.run(services.keys.get, by.tenant_id, by.key_id))
    return Caller(
        kind="key" if by.kind == "key" else "admin",
        tenant=by.tenant_id,
        key=key,
        base=_base(services),
        max_upload_bytes=services.max_upload_bytes,
        data_url=services.data_url,
    )


def _base(services: AdminServices) -> BaseModelShape:
    catalog = services.catalog
    head, embedding = (catalog.base.sites.get((0, site)) for site in (HEAD, EMBEDDING))
    vocab_size = None if head is None else head.out_features
    return BaseModelShape(
        name=catalog.served_name,
        model_type=catalog.base.model_type,
        num_layers=catalog.base.num_layers,
        hidden_size=None if head is None else head.in_features,
        vocab_size=vocab_size if embedding is None else embedding.in_features,
        fingerprint=catalog.base.fingerprint,
        max_adapter_rank=catalog.max_rank,
    )
