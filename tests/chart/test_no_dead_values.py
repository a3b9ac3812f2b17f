"""Every value of values.yaml changes something that is rendered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.chart.helm import CHART, NEEDED, SEVERAL, Helm, load, merged

pytestmark = pytest.mark.slow

PEERS = [{"podSelector": {"matchLabels": {"role": "x"}}}]
EVERYTHING = merged(
    NEEDED,
    SEVERAL,
    {
        "serviceMonitor": {"enabled": True},
        "prometheusRule": {"enabled": True, "runbookUrl": "https://example.com/{alert}"},
        "grafanaDashboards": {"enabled": True},
        "ingress": {"enabled": True, "hosts": ["a.example.com"]},
        "httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}]},
        "networkPolicy": {"egress": {"enabled": True}},
        "secrets": {
            "hfToken": {"existingSecret": "hub"},
            "otlpHeaders": {"existingSecret": "otlp"},
            "webhookSecret": {"existingSecret": "webhook"},
        },
    },
)
"""With every object that excludes no other."""
CLUSTER = {
    "cluster": {"enabled": True, "maxReplicas": 3},
    "secrets": {"engineToken": {"existingSecret": "engine"}},
    "gpu": {"enabled": True},
}
CONDITIONS: dict[str, dict[str, Any]] = {
    "gpu.r": {"gpu": {"enabled": True}},
    "autoscaling.": {"autoscaling": {"provider": "hpa"}},
    "autoscaling.keda.": {
        "autoscaling": {"provider": "keda", "keda": {"prometheusUrl": "http://prometheus"}}
    },
    "cluster.": CLUSTER,
    "cluster.tls.": CLUSTER | {"cluster": {"enabled": True, "tls": {"existingSecret": "engine-port"}}},
    "secrets.engineToken": CLUSTER,
    "extraVolumeMounts": {"extraVolumes": [{"name": "x", "emptyDir": {}}]},
    "serviceMonitor.enabled": {"prometheusRule": {"enabled": False}},
}
"""What values that begin so are read with; later ones win."""
OTHER: dict[str, Any] = {
    "image.digest": "sha256:" + "0" * 64,
    "image.pullPolicy": "Always",
    "settings.data_dir": "/srv/elsewhere/data",
    "service.data.type": "NodePort",
    "settings.port": 9000,
    "autoscaling.provider": "none",
    "autoscaling.keda.prometheusUrl": "http://elsewhere",
    "prometheusRule.runbookUrl": "https://elsewhere.example.com/{alert}",
    "image.pullSecrets": ["x"],
    "ingress.hosts": ["b.example.com"],
    "httpRoute.parentRefs": [{"name": "other"}],
    "httpRoute.hostnames": ["b.example.com"],
    "httpRoute.requestTimeout": "10s",
    "networkPolicy.dataFrom": PEERS,
    "networkPolicy.adminFrom": PEERS,
    "networkPolicy.egress.dns": PEERS,
    "networkPolicy.egress.rules": [{"to": PEERS}],
    "tolerations": [{"operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "topologySpreadConstraints": [{"maxSkew": 1}],
    "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy"}],
    "extraVolumes": [{"name": "x", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "x", "mountPath": "/x"}],
    "resources": {"limits": {"memory": "3Gi"}},
    "migration.resources.requests": {"cpu": "3"},
    "migration.resources.limits": {"cpu": "3"},
    "gpu.resourceName": "amd.com/gpu",
    "cluster.rayVersion": "2.60.9",
    "cluster.resources": {"limits": {"memory": "3Gi"}},
    "cluster.headResources.requests": {"cpu": "3"},
    "cluster.headResources.limits": {"cpu": "3"},
    "cluster.tolerations": [{"operator": "Exists"}],
    "cluster.affinity": {"nodeAffinity": {}},
    "cluster.dashboardFrom": PEERS,
}
"""Values of a form of their own; the others are changed by their type."""
MAPS_OF_TEXTS = ("annotations", "labels", "podLabels", "podAnnotations", "nodeSelector")


def leaves(values: dict[str, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        path = f"{at}.{key}" if at else key
        if isinstance(value, dict) and value and path not in OTHER:
            yield from leaves(value, path)
        else:
            yield path, value


def other(path: str, value: Any) -> Any:
    if path in OTHER:
        return OTHER[path]
    if path.endswith(("size", "Size")):
        return "3Gi"
    if path.endswith(("interval", "scrapeTimeout")):
        return "7s"
    if path.rpartition(".")[2] in MAPS_OF_TEXTS:
        return {"example.com/x": "x"}
    if isinstance(value, bool):
        return not value
    if isinstance(value, float):
        return value / 2
    if isinstance(value, int):
        return value + 1
    assert isinstance(value, str), f"{path}: say in OTHER what else it may be"
    return "10.1.2.3" if path.endswith("host") else "other-value"


def nested(path: str, value: Any) -> dict[str, Any]:
    for key in reversed(path.split(".")):
        value = {key: value}
    assert isinstance(value, dict)
    return value


def at(path: str, values: Any) -> Any:
    for key in path.split("."):
        values = values[key]
    return values


DEFAULTS = load(CHART / "values.yaml")
LEAVES = list(leaves(DEFAULTS))
GROUPS = sorted({path.partition(".")[0] for path, _ in LEAVES})


@pytest.mark.parametrize("group", GROUPS)
def test_every_value_is_read(helm: Helm, group: str) -> None:
    for path, _ in LEAVES:
        if path.partition(".")[0] != group:
            continue
        given = merged(
            EVERYTHING, *(values for start, values in CONDITIONS.items() if path.startswith(start))
        )
        changed = merged(given, nested(path, other(path, at(path, merged(DEFAULTS, given)))))
        assert helm.template(changed).text != helm.template(given).text, path
