"""Services, Ingress, HTTPRoute, NetworkPolicy and PodDisruptionBudget: who reaches which port."""

from __future__ import annotations

from typing import Any

import pytest

from support.chart.helm import NAME, NEEDED, SEVERAL, VALUE_SETS, Helm, Rendering, load

pytestmark = pytest.mark.slow

PEER = {"podSelector": {"matchLabels": {"role": "operator"}}}
ROUTE = {"httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}]}}
INGRESS = {"ingress": {"enabled": True, "hosts": ["llm.example.com"]}}


def server_labels(rendering: Rendering) -> dict[str, str]:
    found: dict[str, str] = rendering.one("StatefulSet")["spec"]["template"]["metadata"]["labels"]
    return found


@pytest.mark.parametrize("path", VALUE_SETS, ids=lambda path: path.stem)
def test_everything_selects_the_servers_and_not_the_migration(helm: Helm, path: Any) -> None:
    rendering = helm.template(load(path))
    selectors = [service["spec"]["selector"] for service in rendering.of("Service")]
    selectors.append(rendering.one("StatefulSet")["spec"]["selector"]["matchLabels"])
    policies = [it for it in rendering.of("NetworkPolicy") if it["metadata"]["name"] == NAME]
    selectors += [it["spec"]["podSelector"]["matchLabels"] for it in policies]
    selectors += [it["spec"]["selector"]["matchLabels"] for it in rendering.of("PodDisruptionBudget")]
    for selector in selectors:
        assert selector.items() <= server_labels(rendering).items()
        for job in rendering.of("Job"):
            assert not selector.items() <= job["spec"]["template"]["metadata"]["labels"].items()


def test_two_releases_in_a_namespace_do_not_select_each_other(helm: Helm) -> None:
    labels = server_labels(helm.template(NEEDED))
    assert labels["app.kubernetes.io/instance"] == "rel"


def target_ports(rendering: Rendering, name: str) -> list[str]:
    return [port["targetPort"] for port in rendering.one("Service", name)["spec"]["ports"]]


def test_data_and_admin_have_services_of_their_own(helm: Helm) -> None:
    rendering = helm.template(NEEDED, {"service": {"data": {"type": "LoadBalancer", "port": 80}}})
    assert target_ports(rendering, NAME) == ["data"]
    assert target_ports(rendering, f"{NAME}-admin") == ["admin"]
    assert rendering.one("Service", NAME)["spec"]["type"] == "LoadBalancer"
    assert rendering.one("Service", NAME)["spec"]["ports"][0]["port"] == 80
    assert rendering.one("Service", f"{NAME}-admin")["spec"]["type"] == "ClusterIP"


def test_the_pods_have_names(helm: Helm) -> None:
    rendering = helm.template(NEEDED)
    headless = rendering.one("Service", rendering.one("StatefulSet")["spec"]["serviceName"])
    assert headless["spec"]["clusterIP"] == "None"


def test_the_ingress_leads_to_the_data_port_alone(helm: Helm) -> None:
    spec = helm.template(NEEDED, INGRESS, {"ingress": {"tlsSecret": "tls"}}).one("Ingress")["spec"]
    (rule,) = spec["rules"]
    (path,) = rule["http"]["paths"]
    assert path["backend"]["service"] == {"name": NAME, "port": {"name": "http"}}
    assert spec["tls"] == [{"secretName": "tls", "hosts": ["llm.example.com"]}]
    assert "tls" not in helm.template(NEEDED, INGRESS).one("Ingress")["spec"]


def test_the_route_leads_to_the_data_port_alone_and_does_not_cut_streams(helm: Helm) -> None:
    rendering = helm.template(NEEDED, ROUTE, {"service": {"data": {"port": 80}}})
    (rule,) = rendering.one("HTTPRoute")["spec"]["rules"]
    assert rule["backendRefs"] == [{"name": NAME, "port": 80}]
    assert rule["timeouts"] == {"request": "0s"}
    assert rendering.one("Service", NAME)["spec"]["ports"][0]["port"] == 80


def policy(helm: Helm, **values: Any) -> dict[str, Any]:
    found: dict[str, Any] = helm.template(NEEDED, {"networkPolicy": values}).one("NetworkPolicy")["spec"]
    return found


def test_nobody_reaches_the_admin_port_who_is_not_named(helm: Helm) -> None:
    data = [{"port": "data", "protocol": "TCP"}]
    assert policy(helm)["ingress"] == [{"ports": data}]
    assert policy(helm, dataFrom=[PEER])["ingress"] == [{"ports": data, "from": [PEER]}]
    admin = {"ports": [{"port": "admin", "protocol": "TCP"}], "from": [PEER]}
    assert policy(helm, adminFrom=[PEER])["ingress"] == [{"ports": data}, admin]
    assert helm.template(NEEDED, {"networkPolicy": {"enabled": False}}).of("NetworkPolicy") == []


def test_egress_is_open_or_what_is_named(helm: Helm) -> None:
    assert policy(helm)["policyTypes"] == ["Ingress"]
    rule = {"to": [PEER]}
    closed = policy(helm, egress={"enabled": True, "rules": [rule]})
    assert closed["policyTypes"] == ["Ingress", "Egress"]
    dns = {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]}
    cluster_dns = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}}
    assert closed["egress"] == [dns | {"to": [cluster_dns]}, rule]
    anywhere = policy(helm, egress={"enabled": True, "dns": []})
    assert anywhere["egress"] == [dns]


def test_one_pod_at_a_time_is_moved(helm: Helm) -> None:
    budget = helm.template(NEEDED).one("PodDisruptionBudget")["spec"]
    assert (budget["maxUnavailable"], budget["unhealthyPodEvictionPolicy"]) == (1, "AlwaysAllow")
    other = helm.template(NEEDED, SEVERAL, {"podDisruptionBudget": {"maxUnavailable": "50%"}})
    assert other.one("PodDisruptionBudget")["spec"]["maxUnavailable"] == "50%"
    assert helm.template(NEEDED, {"podDisruptionBudget": {"enabled": False}}).of("PodDisruptionBudget") == []
