"""The routes of the data plane, one module a subject.

- `generation.generation_routes`: chats and completions. They are declared here and answered by
  `loraplex.api.generation`.
- `models.router`, `server.router`: what a key may use; the server's version and OpenAPI document.
- `probes.probe_routes`, `metrics.metrics_route`: for both ports.
"""
