"""Sequences, answers and drafters for tests of guessed tokens."""

from __future__ import annotations

from collections.abc import Sequence as Row
from itertools import count

from loraplex.adapters.ref import AdapterRef
from loraplex.engine.scheduling.drafting import Draft, Drafter
from loraplex.engine.types import EngineRequest, SamplingParams, Sequence

ONE, OTHER = "a" * 64, "b" * 64
MANY_BYTES = 1 << 30
_orders = count()


def drafter(bytes_per_tenant: int = MANY_BYTES, total_bytes: int = MANY_BYTES) -> Drafter:
    return Drafter(bytes_per_tenant=bytes_per_tenant, total_bytes=total_bytes)


def sequence(
    prompt: Row[int],
    outputs: Row[int] = (),
    *,
    tenant: str = "acme",
    digest: str | None = None,
    generated: Row[int] = (),
) -> Sequence:
    order = next(_orders)
    adapter = None if digest is None else AdapterRef(tenant, "forms", 1, digest, 8)
    request = EngineRequest(
        f"r{order}",
        tenant,
        tuple(prompt),
        SamplingParams(max_tokens=4096),
        adapter,
        generated=tuple(generated),
    )
    return Sequence(request, 0.0, order, [*prompt, *generated, *outputs])


def finish(drafts: Drafter, *args: Row[int], tenant: str = "acme", digest: str | None = None) -> None:
    seq = sequence(*args, tenant=tenant, digest=digest)
    drafts.finished(seq)
    drafts.closed(seq)


def tokens_of(draft: Draft | None) -> tuple[int, ...]:
    return () if draft is None else draft.token_ids
