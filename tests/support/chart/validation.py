"""Is a rendered object one that Kubernetes takes?"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import jsonschema
import kubernetes_validate

from support.chart.helm import ray_templates
from support.markdown import ROOT

OLDEST, NEWEST = "1.29", "1.37"
"""Versions of Kubernetes: the chart's kubeVersion, and the newest whose schemas are at hand."""
CRDS = ROOT / "tests/chart/crds"
"""Schemas of the kinds that operators bring."""


@cache
def _crd(kind: str) -> jsonschema.Draft7Validator:
    schema = json.loads((CRDS / f"{kind}.json").read_text("utf-8"))
    jsonschema.Draft7Validator.check_schema(schema)
    return jsonschema.Draft7Validator(schema)


def validate(found: dict[str, Any]) -> None:
    """Raises jsonschema.ValidationError for a wrong object, SchemaNotFoundError for an unknown kind."""
    if (CRDS / f"{found['kind']}.json").is_file():
        _crd(found["kind"]).validate(found)
        for template in ray_templates(found):
            pod = {"apiVersion": "v1", "kind": "Pod", **template}
            _validate_core(json.dumps(pod | {"metadata": {"name": "x", **template["metadata"]}}))
        return
    _validate_core(json.dumps(found))


@cache
def _validate_core(text: str) -> None:
    """Of one of Kubernetes' own kinds. Value sets share most of their objects."""
    for version in (OLDEST, NEWEST):
        kubernetes_validate.validate(json.loads(text), version, strict=True)


def breaches_of_restricted(pod: dict[str, Any]) -> list[str]:
    """What of the Pod Security Standard "restricted" a pod breaks, and a read-only root beside."""
    security = pod.get("securityContext", {})
    found = []
    if any(pod.get(name) for name in ("hostNetwork", "hostPID", "hostIPC")):
        found.append("a namespace of the host")
    kinds = {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
    found += [f"volume {it['name']}" for it in pod.get("volumes", []) if not kinds & it.keys()]
    if security.get("runAsNonRoot") is not True or security.get("runAsUser", 1) == 0:
        found.append("root")
    if security.get("seccompProfile") != {"type": "RuntimeDefault"}:
        found.append("seccomp")
    for container in pod["containers"] + pod.get("initContainers", []):
        own = container.get("securityContext", {})
        if own.get("allowPrivilegeEscalation") is not False or own.get("privileged"):
            found.append("privileges")
        if own.get("capabilities") != {"drop": ["ALL"]}:
            found.append("capabilities")
        if own.get("readOnlyRootFilesystem") is not True:
            found.append("a root that can be written")
        if any("hostPort" in port for port in container.get("ports", [])):
            found.append("a port of the host")
    return found
