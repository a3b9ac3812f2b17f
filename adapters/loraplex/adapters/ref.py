"""The name of an adapter version in every layer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """One immutable version of one tenant's adapter.

    `digest` (64 hex characters of SHA-256 over the upload) is the identity: the prefix cache, the device
    arena and the artifact store are keyed by it, never by the name. `rank` is the largest rank of any site.
    `invocation`: the token ids that activate it (aLoRA); empty for an adapter that acts on every position.
    """

    tenant_id: str
    name: str
    version: int
    digest: str
    rank: int
    invocation: tuple[int, ...] = ()
