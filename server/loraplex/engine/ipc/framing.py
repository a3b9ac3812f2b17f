"""Messages as frames in a byte stream: four bytes of length, big-endian, then the message in msgpack."""

from __future__ import annotations

import struct

import msgspec

MAX_FRAME_BYTES = 32 * 1024 * 1024
"""Above any legal frame: a prompt of a million tokens takes 5 MB."""

UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors of msgspec for bytes that are not the message that was asked for."""

_LENGTH = struct.Struct(">I")
HEADER_BYTES = _LENGTH.size
_encoder = msgspec.msgpack.Encoder()


class ProtocolError(Exception):
    """The other side broke the framing, or sent something that is not one of its messages."""


class FrameTooLarge(ProtocolError):
    """A frame above the limit, which is `MAX_FRAME_BYTES` by itself."""


def encode_frame(message: msgspec.Struct) -> bytes:
    """One message as a frame. Raises FrameTooLarge."""
    buffer = bytearray(HEADER_BYTES)
    _encoder.encode_into(message, buffer, HEADER_BYTES)
    length = len(buffer) - HEADER_BYTES
    _check_length(length, MAX_FRAME_BYTES)
    _LENGTH.pack_into(buffer, 0, length)
    return bytes(buffer)


def frame_payload(payload: bytes) -> bytes:
    """An encoded message as a frame. Raises FrameTooLarge."""
    _check_length(len(payload), MAX_FRAME_BYTES)
    return _LENGTH.pack(len(payload)) + payload


def frame_length(header: bytes | bytearray, max_bytes: int = MAX_FRAME_BYTES) -> int:
    """The payload's length from a frame's first 4 bytes. Raises FrameTooLarge."""
    (length,) = _LENGTH.unpack(header)
    _check_length(length, max_bytes)
    return int(length)


def _check_length(length: int, max_bytes: int) -> None:
    if length > max_bytes:
        raise FrameTooLarge(f"a frame of {length} bytes is above the limit of {max_bytes}")


class FrameReader:
    """Cuts a byte stream into payloads of `max_bytes` at most. Holds at most one incomplete frame."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._buffer = bytearray()
        self._max_bytes = max_bytes

    @property
    def num_left(self) -> int:
        """Bytes of a frame that is not whole yet."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads that `data` completes. Raises FrameTooLarge on the header alone."""
        self._buffer += data
        payloads = []
        position = 0
        while len(self._buffer) - position >= HEADER_BYTES:
            start = position + HEADER_BYTES
            end = start + frame_length(self._buffer[position:start], self._max_bytes)
            if len(self._buffer) < end:
                break
            payloads.append(bytes(self._buffer[start:end]))
            position = end
        if position:
            del self._buffer[:position]
        return payloads
