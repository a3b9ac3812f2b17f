"""vLLM's source package, from the package index that pip knows: only its tests of the HTTP entrypoints."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

VERSION = "0.32.0"
WANTED = ("tests/__init__.py", "tests/entrypoints/", "tests/tool_use/")
NOT_BUILT = """\
from pathlib import Path


def get_requires_for_build_wheel(config_settings=None):
    return []


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    info = Path(metadata_directory) / "vllm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\\nName: vllm\\nVersion: {version}\\n")
    return info.name
"""
"""A build backend under setuptools' name. pip asks a source package for its metadata before it keeps it; vLLM's own
backend would want torch, and run code, for nothing."""


def vllm_source(work: Path) -> Path:
    """The unpacked source, fetched once: a folder with `tests` in it."""
    source = work / f"vllm-{VERSION}"
    if (source / "tests" / "entrypoints").is_dir():
        return source
    backend = work / "no-build" / "setuptools"
    backend.mkdir(parents=True, exist_ok=True)
    (backend / "__init__.py").write_text("")
    (backend / "build_meta.py").write_text(NOT_BUILT.format(version=VERSION))
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    command += ["--no-binary", "vllm", "--no-build-isolation", "--dest", str(work), f"vllm=={VERSION}"]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(backend.parent)}, timeout=600)
    with tarfile.open(work / f"vllm-{VERSION}.tar.gz") as archive:
        members = [
            member
            for member in archive
            if member.isreg() and member.name.removeprefix(f"vllm-{VERSION}/").startswith(WANTED)
        ]
        archive.extractall(work, members, filter="data")
    return source
