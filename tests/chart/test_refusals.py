"""Values that Helm refuses, and what it says."""

from __future__ import annotations

import re
from typing import Any

import pytest

from support.chart.helm import CLUSTER, NEEDED, SEVERAL, TLS, Helm, merged

pytestmark = pytest.mark.slow

MONITORED = {"serviceMonitor": {"enabled": True}}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"keyThatIsNot": 1}, "keyThatIsNot"),
        ({"settings": {"max_seqs": 1}}, "max_seqs"),
        ({"settings": {"database_url": "postgresql://user:secret@host/name"}}, "database_url"),
        ({"settings": {"max_num_seqs": "many"}}, "max_num_seqs"),
        ({"replicas": "two"}, "replicas"),
    ],
)
def test_the_schema_is_asked(helms: list[Helm], values: dict[str, Any], said: str) -> None:
    for helm in helms:
        message = helm.refusal(NEEDED, values)
        assert said in message
        assert "secret@" not in message


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"image": {"repository": ""}}, "image.repository is needed"),
        ({"settings": {"model": ""}}, "settings.model is needed"),
        ({"settings": {"port": 8001}}, "settings.port and settings.admin_port are the same"),
        (
            {"replicas": 2},
            "secrets.databaseUrl.existingSecret is needed for more than one replica: the name of a Secret whose key "
            "database-url holds the postgresql://",
        ),
        (
            merged(MONITORED, {"autoscaling": {"provider": "hpa"}}),
            "secrets.databaseUrl.existingSecret is needed for more than one replica",
        ),
        *(
            (
                merged(SEVERAL, {"replicas": 2, "secrets": {name: {"existingSecret": ""}}}),
                f"secrets.{name}.existingSecret is needed",
            )
            for name in SEVERAL["secrets"]
        ),
        (merged(SEVERAL, {"replicas": 2, "artifacts": {"shared": False}}), "artifacts.shared is needed"),
        ({"resources": {"limits": {"cpu": "8"}}}, "resources.limits.memory is needed"),
        (
            {"cluster": {"resources": {"limits": {"cpu": "8"}}}},
            "cluster.resources.limits.memory is needed",
        ),
        (merged(SEVERAL, CLUSTER, {"replicas": 2}), "cluster.enabled needs replicas: 1"),
        (merged(CLUSTER, {"cluster": {"minReplicas": 3}}), "cluster.minReplicas is larger"),
        (
            merged(CLUSTER, {"secrets": {"engineToken": {"existingSecret": ""}}}),
            "secrets.engineToken.existingSecret is needed",
        ),
        (merged(CLUSTER, {"artifacts": {"shared": False}}), "artifacts.shared is needed for cluster.enabled"),
        (merged(CLUSTER, {"cluster": {"enginePort": 8001}}), "cluster.enginePort is settings.port"),
        (merged(CLUSTER, {"settings": {"replicas": 2}}), "settings.replicas is decided by the chart"),
        (
            merged(CLUSTER, TLS, {"settings": {"engine_tls": "/etc/tls"}}),
            "settings.engine_tls is decided by the chart where cluster.tls.existingSecret is given",
        ),
        (
            merged(SEVERAL, {"replicas": 2, "persistence": {"existingClaim": "old"}}),
            "persistence.existingClaim is for one replica",
        ),
        (
            {"artifacts": {"shared": True}, "settings": {"artifact_url": "file:///elsewhere"}},
            "settings.artifact_url is not on the volume of artifacts.shared",
        ),
        ({"gpu": {"enabled": True}, "settings": {"device": "cpu"}}, "settings.device is cpu"),
        ({"settings": {"device": "cuda"}}, "set gpu.enabled"),
        ({"ingress": {"enabled": True}}, "ingress.enabled needs ingress.hosts"),
        ({"httpRoute": {"enabled": True}}, "httpRoute.enabled needs httpRoute.parentRefs"),
        ({"autoscaling": {"minReplicas": 5}}, "autoscaling.minReplicas is larger"),
        (
            merged(SEVERAL, MONITORED, {"autoscaling": {"provider": "keda"}}),
            "needs autoscaling.keda.prometheusUrl",
        ),
        (merged(SEVERAL, {"autoscaling": {"provider": "hpa"}}), "autoscaling needs serviceMonitor.enabled"),
        (merged(MONITORED, {"prometheusRule": {"enabled": True}}), "needs prometheusRule.runbookUrl"),
        (
            {"prometheusRule": {"enabled": True, "runbookUrl": "https://example.com/{alert}"}},
            "prometheusRule.enabled needs serviceMonitor.enabled",
        ),
    ],
)
def test_values_that_do_not_fit_together(helm: Helm, values: dict[str, Any], said: str) -> None:
    assert said in helm.refusal(NEEDED, values)


@pytest.mark.parametrize("name", SEVERAL["secrets"])
def test_one_secret_that_is_missing_is_named_alone(helm: Helm, name: str) -> None:
    said = helm.refusal(NEEDED, SEVERAL, {"replicas": 2, "secrets": {name: {"existingSecret": ""}}})
    assert re.findall(r"(?:secrets|artifacts)\.\w+", said) == [f"secrets.{name}"]


def test_a_bucket_stands_for_the_shared_volume(helm: Helm) -> None:
    values = {"replicas": 2, "artifacts": {"shared": False}, "settings": {"artifact_url": "s3://adapters"}}
    assert helm.template(NEEDED, SEVERAL, values).environment["LORAPLEX_ARTIFACT_URL"] == "s3://adapters"


@pytest.mark.parametrize("replicas", [0, 1])
def test_one_replica_needs_nothing_more(helm: Helm, replicas: int) -> None:
    assert helm.template(NEEDED, {"replicas": replicas}).one("StatefulSet")["spec"]["replicas"] == replicas


def test_a_chart_around_it_may_give_global_values(helm: Helm) -> None:
    assert helm.template(NEEDED, {"global": {"registry": "x"}}).objects == helm.template(NEEDED).objects
