"""What the usage journal holds: one record when a request is accepted, one when it has ended.

On disk a record is 4 bytes of length, 4 of CRC-32, both little-endian, and as many bytes of msgpack: an array that
begins with its kind. A length of 0 is where the records of a file end.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import msgspec

_HEADER = struct.Struct("<II")
MAX_RECORD_BYTES = 512
"""More than any record takes: names, ids and digests are bounded."""
BASE = "(base)"
"""In place of an adapter's name: the base model. No adapter can be called so."""
CANCELLED = "cancelled"
"""The status of a request whose client went away."""
INTERRUPTED = "interrupted"
"""The status of a request whose server died; what it had used died with it, and is told as 0."""


class _Request(msgspec.Struct, frozen=True, array_like=True):
    """What both records begin with. `id` is our own and unique; `at` is UTC. `adapter` is `BASE`, `version` 0 and
    `digest` empty for the base model."""

    id: str
    at: datetime
    tenant_id: str
    key_id: str
    adapter: str
    version: int
    digest: str
    endpoint: str
    streamed: bool
    n: int


class Accepted(_Request, frozen=True, array_like=True, tag="a"):
    """A request that may run from `at` on."""

    def ended(
        self,
        at: datetime,
        status: str,
        *,
        prompt_tokens: int = 0,
        cached_tokens: int = 0,
        completion_tokens: int = 0,
        queue_s: float = 0.0,
        first_token_s: float | None = None,
        total_s: float = 0.0,
    ) -> Ended:
        """Its row. See `Ended`."""
        fields: dict[str, Any] = msgspec.structs.asdict(self) | {"at": at}
        return Ended(
            **fields,
            status=status,
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            completion_tokens=completion_tokens,
            queue_s=queue_s,
            first_token_s=first_token_s,
            total_s=total_s,
        )

    def interrupted(self) -> Ended:
        """The row of a request of which nothing is known but that it was accepted."""
        return self.ended(self.at, INTERRUPTED)


class Ended(_Request, frozen=True, array_like=True, tag="e"):
    """The row of a request. `at` is when it ended. `status`: its finish reason, an error's code, `CANCELLED` or
    `INTERRUPTED`. Seconds: in the engine's queue; from arrival to the first token (None: there was none), and to
    the end."""

    status: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    queue_s: float
    first_token_s: float | None
    total_s: float


Record = Accepted | Ended

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


def encode(record: Record) -> bytes:
    payload = _encoder.encode(record)
    assert len(payload) + _HEADER.size <= MAX_RECORD_BYTES, "a field of the ledger is not bounded"
    return _HEADER.pack(len(payload), zlib.crc32(payload)) + payload


def decode_all(data: bytes) -> Iterator[tuple[Record, int]]:
    """The records that `data` begins with, each with the offset of its end. Ends before what is torn or damaged: a
    record that is not whole was never promised to anybody, and nothing was written behind it."""
    offset = 0
    while offset + _HEADER.size <= len(data):
        length, checksum = _HEADER.unpack_from(data, offset)
        end = offset + _HEADER.size + length
        payload = data[offset + _HEADER.size : end]
        if not 0 < length <= MAX_RECORD_BYTES or len(payload) < length or zlib.crc32(payload) != checksum:
            return
        yield _decoder.decode(payload), end
        offset = end
