"""The pods: probes, the time to end, volumes, and what each asks of the cluster."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

import pytest

from loraplex.api.drain import Drain
from loraplex.api.routes.probes import probe_routes
from support.chart.helm import NAME, NEEDED, SEVERAL, VALUE_SETS, Helm, Rendering, load
from support.engine.fake_engine import FakeEngineClient

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("settings", "seconds"),
    [
        ({}, 75),
        ({"drain_grace": 0, "drain_timeout": 0}, 10),
        ({"drain_grace": 7.5, "drain_timeout": 600}, 618),
        ({"drain_timeout": 86400}, 86415),
    ],
)
def test_the_pod_has_the_drains_time_and_ten_seconds(
    helm: Helm, settings: dict[str, Any], seconds: int
) -> None:
    assert helm.template(NEEDED, {"settings": settings}).server["terminationGracePeriodSeconds"] == seconds


def test_each_probe_asks_a_route_that_there_is(helm: Helm) -> None:
    routes = {route.path for route in probe_routes(FakeEngineClient(), Drain())}
    container = helm.template(NEEDED).container
    asked = {kind: container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")}
    assert {kind: get["path"] for kind, get in asked.items()} == {
        "startup": "/startupz",
        "readiness": "/readyz",
        "liveness": "/livez",
    }
    assert {get["path"] for get in asked.values()} < routes
    assert {get["port"] for get in asked.values()} < {port["name"] for port in container["ports"]}


def test_the_start_has_its_time(helm: Helm) -> None:
    probe = helm.template(NEEDED, {"startupSeconds": 3601}).container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 3605


def test_ports_are_the_settings(helm: Helm) -> None:
    rendering = helm.template(NEEDED, {"settings": {"port": 9000, "admin_port": 9001}})
    assert rendering.container["ports"] == [
        {"name": "data", "containerPort": 9000},
        {"name": "admin", "containerPort": 9001},
    ]


def writable(rendering: Rendering) -> set[str]:
    return {it["mountPath"] for it in rendering.container["volumeMounts"] if not it.get("readOnly")}


def test_what_the_server_writes_is_on_volumes(helm: Helm) -> None:
    """The data directory, what it fetches and compiles, and the engine's socket; the rest is read-only."""
    rendering = helm.template(NEEDED, SEVERAL)
    environment, mounts = rendering.environment, writable(rendering)
    assert mounts == {"/var/lib/loraplex", "/var/cache/loraplex", "/tmp", "/var/lib/loraplex-artifacts"}
    assert {environment[name] for name in ("HOME", "XDG_CACHE_HOME")} == {"/var/cache/loraplex"}
    assert environment["TMPDIR"] == "/tmp"
    assert str(PurePosixPath(environment["LORAPLEX_DATA_DIR"]).parent) == "/var/lib/loraplex"


def test_the_data_volume_follows_the_setting(helm: Helm) -> None:
    rendering = helm.template(NEEDED, {"settings": {"data_dir": "/srv/loraplex/state"}})
    assert "/srv/loraplex" in writable(rendering)


def claims(rendering: Rendering) -> dict[str, Any]:
    templates = rendering.one("StatefulSet")["spec"].get("volumeClaimTemplates", [])
    return {it["metadata"]["name"]: it["spec"] for it in templates}


def volumes(rendering: Rendering) -> dict[str, Any]:
    return {it["name"]: it for it in rendering.server["volumes"]}


@pytest.mark.parametrize("path", VALUE_SETS, ids=lambda path: path.stem)
def test_every_mount_has_its_volume(helm: Helm, path: Any) -> None:
    rendering = helm.template(load(path))
    known = volumes(rendering).keys() | claims(rendering).keys()
    assert {it["name"] for it in rendering.container["volumeMounts"]} == known
    for job in rendering.of("Job"):
        pod = job["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert {it["name"] for it in container["volumeMounts"]} == {it["name"] for it in pod["volumes"]}


def test_claims_are_each_replicas_own_and_are_kept(helm: Helm) -> None:
    given = {"persistence": {"size": "7Gi"}, "cache": {"size": "8Gi", "storageClass": "fast"}}
    rendering = helm.template(NEEDED, given)
    assert claims(rendering) == {
        "data": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "7Gi"}}},
        "cache": {
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": "fast",
            "resources": {"requests": {"storage": "8Gi"}},
        },
    }
    kept = rendering.one("StatefulSet")["spec"]["persistentVolumeClaimRetentionPolicy"]
    assert kept == {"whenDeleted": "Retain", "whenScaled": "Retain"}


def test_nothing_is_kept_where_that_was_chosen(helm: Helm) -> None:
    given = {"persistence": {"enabled": False, "size": "7Gi"}, "cache": {"persistent": False, "size": "8Gi"}}
    rendering = helm.template(NEEDED, given)
    assert claims(rendering) == {}
    assert volumes(rendering)["data"]["emptyDir"] == {"sizeLimit": "7Gi"}
    assert volumes(rendering)["cache"]["emptyDir"] == {"sizeLimit": "8Gi"}


def test_a_claim_that_exists_is_used(helm: Helm) -> None:
    rendering = helm.template(NEEDED, {"persistence": {"existingClaim": "old"}})
    assert volumes(rendering)["data"]["persistentVolumeClaim"] == {"claimName": "old"}
    assert claims(rendering).keys() == {"cache"}


def test_shared_adapters_have_one_claim_that_survives(helm: Helm) -> None:
    rendering = helm.template(NEEDED, SEVERAL)
    claim = rendering.one("PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    name = {"claimName": claim["metadata"]["name"]}
    assert volumes(rendering)["artifacts"]["persistentVolumeClaim"] == name
    other = helm.template(NEEDED, SEVERAL, {"artifacts": {"existingClaim": "adapters"}})
    assert other.of("PersistentVolumeClaim") == []
    assert volumes(other)["artifacts"]["persistentVolumeClaim"] == {"claimName": "adapters"}


def test_user_and_group_may_be_the_clusters(helm: Helm) -> None:
    security = helm.template(NEEDED).server["securityContext"]
    assert {security[name] for name in ("runAsUser", "runAsGroup", "fsGroup")} == {10001}
    theirs = helm.template(NEEDED, {"runAs": {"user": None, "group": None}}).server["securityContext"]
    assert not {"runAsUser", "runAsGroup", "fsGroup"} & theirs.keys()
    assert theirs["runAsNonRoot"] is True


def test_the_service_account_has_no_token(helm: Helm) -> None:
    rendering = helm.template(NEEDED)
    account = rendering.one("ServiceAccount")
    assert account["automountServiceAccountToken"] is False
    assert rendering.server["serviceAccountName"] == account["metadata"]["name"] == NAME
    other = helm.template(NEEDED, {"serviceAccount": {"create": False, "name": "theirs"}})
    assert other.of("ServiceAccount") == []
    assert other.server["serviceAccountName"] == "theirs"


def test_the_migration_runs_before_the_servers_on_postgresql(helm: Helm) -> None:
    database = {"secrets": {"databaseUrl": {"existingSecret": "db", "key": "url"}}}
    job = helm.template(NEEDED, database).one("Job")
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == ["loraplex", "migrate"]
    assert container["env"][0] == {
        "name": "LORAPLEX_DATABASE_URL",
        "valueFrom": {"secretKeyRef": {"name": "db", "key": "url"}},
    }
    # What a release makes is not there yet before its installation.
    assert "serviceAccountName" not in pod
    assert "envFrom" not in container
    assert helm.template(NEEDED).of("Job") == []
    assert helm.template(NEEDED, database, {"migration": {"enabled": False}}).of("Job") == []


def test_the_migration_sees_a_ca_and_no_claim(helm: Helm) -> None:
    postgresql = load(next(path for path in VALUE_SETS if path.stem == "postgresql"))
    claim = {"name": "models", "persistentVolumeClaim": {"claimName": "models"}}
    given = {
        "extraVolumes": [*postgresql["extraVolumes"], claim],
        "extraVolumeMounts": [*postgresql["extraVolumeMounts"], {"name": "models", "mountPath": "/models"}],
    }
    pod = helm.template(postgresql, given).one("Job")["spec"]["template"]["spec"]
    assert [it["name"] for it in pod["volumes"]] == ["tmp", "database-ca"]
    assert pod["containers"][0]["volumeMounts"][1:] == postgresql["extraVolumeMounts"]
    assert postgresql["extraEnv"][0] in pod["containers"][0]["env"]
