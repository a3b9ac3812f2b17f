"""The image's steps run without a container daemon, and the server that comes of them runs as in a container."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from loraplex.app.settings import Settings
from loraplex.kernels.numba_runtime.probe import probe
from support.deploy.containerfile import read_stages
from support.deploy.scratch_container import ScratchContainer
from support.deploy.scratch_image import ScratchImage, require_namespaces
from support.markdown import ROOT
from support.servers.live_server import TINY_SIZES, write_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STOP_GRACE_S = sum(Settings.model_fields[name].default for name in ("drain_grace", "drain_timeout")) + 10
LATER = 240.0
ADMIN = {"LORAPLEX_ADMIN_TOKEN": "token-of-this-test"}


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> ScratchImage:
    require_namespaces()
    arguments = {"TORCH": "cpu", "EXTRAS": ""}
    return ScratchImage(
        read_stages(ROOT / "Containerfile", arguments), arguments, tmp_path_factory.mktemp("build")
    )


@pytest.fixture(scope="module")
def container(image: ScratchImage, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScratchContainer]:
    """With a model in the image's root, as a folder that is mounted read-only would be. Its kernels are those that need
    not be compiled."""
    write_tiny_model(image.root.folder / "model", positions=4096)
    sizes = {f"LORAPLEX_{name.upper()}": value for name, value in TINY_SIZES.items()}
    given = {
        "LORAPLEX_MODEL": "/model",
        "LORAPLEX_THREADS": "1",
        "LORAPLEX_KERNELS": "torch",
        **sizes,
        **ADMIN,
    }
    with ScratchContainer(image, tmp_path_factory.mktemp("container"), given) as running:
        yield running


def test_every_build_step_for_a_cpu_was_run(image: ScratchImage) -> None:
    steps = "\n".join(image.steps)
    for part in ("pip wheel", "venv /opt/loraplex", "install_torch", "/dist/*.whl", "pip check", "useradd"):
        assert part in steps
    assert 'if [ "$TORCH" = cuda ]; then' in steps, "which installs nothing here"


def test_environment_holds_the_wheel_and_its_requirements_alone(image: ScratchImage) -> None:
    (site,) = (image.root.folder / "opt/loraplex/lib").glob("python*/site-packages")
    assert not (site / "pytest").is_symlink()
    (own,) = (path for path in site.glob("loraplex-*.dist-info") if not path.is_symlink())
    checkout = {
        path.relative_to(ROOT / portion).as_posix()
        for portion in ("server", "adapters", "kernels", "admin", "migrations")
        for path in (ROOT / portion / "loraplex").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    installed = {
        path.relative_to(site).as_posix() for path in (site / "loraplex").rglob("*") if path.is_file()
    }
    assert checkout - installed == set()
    assert (own / "licenses/LICENSE").is_file()
    compiled = {path.name.partition(".")[0] for path in (site / "loraplex").rglob("__pycache__/*.pyc")}
    assert {Path(name).stem for name in checkout if name.endswith(".py")} <= compiled


def test_server_runs_in_a_root_that_cannot_be_written(container: ScratchContainer) -> None:
    """A file that was there before is neither changed nor removed, and none is added."""
    before = files_of(container.image.root.folder)
    container.wait(container.is_healthy, LATER)
    assert container.writable() <= {*container.volumes, "/tmp", "/dev/shm", "/proc"} | {
        f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom")
    }
    status = dict(
        line.split(":\t", 1)
        for line in Path(f"/proc/{container.pid}/status").read_text().splitlines()
        if ":\t" in line
    )
    assert status["Uid"].split() == status["Gid"].split() == ["10001"] * 4
    assert status["Groups"].strip() == ""
    assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0
    assert status["NoNewPrivs"] == "1"
    assert status["NSpid"].split()[-1] == "1"

    # As docs/containers.md says, beside the running server.
    assert container.execute("loraplex", "tenant", "create", "acme").returncode == 0
    made = container.execute("loraplex", "key", "create", "--tenant", "acme")
    assert made.returncode == 0, made.stderr
    asked = container.execute(
        "loraplex",
        "chat",
        "--model",
        "model",
        "--max-tokens",
        "4",
        "Hello",
        LORAPLEX_API_KEY=made.stdout.strip(),
    )
    assert asked.returncode == 0, asked.stderr + container.log()

    # One compiled kernel, in place of all: half a minute.
    compiled = container.execute("python", "-c", f"from {probe.__module__} import probe; probe()")
    assert compiled.returncode == 0, compiled.stderr
    assert "can't be kept" not in compiled.stderr

    assert files_of(container.image.root.folder) == before
    data, cache = (container.volumes[name] for name in ("/var/lib/loraplex", "/var/cache/loraplex"))
    assert (data / "data/loraplex.db").is_file()
    assert any((cache / "loraplex/kernels").rglob("*.nbi")), "no compiled kernel is kept"
    owners = {path.stat().st_uid for volume in (data, cache) for path in volume.rglob("*")}
    assert owners == {10001}


def test_engine_that_dies_leaves_no_zombie(container: ScratchContainer) -> None:
    """Process 1 of a container has to reap its children."""
    container.wait(container.is_healthy, LATER)
    engine = next(
        pid for pid in family(container.pid) if b"--socket" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    os.kill(engine, 9)
    container.wait(lambda: not Path(f"/proc/{engine}").exists(), 30)
    container.wait(container.is_healthy, LATER)
    states = {
        pid: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        for pid in family(container.pid)
    }
    assert "Z" not in states.values(), states


def test_stop_signal_ends_it_within_the_stop_grace(container: ScratchContainer) -> None:
    container.wait(container.is_healthy, LATER)
    begin = time.monotonic()
    assert container.stop(STOP_GRACE_S) == 0, container.log()
    assert time.monotonic() - begin >= Settings.model_fields["drain_grace"].default, "it did not drain"


def files_of(root: Path) -> dict[str, tuple[int, int, int]]:
    return {
        str(path.relative_to(root)): (found.st_mode, found.st_size, found.st_mtime_ns)
        for path in root.rglob("*")
        for found in [path.lstat()]
    }


def family(pid: int) -> list[int]:
    """All descendants of a process."""
    children = [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]
    return children + [found for child in children for found in family(child)]
