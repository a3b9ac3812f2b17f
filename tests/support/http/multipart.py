"""Multipart bodies written byte by byte, well-formed or broken on purpose."""

from __future__ import annotations

from collections.abc import Iterator

BOUNDARY = "loraplex-test-boundary"
CONTENT_TYPE = f"multipart/form-data; boundary={BOUNDARY}"


def part(name: str, data: bytes, *, filename: str | None = None, headers: bytes = b"") -> bytes:
    """One part with its leading boundary."""
    disposition = f'Content-Disposition: form-data; name="{name}"'
    if filename is not None:
        disposition += f'; filename="{filename}"'
    return b"--%s\r\n%s\r\n%s\r\n%s\r\n" % (BOUNDARY.encode(), disposition.encode(), headers, data)


def body(*parts: bytes) -> bytes:
    return b"".join(parts) + end()


def end() -> bytes:
    return b"--%s--\r\n" % BOUNDARY.encode()


def files(config: bytes, tensors: bytes) -> bytes:
    """A body as a client sends an adapter's two files."""
    return body(
        part("adapter_config.json", config, filename="adapter_config.json"),
        part("adapter_model.safetensors", tensors, filename="adapter_model.safetensors"),
    )


def in_pieces(data: bytes, size: int) -> Iterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]
