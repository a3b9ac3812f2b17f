"""Between the API and the engine: the engines as one, their supervision, and text as tokens. No torch.

`engines.engines.Engines` is the engine as the API sees it. `engines.local.LocalEngine` runs one as a process.
`supervision.engine_supervisor.EngineSupervisor` keeps it alive, and
`supervision.supervisor.EngineProcess` is one life of it. `text.processor.TextProcessor` turns text into tokens and
back. `fair_share.FairShare` divides room between owners, `tenant_threads.TenantThreads` worker threads between tenants.
"""
