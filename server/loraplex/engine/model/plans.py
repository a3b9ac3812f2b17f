"""The plan made of a checkpoint's config, kept on the disk for later starts.

transformers reads configs: its defaults, its checks, its computation of RoPE's frequencies are the truth. Importing
what it needs for that takes as long as all else that a small model's start does, and its answer is the same every time.
So the answer is kept, under a digest of everything that it depends on: the bytes of config.json, the length that was
asked for, the versions of transformers and torch, and the sources of this package and of the tables of families that
admission reads too. Nothing is read in another way.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import msgspec

from loraplex.adapters.admission import base_families, model_parts
from loraplex.engine.model.family import DecoderSpec

KEPT_S = 30 * 86400.0
"""How long a plan stays that no start has used."""
MAX_BYTES = 1 << 20
"""No plan is longer: those of the largest models come to some tens of kilobytes."""
_SUM_BYTES = hashlib.sha256().digest_size
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReadConfig:
    """A checkpoint of one of `FusedDecoder`'s families. `dtype` is the checkpoint's own, as `torch.dtype` is named;
    tensors whose names begin with one of `unread` belong to other parts of a larger model."""

    spec: DecoderSpec
    dtype: str
    unread: tuple[str, ...]


class KeptPlans:
    """The plans in a directory, which several processes may use at once.

    A plan decides what the model computes, so a file counts only if it is this user's own, no other user may write to
    it and it is to the byte what was kept for this config. Anything else counts as absent, and a directory that can't
    be written keeps nothing: both cost no more than the reading.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def find(self, config_json: bytes, max_model_len: int) -> ReadConfig | None:
        """The plan that `save_plan` got for the same arguments."""
        path = self._path(config_json, max_model_len)
        try:
            kept = _read_own(path)
            encoded = kept[_SUM_BYTES:]
            if kept[:_SUM_BYTES] != _checksum(path, encoded):
                return None
            plan = msgspec.json.decode(encoded, type=ReadConfig)
            os.utime(path)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return None
        return plan

    def save_plan(self, config_json: bytes, max_model_len: int, plan: ReadConfig) -> None:
        """Plans that no start has used for `KEPT_S` are removed."""
        encoded = msgspec.json.encode(plan)
        with contextlib.suppress(msgspec.MsgspecError):
            if msgspec.json.decode(encoded, type=ReadConfig) == plan:  # else it would not come back as it is
                self._write(self._path(config_json, max_model_len), encoded)

    def _write(self, path: Path, encoded: bytes) -> None:
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            # A name that cannot be guessed, and a file that was not there: where others may write to the directory,
            # a link of theirs is not followed.
            descriptor, scratch = tempfile.mkstemp(prefix="plan-", suffix=".tmp", dir=self._directory)
            try:
                with open(descriptor, "wb") as file:
                    file.write(_checksum(path, encoded) + encoded)
                os.replace(scratch, path)
            except OSError:
                os.unlink(scratch)
                raise
        except OSError as error:
            _log.info("the plan of this model cannot be kept in %s: %s", self._directory, error)
        for other in self._directory.glob("plan-*"):
            with contextlib.suppress(OSError):  # another process was first
                if time.time() - other.lstat().st_mtime > KEPT_S:
                    other.unlink()

    def _path(self, config_json: bytes, max_model_len: int) -> Path:
        digest = hashlib.sha256(
            f"transformers {version('transformers')} torch {version('torch')} length {max_model_len}\n".encode()
        )
        tables = Path(base_families.__file__), Path(model_parts.__file__)
        for source in (*sorted(Path(__file__).parent.rglob("*.py")), *tables):
            digest.update(hashlib.sha256(source.read_bytes()).digest())
        digest.update(config_json)
        return self._directory / f"plan-{digest.hexdigest()[:32]}.json"


def _checksum(path: Path, encoded: bytes) -> bytes:
    """`_SUM_BYTES` bytes. The name is in it too, as it says what the plan is of: a file renamed is another's plan."""
    return hashlib.sha256(path.name.encode() + b"\n" + encoded).digest()


def _read_own(path: Path) -> bytes:
    """Raises OSError for what this user has not written: a link, a device, a pipe (none is waited for), another user's
    file, one that others may write to, one of more than `MAX_BYTES`."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        found = os.fstat(file.fileno())
        own = found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if not (stat.S_ISREG(found.st_mode) and own and found.st_size <= MAX_BYTES):
            raise OSError(f"{path} is not a plan of this user's own")
        return file.read(MAX_BYTES)
