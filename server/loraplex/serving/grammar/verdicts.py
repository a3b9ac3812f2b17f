"""Verdicts of grammars that were checked before."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass

ENTRY_BYTES = 256
"""Bytes that an entry takes beside its text."""


@dataclass(frozen=True, slots=True)
class GrammarVerdict:
    """`reason`: why it is refused, None where it is not. `lark`: of an accepted GBNF, what it was converted to."""

    reason: str | None = None
    lark: str = ""

    @property
    def num_bytes(self) -> int:
        return ENTRY_BYTES + len(self.reason or "") + len(self.lark)


class VerdictCache:
    """The latest used verdicts within `max_bytes`. Each tenant has its own, and the tenant that has the most gives its
    oldest away: no tenant can push out those of others."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._of_tenant: dict[str, OrderedDict[bytes, GrammarVerdict]] = {}
        self._bytes_of: dict[str, int] = {}

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def get(self, tenant: str, key: bytes) -> GrammarVerdict | None:
        verdicts = self._of_tenant.get(tenant)
        if verdicts is None or key not in verdicts:
            return None
        verdicts.move_to_end(key)
        return verdicts[key]

    def put(self, tenant: str, key: bytes, verdict: GrammarVerdict) -> None:
        verdicts = self._of_tenant.setdefault(tenant, OrderedDict())
        if key not in verdicts:
            verdicts[key] = verdict
            self._count(tenant, verdict.num_bytes)
        while self._num_bytes > self._max_bytes:
            self._evict(max(self._bytes_of, key=self._bytes_of.__getitem__))

    def _evict(self, tenant: str) -> None:
        verdicts = self._of_tenant[tenant]
        _, oldest = verdicts.popitem(last=False)
        self._count(tenant, -oldest.num_bytes)
        if not verdicts:
            del self._of_tenant[tenant], self._bytes_of[tenant]

    def _count(self, tenant: str, num_bytes: int) -> None:
        self._bytes_of[tenant] = self._bytes_of.get(tenant, 0) + num_bytes
        self._num_bytes += num_bytes


def verdict_key(text: str, *, gbnf: bool) -> bytes:
    return hashlib.blake2b(
        text.encode("utf-8", "replace"), digest_size=16, person=b"gbnf" if gbnf else b""
    ).digest()
