"""The control plane: tenants, keys, adapters, releases, limits, usage and the audit log, over one database.

`db.database.Database` runs transactions. `tenancy.keys.Keys` and `tenancy.key_cache.KeyCache` authenticate callers.
`catalog.resolver.Resolver` says what a model name stands for. `limits.service.RequestLimits` charges a request, and
`usage.journal.UsageJournal` records what it used.
"""
