"""compose.yaml is valid, agrees with the image and the settings, and holds no secret."""

from __future__ import annotations

import importlib.util
import json
import re
import stat
import subprocess
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema_rs
import pytest
import yaml

from loraplex.app.settings import Settings, SettingsInvalid, load_settings
from loraplex.app.storage.redis_fitness import Fitness, examine_redis
from support.deploy.containerfile import SECRET_VARIABLES, SETTING_VARIABLES, image_config, read_stages
from support.markdown import ROOT
from support.servers.live_server import free_ports
from support.servers.redis_server import need_program

# compose-spec.json is schema/compose-spec.json of compose-spec/compose-spec at 170098ba (23 June 2026), Apache-2.0.
SCHEMA = json.loads((ROOT / "tests/deploy/compose-spec.json").read_text())
FILES = ("compose.yaml", "compose.cuda.yaml")
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
CONFIG = image_config(read_stages(ROOT / "Containerfile"))
COMPOSE_FILES = ROOT / "deploy/compose"


def every_service() -> Iterator[tuple[str, dict[str, Any]]]:
    yield from SERVICES.items()


@pytest.fixture(scope="module")
def make_secrets() -> ModuleType:
    found = importlib.util.spec_from_file_location("make_secrets", ROOT / "deploy/compose/make_secrets.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", FILES)
def test_file_is_valid_by_the_specification(name: str) -> None:
    jsonschema_rs.validate(SCHEMA, yaml.safe_load((ROOT / name).read_text()))


def test_specification_finds_a_wrong_key() -> None:
    with pytest.raises(jsonschema_rs.ValidationError):
        jsonschema_rs.validate(SCHEMA, {"services": {"a": {"image": "b", "read-only": True}}})


def test_every_container_is_confined() -> None:
    for name, service in every_service():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["restart"] == "unless-stopped", name
        assert "cap_add" not in service, name
        assert not service.get("privileged"), name


def test_every_image_has_a_version_and_every_container_a_health_check() -> None:
    for name, service in every_service():
        assert re.search(r":v?\d+\.?\d*", service["image"]), name
        assert name == "loraplex" or service["healthcheck"]["test"][0] in ("CMD", "CMD-SHELL"), name
    assert "healthcheck" not in SERVICES["loraplex"], "the image has its own"
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert SERVICES["loraplex"]["image"] == f"loraplex:{version}"
    cuda = yaml.safe_load((ROOT / "compose.cuda.yaml").read_text())["services"]["loraplex"]
    assert cuda["image"] == f"loraplex:{version}-cuda"
    assert cuda["build"]["args"] == {"TORCH": "cuda"}


def test_ports_are_published_to_this_machine_alone() -> None:
    published = {port for _, service in every_service() for port in service.get("ports", ())}
    assert published == {f"127.0.0.1:{port}:{port}" for port in (*CONFIG.ports, 3000)}
    assert COMPOSE["networks"]["storage"] == COMPOSE["networks"]["metrics"] == {"internal": True}
    for name in ("postgres", "redis"):
        assert SERVICES[name]["networks"] == ["storage"]


def test_variables_of_the_server_are_settings_and_none_is_a_secret() -> None:
    known = SETTING_VARIABLES | {"LORAPLEX_CONFIG"}
    for name in FILES:
        given = yaml.safe_load((ROOT / name).read_text())["services"]["loraplex"]["environment"]
        assert given.keys() <= known - SECRET_VARIABLES, name


def test_every_declared_volume_of_the_image_is_kept() -> None:
    mounted = dict(volume.split(":")[:2][::-1] for volume in SERVICES["loraplex"]["volumes"])
    assert mounted.keys() == set(CONFIG.volumes)
    assert set(mounted.values()) <= COMPOSE["volumes"].keys()
    assert [mount.partition(":")[0] for mount in SERVICES["loraplex"]["tmpfs"]] == [
        CONFIG.environment["TMPDIR"]
    ]


def test_server_gets_the_time_that_its_drain_may_take() -> None:
    fields = Settings.model_fields
    allowed = fields["drain_grace"].default + fields["drain_timeout"].default + 10
    assert SERVICES["loraplex"]["stop_grace_period"] == f"{allowed:g}s"


def test_files_that_are_mounted_exist_or_are_made() -> None:
    for name, service in every_service():
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            if source.startswith("."):
                assert (ROOT / source).exists(), (name, source)
            else:
                assert source in COMPOSE["volumes"], (name, source)
        for secret in service.get("secrets", ()):
            assert secret in COMPOSE["secrets"], name


def test_prometheus_scrapes_the_admin_port_and_grafana_reads_prometheus() -> None:
    scraped = yaml.safe_load((COMPOSE_FILES / "prometheus.yml").read_text())["scrape_configs"]
    assert [one["metrics_path"] for one in scraped] == ["/metrics"]
    assert scraped[0]["static_configs"] == [{"targets": [f"loraplex:{CONFIG.ports[1]}"]}]
    assert SERVICES["loraplex"]["environment"]["LORAPLEX_ADMIN_HOST"] == "0.0.0.0"
    (source,) = yaml.safe_load((COMPOSE_FILES / "grafana/datasources/prometheus.yaml").read_text())[
        "datasources"
    ]
    assert source["url"] == "http://prometheus:9090"
    for name in ("loraplex", "prometheus", "grafana"):
        assert "metrics" in SERVICES[name]["networks"]


def test_secrets_are_files_that_are_not_committed(make_secrets: ModuleType) -> None:
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    folder = {Path(one["file"]).parent.as_posix() for one in COMPOSE["secrets"].values()}
    assert folder == {"deploy/compose/secrets"}
    assert "/deploy/compose/secrets/" in ignored
    assert {Path(one["file"]).name for one in COMPOSE["secrets"].values()} == make_secrets.make_files().keys()


def test_made_secrets_are_settings_of_one_server(
    make_secrets: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "secrets"
    assert make_secrets.main(folder) == 0
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o644}
    monkeypatch.setenv("LORAPLEX_CONFIG", str(folder / "loraplex.toml"))
    settings = load_settings({})
    secrets = {name for name in Settings.model_fields if f"LORAPLEX_{name.upper()}" in SECRET_VARIABLES}
    assert secrets == {"admin_token", "key_pepper", "database_url", "redis_url", "webhook_secret"}
    assert {name for name in secrets if not getattr(settings, name)} == {"webhook_secret"}, (
        "it has no webhook"
    )
    password = (folder / "postgres-password").read_text()
    assert settings.database_url == f"postgresql://loraplex:{password}@postgres:5432/loraplex"
    assert (folder / "redis-password").read_text() in settings.redis_url
    values = [
        (folder / name).read_text() for name in ("postgres-password", "redis-password", "grafana-password")
    ]
    assert len({*values, settings.admin_token, settings.key_pepper}) == 5


def test_made_secrets_are_not_overwritten(
    make_secrets: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "redis.conf").write_text("mine")
    assert make_secrets.main(tmp_path) == 1
    assert "redis.conf" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["redis.conf"]


def test_made_redis_configuration_is_fit_for_limits(make_secrets: ModuleType, tmp_path: Path) -> None:
    program = need_program()
    assert make_secrets.main(tmp_path / "secrets") == 0
    (port,) = free_ports(1)
    command = [program, str(tmp_path / "secrets/redis.conf"), "--port", str(port), "--bind", "127.0.0.1"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL) as server:
        try:
            password = (tmp_path / "secrets/redis-password").read_text()
            fitness = until_answered(f"redis://:{password}@127.0.0.1:{port}/0", server)
            assert fitness.warning == ""
            with pytest.raises(SettingsInvalid, match="already authenticated"):
                examine_redis(f"redis://127.0.0.1:{port}/0")
        finally:
            server.terminate()
            server.wait(30)
    assert [path.name for path in tmp_path.iterdir()] == ["secrets"], "it wrote to the disk"


def until_answered(url: str, server: subprocess.Popen[bytes]) -> Fitness:
    end = time.monotonic() + 30
    while True:
        try:
            return examine_redis(url)
        except SettingsInvalid:
            assert server.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)


def test_no_secret_stands_in_a_deployment_file() -> None:
    secret = re.compile(r"lpx_\w{8}|\b[0-9a-fA-F]{32,}\b|PRIVATE KEY|://[^/\s:]*:(?!PASSWORD@)[^/$@{}\s]+@")
    found = {}
    for path in (ROOT / "Containerfile", *ROOT.glob("compose*.yaml"), *(ROOT / "deploy").rglob("*")):
        if path.is_file() and path.parent.name not in ("secrets", "__pycache__"):
            found[path.name] = secret.findall(path.read_text())
    assert found["Containerfile"] == []
    assert not any(found.values()), found
    assert secret.findall("redis://:hunter2@redis")
    assert secret.findall("0" * 64)
