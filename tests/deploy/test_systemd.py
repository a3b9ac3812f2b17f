"""The systemd unit is valid and confined, and agrees with the settings."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from loraplex.app.setting_groups import ENGINE_SETTINGS
from loraplex.app.settings import Settings, load_settings
from support.deploy.containerfile import SECRET_VARIABLES, SETTING_VARIABLES, image_config, read_stages
from support.markdown import ROOT

FOLDER = ROOT / "deploy/systemd"
UNIT = FOLDER / "loraplex.service"
ENGINE_UNIT = FOLDER / "loraplex-engine.service"
EXAMPLE = FOLDER / "loraplex.env.example"
MAX_EXPOSURE = 1.5
"""Of 10, as `systemd-analyze security` counts. A server needs a network, and kernels that it compiles."""


def section(path: Path, name: str) -> dict[str, list[str]]:
    """Values by key; a key may stand there more than once."""
    found: dict[str, list[str]] = {}
    inside = ""
    for line in path.read_text().splitlines():
        if line.startswith("["):
            inside = line.strip("[]")
        elif inside == name and line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


SERVICE = section(UNIT, "Service")


def environment(path: Path, key: str) -> dict[str, str]:
    pairs = (word.partition("=") for line in section(path, "Service").get(key, ()) for word in line.split())
    return {name: value for name, _, value in pairs}


def example(*, with_comments: bool) -> dict[str, str]:
    lines = EXAMPLE.read_text().splitlines()
    found = (re.fullmatch(r"(#?)([A-Z_]+)=(.*)", line) for line in lines)
    return {match[2]: match[3] for match in found if match and (with_comments or not match[1])}


each_unit = pytest.mark.parametrize("path", [UNIT, ENGINE_UNIT], ids=lambda path: path.stem)


def analyze(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed: apt-get install systemd")
    return subprocess.run(
        ["systemd-analyze", "--no-pager", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@each_unit
def test_systemd_reads_every_line(tmp_path: Path, path: Path) -> None:
    """Of the unit as of the drop-in; the program that the unit starts need not be installed here."""
    program = SERVICE["ExecStart"][0].split()[0]
    unit = tmp_path / path.name
    unit.write_text(path.read_text().replace(program, "/bin/true"))
    (tmp_path / f"{path.name}.d").mkdir()
    shutil.copy(FOLDER / "gpu.conf", tmp_path / f"{path.name}.d")
    done = analyze("verify", "--man=no", unit)
    told = [line for line in done.stderr.splitlines() if path.name in line or str(tmp_path) in line]
    assert (done.returncode, told) == (0, [])


@each_unit
def test_unit_is_confined(path: Path) -> None:
    done = analyze("security", "--offline=true", f"--threshold={MAX_EXPOSURE * 10:g}", path)
    assert done.returncode == 0, done.stdout


def test_an_engine_is_confined_as_the_server_is() -> None:
    engine = section(ENGINE_UNIT, "Service")
    own = {"ExecStart", "EnvironmentFile", "Environment", "WorkingDirectory", "LoadCredential"}
    own |= {"User", "StateDirectory", "CacheDirectory"}
    assert {name: value for name, value in engine.items() if name not in own} == {
        name: value for name, value in SERVICE.items() if name not in own
    }
    assert engine["ExecStart"] == ["/opt/loraplex/bin/loraplex engine --join ${JOIN} --replica %H"]
    (name, _, _) = engine["LoadCredential"][0].partition(":")
    given = environment(ENGINE_UNIT, "Environment")
    assert given["LORAPLEX_ENGINE_TOKEN_FILE"] == f"%d/{name}"
    ours = {
        variable.removeprefix("LORAPLEX_").lower() for variable in given if variable.startswith("LORAPLEX_")
    }
    assert ours <= set(ENGINE_SETTINGS)
    state = f"/var/lib/{engine['StateDirectory'][0]}"
    assert given["LORAPLEX_DATA_DIR"].startswith(f"{state}/")
    assert engine["WorkingDirectory"] == [state]
    drain = Settings.model_fields["drain_timeout"].default
    assert float(engine["TimeoutStopSec"][0]) >= drain + 10


def test_unit_writes_its_data_and_its_cache_alone() -> None:
    for key, value in (
        ("DynamicUser", "yes"),
        ("ProtectSystem", "strict"),
        ("ProtectHome", "yes"),
        ("PrivateTmp", "yes"),
        ("NoNewPrivileges", "yes"),
        ("CapabilityBoundingSet", ""),
        ("StateDirectory", "loraplex"),
        ("StateDirectoryMode", "0700"),
        ("CacheDirectory", "loraplex"),
        ("CacheDirectoryMode", "0700"),
    ):
        assert SERVICE[key] == [value], key
    assert "ReadWritePaths" not in SERVICE
    given = environment(UNIT, "Environment")
    image = image_config(read_stages(ROOT / "Containerfile")).environment
    for name in ("LORAPLEX_DATA_DIR", "XDG_CACHE_HOME", "HOME", "PYTHONDONTWRITEBYTECODE"):
        assert given[name] == image[name], f"{name} is as in the image"


def test_server_gets_the_time_that_its_drain_may_take() -> None:
    fields = Settings.model_fields
    assert SERVICE["TimeoutStopSec"] == [
        f"{fields['drain_grace'].default + fields['drain_timeout'].default + 10:g}"
    ]
    assert SERVICE["KillMode"] == ["mixed"], "the engine must not get the signal: its requests finish first"
    assert SERVICE["KillSignal"] == ["SIGTERM"]


def test_variables_are_settings() -> None:
    """Secrets are in the environment file alone, which only the administrator can read."""
    for path in (UNIT, FOLDER / "gpu.conf"):
        given = {name for name in environment(path, "Environment") if name.startswith("LORAPLEX_")}
        assert given <= SETTING_VARIABLES - SECRET_VARIABLES
    assert example(with_comments=True).keys() <= SETTING_VARIABLES
    assert example(with_comments=True).keys() >= SECRET_VARIABLES


def test_example_starts_a_server_and_holds_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("LORAPLEX_")]:
        monkeypatch.delenv(name)
    for name, value in example(with_comments=False).items():
        monkeypatch.setenv(name, value)
    assert load_settings({}).model
    for name, value in example(with_comments=True).items():
        assert name not in SECRET_VARIABLES or value == "" or "PASSWORD" in value, name


def test_commented_urls_of_the_example_are_urls(monkeypatch: pytest.MonkeyPatch) -> None:
    given = example(with_comments=True)
    for name in ("LORAPLEX_DATABASE_URL", "LORAPLEX_REDIS_URL"):
        monkeypatch.setenv(name, given[name])
    assert load_settings({}).database_url.startswith("postgresql://loraplex:")
