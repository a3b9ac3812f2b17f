"""What a bad disk does to an artifact."""

from __future__ import annotations

from pathlib import Path


def flip_a_bit(folder: Path) -> None:
    """The last bit of an adapter's tensors."""
    path = folder / "adapter_model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
