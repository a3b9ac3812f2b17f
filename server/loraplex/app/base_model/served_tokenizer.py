"""The tokenizer that serves, of two readings of a model's files: tokenizer.json as it lies, or as transformers does.

transformers 5 writes normalizer and pre-tokenizer of some classes again (Llama's, Qwen2's, GPT-2's and others),
whatever tokenizer.json says. What it makes is kept in the user's cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import structlog

from loraplex.app.base_model.rebuilt_tokenizer import FOUND, TOKENIZER, Reading
from loraplex.app.base_model.source import ensure_model, kept_dir
from loraplex.app.settings import Settings

TokenizerChoice = Literal["transformers", "file"]
_FORMAT = 2
"""A number that changes with what is kept of a reading."""
_READ = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
)  # fmt: skip
"""Files that decide how transformers reads a tokenizer."""
_WEIGHTS = frozenset({".safetensors", ".bin", ".gguf", ".pt"})
_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class ServedTokenizer:
    """A tokenizer as it is served. `model_dir`: the model's directory, or one over it with transformers' tokenizer.
    `name` is transformers' class. `warning`: one line where the two readings differ, or transformers does not read
    the files; else ""."""

    model_dir: Path
    name: str
    warning: str


def served_model(settings: Settings, progress: Callable[[str], None]) -> Path:
    """The directory of the base model with the tokenizer that serves; logs where its two readings differ. Raises
    ModelUnavailable, OSError."""
    found = serve_tokenizer(
        ensure_model(settings.model, progress), settings.tokenizer, settings.data_dir.resolve()
    )
    if found.warning:
        structlog.get_logger("loraplex").warning("tokenizer_differs", reason=found.warning)
    return found.model_dir


def serve_tokenizer(model_dir: Path, choice: TokenizerChoice, data_dir: Path) -> ServedTokenizer:
    """Raises OSError where neither the user's cache nor `data_dir` can be written."""
    if not (model_dir / TOKENIZER).is_file():
        return ServedTokenizer(model_dir, "", "")
    kept = kept_dir("tokenizers", data_dir)
    digest = _digest(model_dir)
    reading = _reading(model_dir, kept / digest)
    if reading.failure:
        warning = (
            f"tokenizer.json serves as it lies, for transformers cannot read the tokenizer: {reading.failure}"
        )
        return ServedTokenizer(model_dir, "", warning)
    if not reading.difference:
        return ServedTokenizer(model_dir, reading.name, reading.note)
    note = f"{reading.note}. " if reading.note else ""
    told = f"{note}{reading.difference}. --tokenizer {choice} serves"
    if choice == "file":
        return ServedTokenizer(
            model_dir, reading.name, f"{told}; adapters that transformers trained saw the others"
        )
    return ServedTokenizer(_over(model_dir, kept / digest), reading.name, f"{told}, as adapters are trained")


def _digest(model_dir: Path) -> str:
    """The digest of all that decides a reading: the files and the libraries."""
    names = sorted(path.name for path in model_dir.iterdir() if path.suffix not in _WEIGHTS)
    of = [_FORMAT, version("transformers"), version("tokenizers"), names]
    digest = hashlib.sha256(json.dumps(of).encode())
    for path in (model_dir / name for name in _READ):
        content = path.read_bytes() if path.is_file() else b""
        digest.update(f"\n{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def _reading(model_dir: Path, kept: Path) -> Reading:
    """The reading that a process makes, or has made before."""
    if not (kept / FOUND).is_file():
        with tempfile.TemporaryDirectory(dir=kept.parent, prefix=".read-") as scratch:
            made = Path(scratch) / "made"
            made.mkdir()
            command = [
                sys.executable,
                "-m",
                "loraplex.app.base_model.rebuilt_tokenizer",
                str(model_dir),
                str(made),
            ]
            try:
                subprocess.run(command, check=True, capture_output=True, timeout=_TIMEOUT_S)  # noqa: S603 - ours
            except subprocess.TimeoutExpired:
                return Reading(failure=f"it was not read within {_TIMEOUT_S:.0f} s")
            except subprocess.CalledProcessError as error:
                lines = error.stderr.decode("utf-8", "replace").strip().splitlines()
                return Reading(failure=lines[-1] if lines else f"its process ended with {error.returncode}")
            _rename(made, kept)
    return Reading(**json.loads((kept / FOUND).read_bytes()))


def _over(model_dir: Path, kept: Path) -> Path:
    """A directory of links to a model's files, with transformers' tokenizer in place of its own."""
    names = sorted(path.name for path in model_dir.iterdir())
    key = hashlib.sha256(json.dumps([str(model_dir), names]).encode()).hexdigest()[:12]
    target = kept / key / model_dir.name
    if not target.is_dir():
        target.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".made-") as scratch:
            made = Path(scratch) / "made"
            made.mkdir()
            for name in names:
                if name == TOKENIZER:
                    shutil.copy(kept / TOKENIZER, made)
                else:
                    (made / name).symlink_to(model_dir / name)
            _rename(made, target)
    return target


def _rename(made: Path, target: Path) -> None:
    """Move a folder to its place, where another process may have been first."""
    try:
        os.rename(made, target)
    except OSError:
        if not target.is_dir():
            raise
