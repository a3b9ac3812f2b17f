"""One generation request, from its key to its last byte.

- `endpoints.GenerationEndpoint`: the steps of a request, in order, on one page.
- `planning.make_plan`: what is asked of the engine. `generation.Generation`: the choices while the engine makes them.
- `charge.Charge`, `usage_entry.UsageEntry`: its limits, and its line in the usage ledger.
- `loraplex.api.outcome.RequestOutcome`: how it ended, built once by `Generation.outcome`.
- `tenant_capacity.TenantCapacity`: how much of this process one tenant may take.
- `client_watch.ClientWatch`, `deadline.Deadline`: what ends a request early.
"""
