"""The wheel and the source distribution: whole, the same, and enough for a bare environment."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from support.markdown import ROOT

pytestmark = pytest.mark.slow

PORTIONS = ("adapters", "admin", "kernels", "migrations", "server")


def build(source: Path, target: str, out: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(out)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, text=True, timeout=120)
    (found,) = out.glob("*.whl" if target == "wheel" else "*.tar.gz")
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, "wheel", tmp_path_factory.mktemp("wheel"))


def members(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/RECORD")}


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    command = ["git", "ls-files", *PORTIONS]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    files = {"/".join(Path(name).parts[1:]) for name in listed if "/loraplex/" in name}
    assert len(files) > 500
    assert files <= members(wheel)
    assert {name.split("/")[0] for name in members(wheel)} == {"loraplex", "loraplex-0.1.0.dist-info"}


def test_the_source_distribution_makes_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(build(ROOT, "sdist", tmp_path)) as packed:
        packed.extractall(tmp_path, filter="data")
    (source,) = (path for path in tmp_path.iterdir() if path.is_dir())
    again = build(source, "wheel", tmp_path / "again")
    assert members(again) == members(wheel)
    first, second = zipfile.ZipFile(wheel), zipfile.ZipFile(again)
    assert all(first.read(name) == second.read(name) for name in members(wheel))


def test_a_bare_environment_runs_what_was_installed(wheel: Path, tmp_path: Path) -> None:
    """The libraries are those of the tests; the package itself comes from the wheel alone."""
    home = tmp_path / "environment"
    venv.create(home)
    pip = [sys.executable, "-m", "pip", "--python", home / "bin/python", "install", "--quiet", "--no-compile"]
    subprocess.run([*pip, "--no-index", "--no-deps", wheel], check=True, capture_output=True, timeout=120)
    (site,) = home.glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def run(*command: str | Path) -> str:
        done = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run(home / "bin/loraplex", "--version").strip() == "loraplex 0.1.0"
    assert "quickstart" in run(home / "bin/loraplex", "--help")
    program = (
        "import loraplex.app.planes as planes\n"
        "from loraplex.migrations.run import upgrade\n"
        "print(planes.__file__, len(upgrade('sqlite:///control.db')) > 5)"
    )
    place, migrated = run(home / "bin/python", "-c", program).split()
    assert Path(place).is_relative_to(home)
    assert migrated == "True"
