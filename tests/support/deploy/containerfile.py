"""Reading a Containerfile: its stages, what each says of the image, and which files of the checkout it may copy."""

from __future__ import annotations

import io
import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

from dockerfile_parse import DockerfileParser

from loraplex.app.settings import Settings

SETTING_VARIABLES = frozenset(f"LORAPLEX_{name.upper()}" for name in Settings.model_fields)
SECRET_VARIABLES = frozenset(
    name
    for name in SETTING_VARIABLES
    if name.endswith(("_TOKEN", "_PEPPER", "_PASSWORD", "_SECRET", "_DATABASE_URL", "_REDIS_URL"))
)


@dataclass(frozen=True, slots=True)
class Instruction:
    name: str
    value: str


@dataclass(slots=True)
class Stage:
    name: str
    base: str
    """A stage before it, or an image."""
    instructions: list[Instruction] = field(default_factory=list)

    def values(self, name: str) -> list[str]:
        return [one.value for one in self.instructions if one.name == name]


@dataclass(frozen=True, slots=True)
class Copy:
    """COPY: `stage` is empty where the files come from the checkout."""

    stage: str
    sources: tuple[str, ...]
    target: str

    @classmethod
    def parse(cls, value: str) -> Copy:
        words = shlex.split(value)
        stage = ""
        while words[0].startswith("--"):
            option, _, given = words.pop(0).partition("=")
            assert option == "--from", f"COPY {option} is not known here"
            stage = given
        return cls(stage, tuple(words[:-1]), words[-1])


@dataclass(slots=True)
class Config:
    """What an image says of itself."""

    environment: dict[str, str] = field(default_factory=dict)
    user: str = ""
    workdir: str = "/"
    volumes: list[str] = field(default_factory=list)
    ports: list[int] = field(default_factory=list)
    stop_signal: str = ""
    health: list[str] = field(default_factory=list)
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    def apply(self, one: Instruction) -> None:
        """An instruction that changes no file."""
        match one.name:
            case "ENV":
                self.environment |= assignments(one.value, self.environment)
            case "USER":
                self.user = one.value
            case "WORKDIR":
                self.workdir = str(Path(self.workdir) / one.value)
            case "VOLUME":
                self.volumes += json.loads(one.value)
            case "EXPOSE":
                self.ports += [int(port) for port in one.value.split()]
            case "STOPSIGNAL":
                self.stop_signal = one.value
            case "HEALTHCHECK":
                self.health = json.loads(one.value.partition("CMD ")[2])
            case "ENTRYPOINT":
                self.entrypoint = json.loads(one.value)
            case "CMD":
                self.command = json.loads(one.value)


def assignments(value: str, known: Mapping[str, str]) -> dict[str, str]:
    """`NAME=VALUE …` with variables that were set before, as in ENV and ARG."""
    pairs = (word.partition("=") for word in shlex.split(value))
    return {name: Template(given).safe_substitute(known) for name, _, given in pairs}


def read_stages(path: Path, arguments: Mapping[str, str] | None = None) -> list[Stage]:
    """In order, the image last. `arguments` are those of the build; the defaults are the file's."""
    given: dict[str, str] = {}
    stages: list[Stage] = []
    for step in DockerfileParser(fileobj=io.BytesIO(path.read_bytes())).structure:
        name, value = step["instruction"], step["value"]
        if name == "COMMENT":
            continue
        if name == "FROM":
            base, _, alias = Template(value).substitute(given).partition(" AS ")
            stages.append(Stage(alias, base))
        elif not stages:
            assert name == "ARG", f"{name} before the first FROM"
            given |= assignments(value, given) | dict(arguments or {})
        else:
            stages[-1].instructions.append(Instruction(name, value))
    return stages


def image_chain(stages: list[Stage]) -> list[Stage]:
    """The stages that the last one is built on, the deepest first, and the last one."""
    named = {stage.name: stage for stage in stages if stage.name}
    chain = [stages[-1]]
    while (base := named.get(chain[0].base)) is not None:
        chain.insert(0, base)
    return chain


def image_config(stages: list[Stage]) -> Config:
    """Of the last stage. PATH begins as that of the base image."""
    config = Config({"PATH": "/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin"})
    for stage in image_chain(stages):
        for one in stage.instructions:
            config.apply(one)
    return config


class IgnoreFile:
    """A .dockerignore: the last line that matches a path, or a folder that it is in, decides."""

    def __init__(self, text: str) -> None:
        self._rules: list[tuple[bool, re.Pattern[str]]] = []
        for line in text.splitlines():
            pattern = line.strip()
            if pattern and not pattern.startswith("#"):
                self._rules.append((pattern.startswith("!"), _regular(pattern.lstrip("!"))))

    def sends(self, path: str) -> bool:
        """Whether the file goes to the build."""
        parts = Path(path).parts
        names = ["/".join(parts[: end + 1]) for end in range(len(parts))]
        decided = [sent for sent, rule in self._rules if any(rule.fullmatch(name) for name in names)]
        return decided[-1] if decided else True


def _regular(pattern: str) -> re.Pattern[str]:
    parts = re.split(r"(\*\*/|\*)", pattern.strip("/"))
    meanings = {"**/": "(?:.*/)?", "*": "[^/]*"}
    return re.compile("".join(meanings.get(part, re.escape(part)) for part in parts))
