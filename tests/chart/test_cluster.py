"""Engines in pods of their own: a RayService whose engines find the server, and nobody else them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import yaml

from loraplex.app.cluster.autoscaling import autoscaling_config
from loraplex.app.cluster.spec import ClusterSpec
from loraplex.app.setting_groups import ENGINE_SETTINGS
from support.chart.helm import (
    CLUSTER,
    NAME,
    NEEDED,
    TLS,
    VALUE_SETS,
    Helm,
    Rendering,
    ray_templates,
    read_by_server,
)

pytestmark = pytest.mark.slow

GPU = {"gpu": {"enabled": True, "runtimeClassName": "nvidia"}}
BETWEEN = {"cluster": {"minReplicas": 2, "maxReplicas": 5}}


def serve_config(rendering: Rendering) -> dict[str, Any]:
    found = yaml.safe_load(rendering.one("RayService")["spec"]["serveConfigV2"])
    assert isinstance(found, dict)
    return found


def application(rendering: Rendering) -> dict[str, Any]:
    (found,) = serve_config(rendering)["applications"]
    assert isinstance(found, dict)
    return found


def pods(rendering: Rendering) -> tuple[dict[str, Any], dict[str, Any]]:
    """The head's and an engine's."""
    head, engine = ray_templates(rendering.one("RayService"))
    return head["spec"], engine["spec"]


def variables(pod: dict[str, Any]) -> dict[str, str]:
    return {it["name"]: it["value"] for it in pod["containers"][0]["env"] if "value" in it}


def test_without_it_there_is_no_ray_and_no_engine_port(helm: Helm) -> None:
    rendering = helm.template(NEEDED)
    assert rendering.of("RayService") == []
    assert "ray" not in rendering.text
    assert {port["name"] for port in rendering.container["ports"]} == {"data", "admin"}


def test_the_server_only_listens_and_engines_dial_it(helm: Helm, monkeypatch: pytest.MonkeyPatch) -> None:
    rendering = helm.template(NEEDED, CLUSTER, {"cluster": {"enginePort": 9100}})
    settings = read_by_server(rendering.environment, monkeypatch)
    assert (settings.replicas, settings.engine_port) == (0, "0.0.0.0:9100")
    assert {"name": "engine", "containerPort": 9100} in rendering.container["ports"]
    service = rendering.one("Service", f"{NAME}-engines")["spec"]
    assert service["ports"] == [{"name": "engine", "port": 9100, "targetPort": "engine"}]
    # The server is not ready before the first engine has joined.
    assert service["publishNotReadyAddresses"] is True
    assert msgspec.convert(application(rendering)["args"], ClusterSpec).join == f"{NAME}-engines:9100"


def test_both_sides_read_one_token_from_a_secret(helm: Helm) -> None:
    secret = {"secrets": {"engineToken": {"existingSecret": "of-engines", "key": "it"}}}
    rendering = helm.template(NEEDED, CLUSTER, secret)
    for pod in (rendering.server, *pods(rendering)):
        (volume,) = (it for it in pod["volumes"] if it["name"] == "engine-token")
        assert volume["secret"]["secretName"] == "of-engines"
        assert volume["secret"]["items"] == [{"key": "it", "path": "token"}]
        (mount,) = (it for it in pod["containers"][0]["volumeMounts"] if it["name"] == "engine-token")
        assert variables(pod)["LORAPLEX_ENGINE_TOKEN_FILE"] == f"{mount['mountPath']}/token"
        assert mount["readOnly"] is True


def test_engines_dial_by_tls_and_get_no_private_key(helm: Helm, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"cluster": {"tls": {"cert": "its.crt", "key": "its.key", "ca": "its-ca.crt"}}}
    rendering = helm.template(NEEDED, CLUSTER, TLS, keys)

    def files(pod: dict[str, Any]) -> dict[str, str]:
        """Paths in the pod's container, and the keys of the Secret that they are."""
        (volume,) = (it for it in pod["volumes"] if it["name"] == "engine-tls")
        (mount,) = (it for it in pod["containers"][0]["volumeMounts"] if it["name"] == "engine-tls")
        assert volume["secret"]["secretName"] == "engine-port"
        assert mount["readOnly"] is True
        return {f"{mount['mountPath']}/{it['path']}": it["key"] for it in volume["secret"]["items"]}

    server = read_by_server(rendering.environment, monkeypatch)
    folder = server.engine_tls
    assert files(rendering.server) == {f"{folder}/tls.crt": "its.crt", f"{folder}/tls.key": "its.key"}
    for pod in pods(rendering):
        engine = read_by_server(variables(pod), monkeypatch)
        assert files(pod) == {f"{engine.engine_tls}/ca.crt": "its-ca.crt"}
    assert "engine-tls" not in helm.template(NEEDED, CLUSTER).text


def test_engines_have_their_settings_and_no_secret_of_the_server(
    helm: Helm, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = {
        name: {"existingSecret": "x"} for name in ("adminToken", "keyPepper", "otlpHeaders", "hfToken")
    }
    given = {
        "settings": {"kv_cache_memory": "3GiB", "max_adapter_rank": 32, "cors_origins": "https://a.example"},
        "secrets": secrets,
    }
    rendering = helm.template(NEEDED, CLUSTER, given)
    for pod in pods(rendering):
        listed = {it["name"] for it in pod["containers"][0]["env"]}
        ours = {name.removeprefix("LORAPLEX_").lower() for name in listed if name.startswith("LORAPLEX_")}
        assert ours <= set(ENGINE_SETTINGS)
        assert {"LORAPLEX_KV_CACHE_MEMORY", "LORAPLEX_MAX_ADAPTER_RANK", "HF_TOKEN"} <= listed
        settings = read_by_server(variables(pod), monkeypatch)
        assert (settings.kv_cache_memory, settings.max_adapter_rank) == (3 << 30, 32)


def test_every_setting_of_an_engine_reaches_it(helm: Helm) -> None:
    values = {"drain_timeout": 61, "threads": 3, "quantise": "int8", "log_level": "debug"}
    spare = {"engine_spare": False, "max_waiting": 7, "batch_invariant": True, "speculation": "off"}
    _, engine = pods(helm.template(NEEDED, CLUSTER, {"settings": values | spare}))
    for name, value in (values | spare).items():
        assert variables(engine)[f"LORAPLEX_{name.upper()}"] == (
            value if isinstance(value, str) else str(value).lower()
        )
    template = (VALUE_SETS[0].parents[1] / "templates/_helpers.tpl").read_text()
    block = template.partition('define "loraplex.engineSettings" -}}')[2].partition("{{-")[0]
    assert yaml.safe_load(block) == list(ENGINE_SETTINGS)


def test_the_number_of_engines_is_the_values(helm: Helm) -> None:
    rendering = helm.template(NEEDED, CLUSTER, BETWEEN)
    (deployment,) = application(rendering)["deployments"]
    spec = ClusterSpec("x:1")
    assert deployment["autoscaling_config"] == autoscaling_config(2, 5, spec.up_delay_s, spec.down_delay_s)
    (group,) = rendering.one("RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (2, 2, 5)
    (fixed,) = application(helm.template(NEEDED, CLUSTER, {"cluster": {"minReplicas": 3, "maxReplicas": 3}}))[
        "deployments"
    ]
    assert fixed["num_replicas"] == 3
    assert "autoscaling_config" not in fixed


def test_a_change_of_the_number_alone_replaces_no_engine(helm: Helm) -> None:
    """Serve replaces all of them where arguments or policy change, the operator where a pod does."""
    one, other = (
        helm.template(NEEDED, CLUSTER, {"cluster": {"minReplicas": 2, "maxReplicas": most}})
        for most in (5, 6)
    )
    assert application(one)["args"] == application(other)["args"]
    policies = [application(it)["deployments"][0]["autoscaling_config"]["policy"] for it in (one, other)]
    assert policies[0] == policies[1]
    assert ray_templates(one.one("RayService")) == ray_templates(other.one("RayService"))


def test_pods_come_and_go_only_where_the_number_may_change(helm: Helm) -> None:
    def cluster(*values: dict[str, Any]) -> dict[str, Any]:
        found = helm.template(NEEDED, CLUSTER, *values).one("RayService")["spec"]["rayClusterConfig"]
        assert isinstance(found, dict)
        return found

    assert "enableInTreeAutoscaling" not in cluster()
    assert cluster(BETWEEN)["enableInTreeAutoscaling"] is True
    # Its account is the operator's, which has the rights.
    assert "serviceAccountName" not in cluster(BETWEEN)["headGroupSpec"]["template"]["spec"]


def test_each_pod_has_one_engine_and_its_gpus(helm: Helm) -> None:
    rendering = helm.template(NEEDED, CLUSTER, GPU, {"cluster": {"gpusPerReplica": 2}})
    cluster = rendering.one("RayService")["spec"]["rayClusterConfig"]
    (group,) = cluster["workerGroupSpecs"]
    (deployment,) = application(rendering)["deployments"]
    assert deployment["ray_actor_options"] == {"num_cpus": 1, "num_gpus": 2}
    offered = {name: group["rayStartParams"][f"num-{name}"] for name in ("cpus", "gpus")}
    assert offered == {"cpus": "1", "gpus": "2"}
    head, engine = pods(rendering)
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert engine["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert engine["runtimeClassName"] == "nvidia"
    for without in (head, rendering.server):
        assert "nvidia.com/gpu" not in without["containers"][0]["resources"]["limits"]
        assert "runtimeClassName" not in without
    on_cpus = application(helm.template(NEEDED, CLUSTER))["deployments"][0]["ray_actor_options"]
    assert on_cpus == {"num_cpus": 1, "num_gpus": 0}


def test_an_engine_has_time_to_drain(helm: Helm) -> None:
    _, engine = pods(helm.template(NEEDED, CLUSTER, {"settings": {"drain_timeout": 100}}))
    assert engine["terminationGracePeriodSeconds"] == 125


def test_only_engines_reach_the_engine_port_and_only_ray_reaches_ray(helm: Helm) -> None:
    rendering = helm.template(NEEDED, CLUSTER)
    head, engine = (it["metadata"]["labels"] for it in ray_templates(rendering.one("RayService")))
    (rule,) = (
        it
        for it in rendering.one("NetworkPolicy", NAME)["spec"]["ingress"]
        if it["ports"][0]["port"] == "engine"
    )
    (peer,) = rule["from"]
    wanted = peer["podSelector"]["matchLabels"].items()
    assert wanted <= engine.items()
    assert not wanted <= head.items()
    spec = rendering.one("NetworkPolicy", f"{NAME}-ray")["spec"]
    (expression,) = spec["podSelector"]["matchExpressions"]
    assert {labels[expression["key"]] for labels in (head, engine)} == set(expression["values"])
    own, operator = spec["ingress"]
    assert own == {"from": [{"podSelector": spec["podSelector"]}]}
    assert operator["ports"] == [{"port": 8265, "protocol": "TCP"}]
    assert operator["from"][0]["podSelector"]["matchLabels"]
    assert "networkpolicy" not in helm.template(NEEDED, CLUSTER, {"networkPolicy": {"enabled": False}}).text


def test_bound_egress_still_reaches_ray_and_the_server(helm: Helm) -> None:
    given = {"networkPolicy": {"egress": {"enabled": True, "rules": [{"to": []}]}}}
    spec = helm.template(NEEDED, CLUSTER, given).one("NetworkPolicy", f"{NAME}-ray")["spec"]
    dns, ray, server, rule = spec["egress"]
    assert dns["ports"][0]["port"] == 53
    assert ray["to"] == [{"podSelector": spec["podSelector"]}]
    assert server["ports"] == [{"port": 8002, "protocol": "TCP"}]
    assert rule == {"to": []}


def test_ray_asks_for_a_token_and_serves_no_requests(helm: Helm) -> None:
    rendering = helm.template(NEEDED, CLUSTER)
    assert rendering.one("RayService")["spec"]["rayClusterConfig"]["authOptions"] == {"mode": "token"}
    assert serve_config(rendering)["proxy_location"] == "Disabled"
    # The operator's own probe of such pods would ask the proxy.
    _, engine = pods(rendering)
    assert engine["containers"][0]["readinessProbe"]["httpGet"] == {"path": "/api/healthz", "port": 52365}


def test_serve_takes_the_configuration(helm: Helm) -> None:
    schema = pytest.importorskip(
        "ray.serve.schema", reason="needs the extra: pip install 'loraplex[cluster]'"
    )
    given = serve_config(helm.template(NEEDED, CLUSTER, BETWEEN, GPU))
    (found,) = schema.ServeDeploySchema.model_validate(given).applications
    assert found.import_path == "loraplex.app.cluster.app:build"
    assert found.deployments[0].name == "engine"
