"""What a checkpoint's config comes to, kept on the disk for later starts.

transformers reads configs: its defaults, its checks, its computation of RoPE's frequencies are the truth. Importing
what it needs for that takes as long as all else that a small model's start does, and its answer is the same every time.
So the answer is kept, under a digest of everything that it depends on: the bytes of config.json, the length that was
asked for, the versions of transformers and torch, and this package's own sources. Nothing is read in another way.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import msgspec

from loraplex.engine.model.family import DecoderSpec

KEPT_S = 30 * 86400.0
"""How long a plan stays that no start has used."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FusedPlan:
    """A checkpoint of one of `FusedDecoder`'s families. `dtype` is the checkpoint's own, as `torch.dtype` is named;
    tensors whose names begin with one of `unread` belong to other parts of a larger model."""

    spec: DecoderSpec
    dtype: str
    unread: tuple[str, ...]


class KeptPlans:
    """The plans in a directory, of which several processes may make use at once. A file that is damaged counts as
    absent, and a directory that can't be written keeps nothing: both cost no more than the reading."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def find(self, config_json: bytes, max_model_len: int) -> FusedPlan | None:
        """What `keep` was given for the same."""
        path = self._path(config_json, max_model_len)
        try:
            plan = msgspec.json.decode(path.read_bytes(), type=FusedPlan)
            os.utime(path)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return None
        return plan

    def keep(self, config_json: bytes, max_model_len: int, plan: FusedPlan) -> None:
        """Plans that no start has used for `KEPT_S` are removed."""
        encoded = msgspec.json.encode(plan)
        with contextlib.suppress(msgspec.MsgspecError):
            if msgspec.json.decode(encoded, type=FusedPlan) == plan:  # else it would not come back as it is
                self._write(self._path(config_json, max_model_len), encoded)

    def _write(self, path: Path, encoded: bytes) -> None:
        scratch = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            scratch.write_bytes(encoded)
            scratch.replace(path)
        except OSError as error:
            _log.info("the plan of this model cannot be kept in %s: %s", self._directory, error)
        for other in self._directory.glob("plan-*"):
            with contextlib.suppress(OSError):  # another process was first
                if time.time() - other.stat().st_mtime > KEPT_S:
                    other.unlink()

    def _path(self, config_json: bytes, max_model_len: int) -> Path:
        digest = hashlib.sha256(
            f"transformers {version('transformers')} torch {version('torch')} length {max_model_len}\n".encode()
        )
        for source in sorted(Path(__file__).parent.glob("*.py")):
            digest.update(hashlib.sha256(source.read_bytes()).digest())
        digest.update(config_json)
        return self._directory / f"plan-{digest.hexdigest()[:32]}.json"
