"""vLLM's own tests of its HTTP entrypoints, from its source package, against `loraplex serve`."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from clients.outside.servers import Broker, model_directory
from clients.outside.vllm_reasons import IN_PROCESS, NOT_RUN
from clients.outside.vllm_source import VERSION, vllm_source
from support.clients.outside_clients import INSTALLED
from support.servers.live_server import EXAMPLE_ADAPTERS

ROOMS = (
    "entrypoints/openai",
    "entrypoints/serve",
    "entrypoints/anthropic",
    "entrypoints/pooling/embed",
    "entrypoints/tool_parsers",
    "tool_use",
)
STAND_IN = Path(__file__).resolve().parents[1] / "vllm_stand_in"
TEST_TIMEOUT_S = 120
TEXT_LENGTH = 2000
FILE_TIMEOUT_S = 900
OPTIONS = {"tool_use": ("--models", "hermes")}
"""One of the dozen models that these tests name: the model is the same to us."""


@dataclass
class FileResult:
    """What came of one test file. `tests` maps a test to its outcome and text; `why` speaks for a file not run."""

    path: str
    why: str = ""
    tests: dict[str, dict[str, str]] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)


def test_files(source: Path) -> list[Path]:
    """Those that name the same model follow each other, so that they can share a server."""
    tests = source / "tests"
    found = sorted(path for room in ROOMS for path in (tests / room).rglob("test_*.py"))
    return sorted(
        found, key=lambda path: "".join(re.findall(r"^MODEL_NAME = .*", path.read_text(), re.MULTILINE))
    )


def asks_a_server(path: Path) -> bool:
    """Whether the file, or the conftest beside it, starts a server."""
    return any(
        "RemoteOpenAIServer" in near.read_text()
        for near in (path, path.with_name("conftest.py"))
        if near.exists()
    )


def run(work: Path, patterns: list[str]) -> Iterator[dict[str, Any]]:
    """The results of every file, or of those whose path holds a pattern, each as soon as it is there."""
    source = vllm_source(work)
    with tempfile.TemporaryDirectory(prefix="servers-", dir=work) as servers, Broker(Path(servers)) as broker:
        for path in test_files(source):
            name = str(path.relative_to(source / "tests"))
            if patterns and not any(pattern in name for pattern in patterns):
                continue
            result = FileResult(name, next((why for glob, why in NOT_RUN if fnmatch.fnmatch(name, glob)), ""))
            if not result.why and not asks_a_server(path):
                result.why = IN_PROCESS
            if not result.why:
                _run_file(source, result, broker, work)
                print(name, dict(Counter(test["outcome"] for test in result.tests.values())), flush=True)
            yield asdict(result)


def _run_file(source: Path, result: FileResult, broker: Broker, work: Path) -> None:
    outcomes = work / "outcomes.jsonl"
    outcomes.unlink(missing_ok=True)
    broker.file = result.path
    python = INSTALLED / "vllm_tests" / "bin" / "python"
    command = [str(python), "-m", "pytest", "-q", f"tests/{result.path}", "--rootdir", "."]
    command += ["--confcutdir", "tests/" + result.path.partition("/")[0], "-p", "loraplex_stand_in"]
    command += ["-p", "no:cacheprovider", "--timeout", str(TEST_TIMEOUT_S), "-o", "addopts="]
    command += OPTIONS.get(result.path.partition("/")[0], ())
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ} | {
        "PYTHONPATH": str(STAND_IN),
        "PYTHONDONTWRITEBYTECODE": "1",
        "LORAPLEX_BROKER": broker.url,
        "LORAPLEX_TOKENIZER": str(model_directory()),
        "LORAPLEX_ADAPTERS": str(EXAMPLE_ADAPTERS),
        "LORAPLEX_OUTCOMES": str(outcomes),
        "VLLM_VERSION": VERSION,
        "HF_HUB_OFFLINE": "1",
    }
    log = work / "pytest.log"
    try:
        with open(log, "wb") as file:
            subprocess.run(
                command,
                cwd=source,
                env=environment,
                timeout=FILE_TIMEOUT_S,
                check=False,
                stdout=file,
                stderr=file,
            )
    except subprocess.TimeoutExpired:
        result.tests["(the file)"] = {"outcome": "failed", "text": f"not done after {FILE_TIMEOUT_S} s"}
    if not outcomes.exists():
        result.tests["(the file)"] = {
            "outcome": "failed",
            "text": log.read_text(errors="replace")[-TEXT_LENGTH:],
        }
    for line in outcomes.read_text().splitlines() if outcomes.exists() else []:
        told = json.loads(line)
        if "Skipping config" in told["text"]:  # another of OPTIONS' models
            continue
        test = told["test"].partition("::")[2] or "(the file)"
        result.tests[test] = {"outcome": told["outcome"], "text": told["text"][-TEXT_LENGTH:]}
    result.left = sorted(broker.left.get(result.path, ()))
