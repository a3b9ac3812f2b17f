"""The pages under "Start here" in the README, as a stranger tries them: in order, in a fresh home, each in a shell."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from support import markdown
from support.servers.live_server import EXAMPLE_ADAPTERS, free_ports
from support.transcripts import Step, differences, run_steps, shell_environment, steps_of

HERE = ("install", "first-adapter", "adapters")
"""Pages whose commands run here."""
ELSEWHERE = {"api": "tests/e2e/test_page_examples.py", "first-day": "tests/docs/test_walk.py"}
NOT_RUN = {
    "make quickstart": "CI begins with it, on a bare machine; here the same command without the installation",
    "-m venv": "installs another environment: tests/deploy/test_wheel.py and tests/app/test_install_torch.py",
    "docker": "no container engine: tests/deploy/test_image_steps.py runs the build and these commands in namespaces",
    "helm install": "no cluster: tests/chart/test_pages.py renders it",
    "adapter import": "needs a place that the operator allowed: tests/admin/uploads/test_imports.py",
    "load_lora_adapter": "needs a folder that the operator allowed: tests/admin/uploads/test_runtime_loading.py",
}
"""A block with this word is not run, and why."""
_BLOCK = re.compile(r"^```(bash|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def start_here() -> list[str]:
    section = markdown.read("README.md").partition("\n## Start here\n")[2].partition("\n## ")[0]
    return [Path(link).stem for link in markdown.links(section)]


def blocks(page: str) -> Iterator[tuple[str, str, str]]:
    """Language and text of each block of commands, and the word by which it is not run, if it is not."""
    for language, text in _BLOCK.findall(markdown.read(f"docs/{page}.md")):
        yield language, text, next((word for word in NOT_RUN if word in text), "")


def test_five_pages_lead_in_and_each_is_run() -> None:
    pages = start_here()
    assert len(pages) == 5
    assert set(pages) == {*HERE, *ELSEWHERE}
    for page, test in ELSEWHERE.items():
        assert page in markdown.read(test), test


def test_the_menu_of_the_site_begins_with_them() -> None:
    nav = markdown.read("mkdocs.yml").partition("\nnav:\n")[2]
    first = yaml.safe_load(nav)[0]["Start here"]
    assert [Path(path).stem for entry in first for path in entry.values()] == ["README", *start_here()]


def test_what_is_not_run_is_on_a_page_and_its_test_is_there() -> None:
    unused = set(NOT_RUN) - {word for page in HERE for *_, word in blocks(page)}
    assert unused == set()
    named = [test for reason in NOT_RUN.values() for test in re.findall(r"tests/\S+\.py", reason)]
    assert [test for test in named if not (markdown.ROOT / test).is_file()] == []


@dataclass(frozen=True)
class Stranger:
    """A checkout with a quickstart that runs in it, and what a shell there has."""

    folder: Path
    environment: dict[str, str]
    here: dict[str, str]

    def run(self, page: str) -> list[str]:
        """What a page's commands do in a new shell, in their order, that is another thing than the page shows."""
        steps = [Step('set -e; curl() { command curl --fail-with-body "$@"; }', ())]
        for language, text, word in blocks(page):
            if not word:
                steps += (
                    steps_of(f"```console\n{text}```\n") if language == "console" else [Step(text, ("…",))]
                )
        assert len(steps) > 2
        return differences(steps, run_steps(steps, self.folder, self.environment, self.here, timeout=580))


@pytest.fixture(scope="module")
def stranger(real_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stranger]:
    """Models and compiled kernels come from the cache: CI's quickstart begins without. The second training, of whose
    answers the page shows none, is a shorter one."""
    folder, home = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("home")
    for name in ("examples", "tools", "constraints.txt"):
        (folder / name).symlink_to(markdown.ROOT / name)
    (folder / ".venv").symlink_to(sys.prefix)
    for name, trained in (("out", "pirate"), ("out2", "json")):  # adapters.md: "your training"
        (folder / name).symlink_to(EXAMPLE_ADAPTERS / trained)
    data_port, admin_port = free_ports(2)
    environment = shell_environment(
        HOME=str(home),
        PATH="/usr/local/bin:/usr/bin:/bin",
        XDG_CACHE_HOME=os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache"),
        OMP_NUM_THREADS="1",  # beside other tests; a second thread of torch's would wait in a loop for a core
        LORAPLEX_ADMIN_URL=f"http://127.0.0.1:{admin_port}",
    )
    command = [
        folder / ".venv/bin/loraplex",
        "quickstart",
        "--port",
        str(data_port),
        "--admin-port",
        str(admin_port),
        "--max-tokens",
        "4",
    ]
    settings = {
        "LORAPLEX_KV_CACHE_MEMORY": "512MiB",
        "LORAPLEX_ADAPTER_MEMORY": "256MiB",
        "LORAPLEX_THREADS": "1",
        "LORAPLEX_ENGINE_SPARE": "false",
    }
    log = folder / "quickstart.log"
    with open(log, "wb") as output:
        quickstart = subprocess.Popen(
            command,
            cwd=folder,
            env=environment | settings,
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
        )
    try:
        end = time.monotonic() + 280
        while "The server stays up" not in log.read_text():
            assert quickstart.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.2)
        assert str(real_model_dir) in log.read_text(), "the folder of the base is printed"
        here = {"127.0.0.1:8000": f"127.0.0.1:{data_port}", "--steps 10": "--steps 2"}
        yield Stranger(folder, environment, here)
    finally:
        quickstart.terminate()
        quickstart.wait(timeout=90)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", HERE)
def test_a_page_is_tried_without_a_stumble(page: str, stranger: Stranger) -> None:
    assert stranger.run(page) == []
