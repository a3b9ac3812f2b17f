"""Code that both HTTP planes share, below `loraplex.api` and `loraplex.admin`. It has no routes and no messages of its
own.

- `application.create_app`: a FastAPI application without the framework's own pages, redirects, errors and telemetry.
- `routing.OrderedRoute`: an `APIRoute` that asks who calls and what he may before it reads the body.
- `edge.Edge` and `boundary.ErrorBoundary`: the two layers around all routes (request id and access log; errors).
- `body.chunks`, `bearer.bearer_secret`: bounded readers of a request. They raise the errors of `errors`, which each
  plane turns into an answer of its own shape.
- `document.describe`: the OpenAPI document of an application.
"""
