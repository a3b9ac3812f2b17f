"""The disk tier of an engine, from its configuration."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from loraplex.engine.config import EngineConfig
from loraplex.engine.execution.kv_cache import KVHostRefused
from loraplex.engine.kv.cache import block_bytes
from loraplex.engine.kv.disk_files import DiskStoreError, DiskStoreHeld
from loraplex.engine.kv.disk_store import DiskStore
from loraplex.engine.kv.disk_tier import DiskTier
from loraplex.engine.kv.host_blocks import HostBlocks
from loraplex.engine.model.model_plan import ModelPlan
from loraplex.engine.numerics import numerical_build

_LEAST_SECRET = 16


def open_disk(
    config: EngineConfig,
    plan: ModelPlan,
    library: str,
    fingerprint: str,
    host_blocks: HostBlocks | None,
    wake: Callable[[], None],
) -> DiskTier | None:
    """The tier behind `host_blocks` in `kv_disk_dir`, for a planned model whose base has this fingerprint; None where
    there is no such folder. `library` and `wake` as of `numerical_build` and `DiskTier`. Of the folders that engines of
    one machine share it takes the first that none has. Raises KVHostRefused without host memory, DiskStoreError for a
    folder or a secret that cannot be used."""
    if config.kv_disk_dir is None:
        return None
    if host_blocks is None:
        raise KVHostRefused("--kv-disk keeps what passes through host memory: set --kv-host-memory too")
    one = block_bytes(plan.shape.caches, plan.kv_dtype)
    # Another build finds none of them: neither their bits nor their layout need be the same.
    build = "\n".join(
        (
            f"{fingerprint} {config.quantise} {plan.dtype} {plan.kv_dtype} {one}",
            repr(plan.shape.caches),
            numerical_build(plan, library),
        )
    )
    secret = None if config.kv_disk_key_file is None else _read_secret(Path(config.kv_disk_key_file))
    for number in range(config.num_sharing):
        try:
            store = DiskStore(
                Path(config.kv_disk_dir) / str(number),
                max_bytes=config.kv_disk_bytes,
                block_bytes=one,
                build=hashlib.sha256(build.encode()).digest(),
                secret=secret,
            )
            break
        except DiskStoreHeld:
            if number == config.num_sharing - 1:
                raise
    disk = DiskTier(store, one, wake)
    host_blocks.keep = disk.put
    return disk


def _read_secret(path: Path) -> bytes:
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise DiskStoreError(f"--kv-disk: the key file {path} cannot be read ({error.strerror})") from error
    if len(secret) < _LEAST_SECRET:
        raise DiskStoreError(
            f"--kv-disk: the key file {path} has {len(secret)} bytes; write {_LEAST_SECRET} random ones or more into it"
        )
    return secret
