"""The code that every admin route runs through.

- `route.AdminRoute`: authentication, scope, query and body, in this order; then the route's function runs.
- `dependencies`: the types that a function's parameters have (`Operator`, `Reader`, `Services`, `TenantId`, …).
- `strict_request`: readers of query and JSON body that refuse what they do not know.
- `boundary.ProblemBoundary`: turns what routes raise into problem documents. `refusal_audit`: records refused changes.
- `openapi.openapi_document`: the OpenAPI document, and its page.
"""
