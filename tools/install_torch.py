"""`python tools/install_torch.py CONSTRAINTS [BUILD]`: torch into this Python, the CPU's build where there is no GPU.

BUILD is `auto`, `cpu` or `cuda`. An image is built on a machine that need not have the GPU that will run it: there the
build is named, and another one is not taken in its place.

PyPI's torch for Linux on x86-64 brings CUDA, some gigabytes. The CPU's build has the same version with "+cpu" behind it
and lies in an index of PyTorch's own. pip may be configured for one that has it. If not, uv is asked, which knows
PyTorch's index. Needs nothing but the standard library and pip: `make` runs it first.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

# Compiling all files would take longer than the rest; Python compiles what it imports.
# At a terminal pip shows what it fetches.
QUIET = () if sys.stdout.isatty() else ("--quiet", "--quiet")
PIP = (sys.executable, "-m", "pip", *QUIET, "--disable-pip-version-check", "install", "--no-compile")
UNKNOWN_TO_PIP = "No matching distribution found"
BUILDS = ("auto", "cpu", "cuda")


def main(constraints: Path, build: str = "auto") -> int:
    """The exit code. What is done is said on stdout; what failed, on stderr."""
    if build not in BUILDS:
        print(f"'{build}' is no build of torch: {', '.join(BUILDS)}", file=sys.stderr)
        return 1
    pinned = re.search(r"^torch==(\S+)$", constraints.read_text(), re.MULTILINE)
    if pinned is None:
        print(f"{constraints} has no line 'torch==VERSION'", file=sys.stderr)
        return 1
    version = pinned[1]
    if is_installed(version):
        return 0
    # Only torch: what it needs comes with the rest, in the versions that are pinned.
    alone = (*PIP, "--no-deps")
    if build == "cuda":
        # pip takes the CPU's build for the newer one where an index has both.
        return run(*alone, f"torch=={version},!={version}+cpu").returncode
    if build == "auto" and has_gpu():
        print(f"torch {version} with CUDA, for the GPU of this machine")
        return run(*alone, f"torch=={version}").returncode
    done = run(*alone, f"torch=={version}+cpu", quiet=True)
    if done.returncode == 0 or UNKNOWN_TO_PIP not in done.stderr:
        sys.stderr.write(done.stderr)
        return done.returncode
    failure = install_by_uv(version)
    if failure is None:
        return 0
    reason = f"The CPU's build of torch cannot be had: pip's index has none, and uv says: {failure}"
    if build == "cpu":
        print(reason, file=sys.stderr)
        return 1
    print(
        f"{reason}\nInstalling torch {version} as the index has it; from PyPI that brings CUDA, about 3 GB."
    )
    return run(*alone, f"torch=={version}").returncode


def is_installed(version: str) -> bool:
    """This version, in whatever build."""
    try:
        return importlib.metadata.version("torch").partition("+")[0] == version
    except importlib.metadata.PackageNotFoundError:
        return False


def has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None or Path("/dev/nvidia0").exists()


def install_by_uv(version: str) -> str | None:
    """Why it did not work; None where it did. uv itself is not left behind."""
    with tempfile.TemporaryDirectory() as folder:
        done = run(*PIP, "--target", folder, "uv", quiet=True)
        if done.returncode == 0:
            command = (sys.executable, "-m", "uv", "pip", "install", *QUIET[:1], "--python", sys.executable)
            wanted = ("--torch-backend", "cpu", "--no-deps", f"torch=={version}")
            # uv draws its bars on stderr, and says there too what went wrong.
            done = run(*command, *wanted, quiet=bool(QUIET), environment={"PYTHONPATH": folder})
    if done.returncode == 0:
        return None
    lines = (done.stderr or "").strip().splitlines()
    return (lines or [f"it ended with {done.returncode}"])[-1].strip()


def run(
    *command: str, quiet: bool = False, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`quiet`: what it says on stderr is returned, and shown only by the caller; its bars on stdout are for people."""
    output = subprocess.PIPE if quiet else None
    return subprocess.run(  # noqa: S603 - pip and uv with arguments of ours
        command,
        env={**os.environ, **(environment or {})},
        stdout=None if sys.stdout.isatty() else output,
        stderr=output,
        text=True,
        check=False,
    )


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
