"""The Containerfile is linted, and agrees with the settings, the checkout and constraints.txt."""

from __future__ import annotations

import re
import subprocess
import sysconfig
from pathlib import Path

import pytest

from loraplex.app.settings import Settings
from support.deploy.containerfile import (
    SECRET_VARIABLES,
    SETTING_VARIABLES,
    Copy,
    IgnoreFile,
    image_chain,
    image_config,
    read_stages,
)
from support.deploy.packages import needed_packages, normal_name
from support.markdown import ROOT

FILE = ROOT / "Containerfile"
KINDS = ("cpu", "cuda")


def test_linter_finds_nothing() -> None:
    hadolint = Path(sysconfig.get_path("scripts")) / "hadolint"
    done = subprocess.run(
        [hadolint, "--no-color", FILE], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_base_images_have_a_tag_that_names_version_and_distribution() -> None:
    for kind in KINDS:
        stages = read_stages(FILE, {"TORCH": kind})
        own = {stage.name for stage in stages}
        bases = {stage.base for stage in stages} - own
        assert len(bases) == 1
        assert re.fullmatch(r"python:\d+\.\d+-slim-[a-z]+(@sha256:[0-9a-f]{64})?", bases.pop())


def test_build_argument_pins_the_base_image() -> None:
    given = "python:3.11-slim-bookworm@sha256:" + "0" * 64
    stages = read_stages(FILE, {"PYTHON_IMAGE": given})
    assert image_chain(stages)[0].base == given


def test_every_copied_file_exists_and_goes_to_the_build() -> None:
    ignore = IgnoreFile((ROOT / ".dockerignore").read_text())
    for stage in read_stages(FILE):
        for copy in map(Copy.parse, stage.values("COPY")):
            for name in () if copy.stage else copy.sources:
                assert (ROOT / name).exists(), name
                assert ignore.sends(name), name


def test_nothing_else_goes_to_the_build() -> None:
    ignore = IgnoreFile((ROOT / ".dockerignore").read_text())
    copied = {
        name
        for stage in read_stages(FILE)
        for copy in map(Copy.parse, stage.values("COPY"))
        if not copy.stage
        for name in copy.sources
    }
    for name in (
        "data/admin-token",
        "deploy/compose/secrets/loraplex.toml",
        ".git/config",
        "tests/conftest.py",
    ):
        assert not ignore.sends(name)
    sent = {path.name for path in ROOT.iterdir() if ignore.sends(path.name)}
    assert sent <= {name.partition("/")[0] for name in copied}
    assert not ignore.sends("server/loraplex/app/__pycache__/cli.cpython-311.pyc")


def test_ignore_file_is_read_as_engines_read_it() -> None:
    ignore = IgnoreFile("# all\n*\n!docs\ndocs/*.md\n!docs/README.md\n**/build")
    assert not ignore.sends("secret")
    assert ignore.sends("docs/images/a.svg")
    assert not ignore.sends("docs/api.md")
    assert ignore.sends("docs/README.md")
    assert not ignore.sends("docs/build/index.html")


@pytest.mark.parametrize("kind", KINDS)
def test_image_says_what_the_settings_say(kind: str) -> None:
    config = image_config(read_stages(FILE, {"TORCH": kind}))
    fields = Settings.model_fields
    named = {name for name in config.environment if name.startswith("LORAPLEX_")}
    assert named <= SETTING_VARIABLES
    settings = Settings(
        **{name.removeprefix("LORAPLEX_").lower(): config.environment[name] for name in named}
    )
    assert config.ports == [settings.port, settings.admin_port] == [fields["port"].default, 8001]
    assert settings.host == "0.0.0.0"
    assert settings.admin_host == "127.0.0.1", "the admin plane is opened by who runs the image"
    assert any(settings.data_dir.is_relative_to(volume) for volume in config.volumes)
    assert config.environment["XDG_CACHE_HOME"] in config.volumes
    assert config.environment["HOME"] in config.volumes
    assert not SECRET_VARIABLES & config.environment.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_image_starts_the_server_as_a_numbered_user(kind: str) -> None:
    config = image_config(read_stages(FILE, {"TORCH": kind}))
    assert config.user == "10001:10001", "a number, so that an engine can see that it is not root's"
    assert (config.entrypoint, config.command) == (["loraplex"], ["serve"])
    assert config.stop_signal == "SIGTERM"
    assert config.health[0] == "python"
    assert "'/readyz'" in config.health[-1]
    assert "os.environ['LORAPLEX_PORT']" in config.health[-1]


def test_compiler_that_triton_needs_is_in_the_cuda_image_alone() -> None:
    (step,) = (step for step in read_stages(FILE)[-1].values("RUN") if "apt-get" in step)
    install = "apt-get install --yes --no-install-recommends gcc libc6-dev"
    assert step.startswith('if [ "$TORCH" = cuda ]; then')
    assert install in step
    assert step.endswith("fi")


def test_every_package_of_the_image_is_pinned() -> None:
    """The Containerfile names no version itself: all are in constraints.txt, as `make` has installed them here."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {normal_name(line.partition("==")[0]): line.partition("==")[2] for line in lines if "==" in line}
    assert not re.search(r"\w==\d", FILE.read_text())
    needed = needed_packages("loraplex", "hatchling")
    unpinned = {name for name in needed if name not in pins} - {"loraplex", "pip"}
    assert unpinned == set(), "add them to constraints.txt"
    different = {
        name: (found.version, pins[name])
        for name, found in needed.items()
        if name in pins and found.version.partition("+")[0] != pins[name]
    }
    assert different == {}
    for stage in read_stages(FILE):
        for step in stage.values("RUN"):
            for part in step.split("&&"):
                if "pip install" in part:
                    assert "--constraint constraints.txt" in part
    torch = [step for stage in read_stages(FILE) for step in stage.values("RUN") if "install_torch" in step]
    assert torch == ['python tools/install_torch.py constraints.txt "$TORCH"']
    assert "torch" in pins
