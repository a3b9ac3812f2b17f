"""What starts a server's engines, and what they are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from loraplex.app.cluster.choice import cluster_spec, uses_ray
from loraplex.app.cluster.spec import ClusterSpec, application_name
from loraplex.app.settings import Settings, SettingsInvalid, load_settings

HERE, OLD, NONE = "2.60.0", "2.59.1", None


@pytest.mark.parametrize(
    ("given", "version", "by_ray"),
    [
        ({}, HERE, False),
        ({"replicas": 0, "engine_port": 8002}, HERE, False),
        ({"replicas": 2}, HERE, True),
        ({"replicas": 2}, NONE, False),
        ({"replicas": 2}, OLD, False),
        ({"replicas": 2, "ray_address": "none"}, HERE, False),
        ({"ray_address": "local"}, HERE, True),
        ({"ray_address": "head:6379", "engine_port": 8002}, HERE, True),
        ({"max_replicas": 3}, HERE, True),
        ({"replicas": 2, "max_replicas": 2}, NONE, False),
    ],
)
def test_ray_starts_several_engines_where_it_is_installed(
    given: dict[str, Any], version: str | None, by_ray: bool
) -> None:
    chosen, reason = uses_ray(Settings(**given), lambda: version)
    assert chosen is by_ray
    assert reason


def test_the_reason_says_how_to_install_what_is_missing() -> None:
    assert "pip install 'loraplex[cluster]'" in uses_ray(Settings(replicas=2), lambda: NONE)[1]
    assert "Ray 2.59.1 is installed, and 2.60 is needed" in uses_ray(Settings(replicas=2), lambda: OLD)[1]


@pytest.mark.parametrize(
    ("given", "version", "said"),
    [
        ({"ray_address": "local"}, NONE, "Ray is not installed"),
        ({"ray_address": "head:6379", "engine_port": 8002}, NONE, "Ray is not installed"),
        ({"ray_address": "head:6379"}, HERE, "--ray-address needs --engine-port"),
        (
            {"ray_address": "h:1", "engine_port": "0.0.0.0:8002"},
            HERE,
            "--engine-port 0.0.0.0:8002",
        ),
        ({"ray_address": "local"}, OLD, "2.60 is needed"),
        ({"max_replicas": 3}, NONE, "Ray is not installed"),
        ({"replicas": 3, "max_replicas": 2}, HERE, "--max-replicas 2 is below --replicas 3"),
        ({"max_replicas": 3, "ray_address": "none"}, HERE, "--max-replicas needs Ray"),
        ({"replicas": 0, "ray_address": "local"}, HERE, "--replicas 0"),
    ],
)
def test_ray_that_is_asked_for_and_cannot_be_had_is_one_line(
    given: dict[str, Any], version: str | None, said: str
) -> None:
    with pytest.raises(SettingsInvalid, match=said) as failure:
        uses_ray(Settings(**given), lambda: version)
    assert "\n" not in str(failure.value)


def test_engines_get_the_settings_of_engines_alone(tmp_path: Path) -> None:
    settings = Settings(
        model="/m",
        data_dir=tmp_path,
        replicas=2,
        max_replicas=3,
        max_num_seqs=8,
        admin_token="secret",
        port=9,
    )
    spec = cluster_spec(settings, "127.0.0.1:8002")
    sent = msgspec.json.decode(msgspec.json.encode(spec), type=ClusterSpec)
    assert sent == spec
    assert (sent.join, sent.min_replicas, sent.max_replicas) == ("127.0.0.1:8002", 2, 3)
    theirs = load_settings(sent.settings)
    assert (theirs.model, theirs.max_num_seqs, theirs.replicas) == ("/m", 8, 3)  # three share the machine
    assert theirs.engine_token_file == str(tmp_path / "engine-token")
    assert sent.settings.keys() <= {"model", "max_num_seqs", "data_dir", "engine_token_file", "replicas"}


def test_engines_of_a_cluster_have_their_machine_to_themselves(tmp_path: Path) -> None:
    settings = Settings(model="/m", data_dir=tmp_path, replicas=2, ray_address="head:6379")
    spec = cluster_spec(settings, "10.0.0.1:8002")
    assert spec.address == "head:6379"
    assert load_settings(spec.settings).replicas == 1


def test_an_application_on_a_shared_cluster_is_known_by_its_server_and_its_settings(tmp_path: Path) -> None:
    def name(address: str = "10.0.0.1:8002", **given: Any) -> str:
        settings = Settings(model="/m", data_dir=tmp_path, **{"ray_address": "head:6379", **given})
        return application_name(cluster_spec(settings, address))

    assert name() == name()
    assert len({name(), name(max_num_seqs=8), name("10.0.0.2:8002")}) == 3
    assert name().startswith("loraplex-10-0-0-1-8002-")
    assert name(ray_address="") == "loraplex"
