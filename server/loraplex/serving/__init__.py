"""Between the API and the engine: clients of the engine, its supervision, and text as tokens. No torch.

`client.engine_client.EngineClient` is the engine as the API sees it. `client.socket_client.SocketEngineClient` runs the
engine as a process. `supervision.engine_supervisor.EngineSupervisor` keeps it alive, and
`supervision.supervisor.EngineProcess` is one life of it. `text.processor.TextProcessor` turns text into tokens and
back. `fair_share.FairShare` divides room between owners, `tenant_threads.TenantThreads` worker threads between tenants.
"""
