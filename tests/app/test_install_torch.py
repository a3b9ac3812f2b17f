"""Which build of torch `make` installs, from an index made here."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "install_torch.py"
VERSION = "2.99.0"
UV = """
import os, pathlib, sys
pathlib.Path(os.environ["UV_SAID"]).write_text(" ".join(sys.argv[1:]))
if os.environ["UV_FAILS"] == "yes":
    sys.exit("error: failed to fetch\\n  cause: dns error")
"""


@dataclass
class Bench:
    index: Path
    target: Path
    uv_said: Path

    def offer(self, name: str, version: str, module: str = "") -> None:
        """A wheel into the index."""
        info = f"{name}-{version}.dist-info"
        with zipfile.ZipFile(self.index / f"{name}-{version}-py3-none-any.whl", "w") as archive:
            archive.writestr(f"{name}/__init__.py", "")
            archive.writestr(f"{name}/__main__.py", module)
            archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            archive.writestr(
                f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            archive.writestr(f"{info}/RECORD", "")

    def install(self, *build: str) -> subprocess.CompletedProcess[str]:
        constraints = self.index.with_name("constraints.txt")
        constraints.write_text(f"# pins\ntorch=={VERSION}\nnumpy==2.4.6\n")
        command = [sys.executable, str(SCRIPT), str(constraints), *build]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def installed(self) -> list[str]:
        return sorted(path.name.removesuffix(".dist-info") for path in self.target.glob("*.dist-info"))


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Without a GPU: PATH has no nvidia-smi."""
    made = Bench(tmp_path / "index", tmp_path / "target", tmp_path / "uv-said")
    made.index.mkdir()
    made.target.mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    # A machine may cap torch's version for all of its users.
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(made.index))
    monkeypatch.setenv("PIP_TARGET", str(made.target))
    monkeypatch.setenv("UV_SAID", str(made.uv_said))
    monkeypatch.setenv("UV_FAILS", "no")
    made.offer("torch", VERSION)
    if Path("/dev/nvidia0").exists():
        pytest.skip("there is a GPU here")
    return made


def test_index_with_a_cpu_build(bench: Bench) -> None:
    bench.offer("torch", f"{VERSION}+cpu")
    bench.offer("uv", "1.0", UV)
    done = bench.install()
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert bench.installed() == [f"torch-{VERSION}+cpu"]
    assert not bench.uv_said.exists()


def test_index_without_one_asks_uv(bench: Bench) -> None:
    bench.offer("uv", "1.0", UV)
    done = bench.install()
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    said = bench.uv_said.read_text()
    assert said.startswith("pip install")
    assert f"--python {sys.executable} --torch-backend cpu --no-deps torch=={VERSION}" in said
    assert bench.installed() == [], "neither uv, which is needed once, nor the larger build"


def test_larger_build_is_announced_without_uv(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    for said in ("No matching distribution found for uv", "cause: dns error"):
        done = bench.install()
        assert done.returncode == 0, done.stderr
        assert said in done.stdout
        assert "brings CUDA, about 3 GB" in done.stdout
        assert bench.installed() == [f"torch-{VERSION}"]
        bench.offer("uv", "1.0", UV)
        monkeypatch.setenv("UV_FAILS", "yes")


def test_machine_with_a_gpu(bench: Bench, tmp_path: Path) -> None:
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    done = bench.install()
    assert done.returncode == 0, done.stderr
    assert "with CUDA" in done.stdout
    assert bench.installed() == [f"torch-{VERSION}"]


def test_build_for_a_gpu_can_be_named_where_there_is_none(bench: Bench) -> None:
    bench.offer("torch", f"{VERSION}+cpu")
    done = bench.install("cuda")
    assert done.returncode == 0, done.stderr
    assert bench.installed() == [f"torch-{VERSION}"]


def test_named_build_for_the_cpu_is_not_replaced_by_a_larger_one(bench: Bench) -> None:
    done = bench.install("cpu")
    assert done.returncode == 1
    assert "The CPU's build of torch cannot be had" in done.stderr
    assert bench.installed() == []
    bench.offer("torch", f"{VERSION}+cpu")
    assert bench.install("cpu").returncode == 0
    assert bench.installed() == [f"torch-{VERSION}+cpu"]


def test_unknown_build_is_refused(bench: Bench) -> None:
    done = bench.install("rocm")
    assert (done.returncode, done.stderr) == (1, "'rocm' is no build of torch: auto, cpu, cuda\n")


def test_other_failures_are_shown_and_end_it(bench: Bench, tmp_path: Path) -> None:
    bench.offer("torch", f"{VERSION}+cpu")
    (bench.index / f"torch-{VERSION}+cpu-py3-none-any.whl").write_bytes(b"cut off")
    done = bench.install()
    assert done.returncode == 1
    assert "invalid" in done.stderr
    assert not bench.installed()


@pytest.mark.parametrize("at_a_terminal", [True, False])
def test_pip_shows_what_it_fetches_at_a_terminal_only(at_a_terminal: bool) -> None:
    """Elsewhere make's own lines are enough. Nothing is installed: `--dry-run`."""
    make = ["make", "--dry-run", "--always-make", ".venv/.installed"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        make,
        cwd=SCRIPT.parents[1],
        env=environment,
        stdout=theirs if at_a_terminal else subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        os.close(theirs)
        said = b""
        if process.stdout is not None:
            said = process.stdout.read()
        else:
            with contextlib.suppress(OSError):  # how a terminal says that nobody writes to it any more
                while piece := os.read(ours, 1 << 16):
                    said += piece
        assert process.wait() == 0
    os.close(ours)
    (line,) = [line for line in said.decode().splitlines() if "pip install" in line]
    assert ("--quiet" in line) is not at_a_terminal
