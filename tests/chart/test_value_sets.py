"""Every value set of `ci/` passes the linter, is rendered alike by both Helms, and every object is a valid one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest

from loraplex.app.settings import SECRET_SETTINGS
from support.chart.helm import NEEDED, VALUE_SETS, Helm, load
from support.chart.validation import breaches_of_restricted, validate

pytestmark = pytest.mark.slow

every_set = pytest.mark.parametrize("path", VALUE_SETS, ids=lambda path: path.stem)


def test_there_are_enough_of_them() -> None:
    assert len(VALUE_SETS) >= 12


@every_set
def test_lint_finds_nothing(helms: list[Helm], path: Path) -> None:
    for helm in helms:
        assert "0 chart(s) failed" in helm.lint(load(path))


@every_set
def test_both_helms_render_the_same(helms: list[Helm], path: Path) -> None:
    oldest, newest = helms[0].template(load(path)), helms[-1].template(load(path))
    assert sorted(map(repr, oldest.objects)) == sorted(map(repr, newest.objects))


@every_set
def test_objects_are_valid(helm: Helm, path: Path) -> None:
    objects = helm.template(load(path)).objects
    for found in objects:
        validate(found)
    names = [(found["kind"], found["metadata"]["name"]) for found in objects]
    assert len(names) == len(set(names))


def scales(path: Path) -> bool:
    """Whether Ray's autoscaler is there, which asks Kubernetes for pods."""
    cluster = load(path).get("cluster", {})
    return bool(cluster.get("maxReplicas", 1) > cluster.get("minReplicas", 1))


def is_rays(container: dict[str, Any]) -> bool:
    """Whether the operator puts Ray's command in."""
    return container["name"] in {"ray-head", "engine"}


@every_set
def test_pods_are_restricted(helm: Helm, path: Path) -> None:
    for pod in helm.template(load(path)).pods():
        assert breaches_of_restricted(pod) == []
        assert pod["automountServiceAccountToken"] is (
            pod["containers"][0]["name"] == "ray-head" and scales(path)
        )
        assert pod["enableServiceLinks"] is False
        assert pod["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"


@every_set
def test_secrets_come_by_reference_alone(helm: Helm, path: Path) -> None:
    """No object holds one: there is no Secret, no ConfigMap but dashboards, no argument, and no value of a secret's
    variable."""
    rendering = helm.template(load(path))
    maps = [
        found for found in rendering.of("ConfigMap") if "grafana_dashboard" not in found["metadata"]["labels"]
    ]
    assert maps + rendering.of("Secret") == []
    secrets = {f"LORAPLEX_{name.upper()}" for name in SECRET_SETTINGS} | {"HF_TOKEN"}
    for pod in rendering.pods():
        for container in pod["containers"]:
            if not is_rays(container):
                assert container["command"] in (["loraplex", "serve"], ["loraplex", "migrate"])
            assert "args" not in container
            for variable in container["env"]:
                if variable["name"] in secrets:
                    assert variable.keys() == {"name", "valueFrom"}
                    assert variable["valueFrom"].keys() == {"secretKeyRef"}


def test_a_wrong_object_is_noticed(helm: Helm) -> None:
    """The checks above can fail: an unknown field, of a core kind and of a custom one."""
    values = load(next(path for path in VALUE_SETS if path.stem == "monitoring"))
    rendering = helm.template(NEEDED, values)
    for kind in ("Service", "StatefulSet", "ServiceMonitor", "PrometheusRule"):
        found = rendering.of(kind)[0]
        found["spec"]["fieldThatIsNot"] = 1
        with pytest.raises(jsonschema.ValidationError):
            validate(found)
