"""Records of the usage journal: one record when a request is accepted, one when it has ended.

On disk a record is 4 bytes of length, 4 of CRC-32, both little-endian, and as many bytes of msgpack: an array that
begins with its kind. Zeros are room that nothing was written to.
"""

from __future__ import annotations

import re
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
    """The first fields of both records. `id` is our own and unique; `at` is UTC. `adapter` is `BASE`, `version` 0 and
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
    """A request that may run from `at` on. `key_hash`: see `Ended`."""

    key_hash: int = 0

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
        """The row of a request that was accepted, and whose end is not known."""
        return self.ended(self.at, INTERRUPTED)


class Ended(_Request, frozen=True, array_like=True, tag="e"):
    """The row of a request. `at` is when it ended. `status`: its finish reason, an error's code, `CANCELLED` or
    `INTERRUPTED`. Seconds: in the engine's queue; from arrival to the first token (None: there was none), and to
    the end. `key_hash`, 64 bits, is of the key by which a release chose the version (`outcome.key_hash`); 0 where the
    request named its version, and in records that were written before there was one."""

    status: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    queue_s: float
    first_token_s: float | None
    total_s: float
    key_hash: int = 0


Record = Accepted | Ended

_LENGTH = re.compile(rb"(?:[^\x00][\x00\x01]|\x00\x01)\x00\x00", re.DOTALL)
"""A record's length, 1 to `MAX_RECORD_BYTES`, as its header has it. Zeros are none, and are passed at once."""
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


def encode(record: Record) -> bytes:
    payload = _encoder.encode(record)
    assert len(payload) + _HEADER.size <= MAX_RECORD_BYTES, "a field of the ledger is not bounded"
    return _HEADER.pack(len(payload), zlib.crc32(payload)) + payload


def decode_all(data: bytes) -> Iterator[tuple[Record, int, int]]:
    """The records in `data`, each with the offsets of its begin and its end. What is torn or damaged is passed over,
    and what is whole behind it is read: its checksum says that it was written so. Raises msgspec.ValidationError for a
    whole record of a kind that this version does not know."""
    end = 0
    while (found := _LENGTH.search(data, end)) is not None:
        begin = found.start()
        payload = _payload(data, begin)
        if payload is None:
            end = begin + 1
        else:
            end = begin + _HEADER.size + len(payload)
            yield _decoder.decode(payload), begin, end


def _payload(data: bytes, begin: int) -> bytes | None:
    """The payload of the record that begins there; None if none does, or a part of it is missing."""
    start = begin + _HEADER.size
    if start > len(data):
        return None
    length, checksum = _HEADER.unpack_from(data, begin)
    payload = data[start : start + length]
    return payload if len(payload) == length and zlib.crc32(payload) == checksum else None
