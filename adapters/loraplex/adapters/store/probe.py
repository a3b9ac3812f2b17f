"""A small object of random content, by which two processes find out whether they use the same store.

The writer tells its name, the reader answers with its content, which nobody can know who cannot read that store.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass

from loraplex.adapters.store.files import CONFIG_NAME, digest_upload
from loraplex.adapters.store.interface import Store

SECRET_BYTES = 32
MAX_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Probe:
    """`digest` is its name in the store."""

    digest: str
    content: bytes


def write_probe(store: Store) -> Probe:
    """Put a new one into the store, as an artifact that no version has: a sweep removes it. Raises StoreFull,
    StoreFailed, OSError."""
    content = json.dumps({"loraplex_probe": secrets.token_hex(SECRET_BYTES)}).encode()
    with store.begin_staging() as staging:
        staging.config_path.write_bytes(content)
        staging.tensors_path.write_bytes(b"")
        digest = digest_upload(staging.config_path, staging.tensors_path)
        store.commit(staging, digest)
    return Probe(digest, content)


def read_probe(store: Store, digest: str) -> bytes:
    """The content of the probe of this name. Raises ArtifactMissing, ArtifactUnreadable, OSError."""
    with open(store.path(digest) / CONFIG_NAME, "rb") as file:
        return file.read(MAX_BYTES)
