"""The terms that the engine serves a tenant by."""

from __future__ import annotations

from dataclasses import dataclass

from loraplex.adapters.cache.tenant_memory import NO_MEMORY_LIMITS, MemoryLimits


@dataclass(frozen=True, slots=True)
class TenantTerms:
    """The share `weight` of a tenant, and its reserved and maximum adapter memory."""

    weight: float = 1.0
    memory: MemoryLimits = NO_MEMORY_LIMITS


DEFAULT_TERMS = TenantTerms()
"""The terms of a tenant that the engine was told nothing of."""
