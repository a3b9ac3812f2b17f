"""The disk tier of an engine, from its configuration."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from loraplex.engine.config import EngineConfig
from loraplex.engine.execution.kv_cache import KVHostRefused, host_slots
from loraplex.engine.kv.cache import block_bytes
from loraplex.engine.kv.disk_files import DiskFiles, DiskStoreError, DiskStoreHeld, DiskStoreUnusable
from loraplex.engine.kv.disk_store import DiskStore
from loraplex.engine.kv.disk_tier import DiskTier
from loraplex.engine.kv.handed_blocks import PrefixForm
from loraplex.engine.kv.host_blocks import HostBlocks
from loraplex.engine.model.model_plan import ModelPlan
from loraplex.engine.numerics import numerical_build

_LEAST_SECRET = 16
_MOST_FOLDERS = 64
_log = logging.getLogger(__name__)


def check_disk(config: EngineConfig) -> None:
    """Raises KVHostRefused and DiskStoreError as `open_disk` does, before all that takes long."""
    if config.kv_disk_dir is None:
        return
    if not config.kv_host_memory:
        raise KVHostRefused("--kv-disk keeps what passes through host memory: set --kv-host-memory too")
    secret = _secret(config)
    with suppress(DiskStoreUnusable):  # a warning of `open_disk`
        DiskFiles(Path(config.kv_disk_dir) / str(config.kv_disk_number), secret).close()


def check_prefixes(config: EngineConfig, plan: ModelPlan) -> None:
    """Raise KVMemoryTooSmall where host memory behind the KV cache has no room for the prefixes of a planned model."""
    if config.kv_host_memory:
        host_slots(config.kv_host_memory, plan.shape.caches, plan.kv_dtype)


def prefix_form(config: EngineConfig, plan: ModelPlan, library: str, fingerprint: str) -> PrefixForm:
    """The form of the blocks of a planned model whose base has this fingerprint. `library` as of `numerical_build`.
    Another build has another form: neither the bits of blocks nor their layout need be the same."""
    one = block_bytes(plan.shape.caches, plan.kv_dtype)
    build = "\n".join(
        (
            f"{fingerprint} {config.quantise} {plan.dtype} {plan.kv_dtype} {one}",
            repr(plan.shape.caches),
            numerical_build(plan, library),
        )
    )
    return PrefixForm(hashlib.sha256(build.encode()).hexdigest(), one)


def open_disk(
    config: EngineConfig,
    form: PrefixForm,
    host_blocks: HostBlocks | None,
    wake: Callable[[], None],
) -> DiskTier | None:
    """The tier behind `host_blocks` in `kv_disk_dir`, for blocks of this form; None where there is no such folder, and,
    with a warning, where the disk fails. `wake` as of `DiskTier`. It takes the folder `kv_disk_number`, or else the
    first that no other engine has. Raises DiskStoreError for a secret or a directory that is another."""
    if config.kv_disk_dir is None or host_blocks is None:
        return None
    try:
        store = _open(config, form.piece_bytes, bytes.fromhex(form.name))
    except DiskStoreUnusable as error:
        _log.warning("%s; until its next start the engine keeps no prefixes on a disk", error.message)
        return None
    disk = DiskTier(store, form.piece_bytes, wake)
    host_blocks.keep = disk.put
    return disk


def _open(config: EngineConfig, block: int, build: bytes) -> DiskStore:
    assert config.kv_disk_dir is not None
    secret = _secret(config)
    held: DiskStoreHeld | None = None
    for number in dict.fromkeys((config.kv_disk_number, *range(_MOST_FOLDERS))):
        try:
            return DiskStore(
                Path(config.kv_disk_dir) / str(number),
                max_bytes=config.kv_disk_bytes,
                block_bytes=block,
                build=build,
                secret=secret,
            )
        except DiskStoreHeld as error:
            held = error
    assert held is not None
    raise held


def _secret(config: EngineConfig) -> bytes | None:
    return None if config.kv_disk_key_file is None else _read_secret(Path(config.kv_disk_key_file))


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
