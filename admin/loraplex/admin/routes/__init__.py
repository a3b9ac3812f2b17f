"""The routes, one module a resource, each with its `router`.

`OPERATOR_ROUTERS` need the admin token and are served on the admin port alone; `TENANT_ROUTERS` may be called with a
tenant's own key and are served on both ports.
"""

from loraplex.admin.routes import (
    adapters,
    agreement,
    archives,
    audit,
    batches,
    caller,
    engine,
    keys,
    releases,
    series,
    shadow_texts,
    tenants,
    usage,
    versions,
)
from loraplex.admin.routes.operations import cluster, needs

OPERATOR_ROUTERS = (
    tenants.router,
    keys.router,
    audit.router,
    engine.router,
    needs.router,
    cluster.router,
    usage.router,
    batches.router,
    adapters.operator_router,
)
TENANT_ROUTERS = (
    caller.router,
    adapters.router,
    versions.router,
    agreement.router,
    archives.router,
    releases.router,
    series.router,
    shadow_texts.router,
    tenants.tenant_router,
    usage.tenant_router,
)
