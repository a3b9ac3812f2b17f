"""The admin plane: tenants, keys, adapters, releases, usage and audit over HTTP, as FastAPI applications.

- `app.create_admin_app`, `app.create_tenant_app`: the operators' port, and what tenants reach on the data port.
- `routes`: one module a resource, typed functions. `schemas`: their models. `uploads`: an adapter's multipart body.
- `framework.route.AdminRoute`: the class of every route. It authenticates and authorises before it reads the request.
- `services.AdminServices`: what the routes are built from, with the limits on uploads, downloads and reports.
- `problem.from_exception`: the one place where an error becomes an answer.
"""
