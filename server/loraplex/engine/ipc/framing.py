"""Messages as frames in a byte stream: four bytes of length, big-endian, then the message in msgpack."""

from __future__ import annotations

import struct

import msgspec

MAX_FRAME_BYTES = 32 * 1024 * 1024
"""Above any legal frame: a prompt of a million tokens takes 5 MB."""

_LENGTH = struct.Struct(">I")
HEADER_BYTES = _LENGTH.size
_encoder = msgspec.msgpack.Encoder()


class ProtocolError(Exception):
    """The other side broke the framing, or sent something that is not one of its messages."""


class FrameTooLarge(ProtocolError):
    """A frame above `MAX_FRAME_BYTES`."""


def encode_frame(message: msgspec.Struct) -> bytes:
    """One message as a frame. Raises FrameTooLarge."""
    buffer = bytearray(HEADER_BYTES)
    _encoder.encode_into(message, buffer, HEADER_BYTES)
    length = len(buffer) - HEADER_BYTES
    if length > MAX_FRAME_BYTES:
        raise FrameTooLarge(f"a frame of {length} bytes is above the limit of {MAX_FRAME_BYTES}")
    _LENGTH.pack_into(buffer, 0, length)
    return bytes(buffer)


def frame_length(header: bytes | bytearray) -> int:
    """The payload's length from a frame's first 4 bytes. Raises FrameTooLarge."""
    (length,) = _LENGTH.unpack(header)
    if length > MAX_FRAME_BYTES:
        raise FrameTooLarge(f"a frame of {length} bytes is above the limit of {MAX_FRAME_BYTES}")
    return int(length)


class FrameReader:
    """Cuts a byte stream into payloads. Holds at most one incomplete frame."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads that `data` completes. Raises FrameTooLarge on the header alone."""
        self._buffer += data
        payloads = []
        position = 0
        while len(self._buffer) - position >= HEADER_BYTES:
            start = position + HEADER_BYTES
            end = start + frame_length(self._buffer[position:start])
            if len(self._buffer) < end:
                break
            payloads.append(bytes(self._buffer[start:end]))
            position = end
        if position:
            del self._buffer[:position]
        return payloads
