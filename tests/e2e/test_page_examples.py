"""Examples on the pages for readers with a key: each is run as it is printed, and is served."""

from __future__ import annotations

import re
from contextlib import chdir
from pathlib import Path

import pytest

from support import markdown
from support.servers.live_server import EXAMPLE_ADAPTERS, SERVED_NAME, Shop
from support.transcripts import Step, replaced, run_steps, shell_environment

pytestmark = pytest.mark.slow

PAGES = ("api", "batches", "dialects", "embeddings", "structured-output", "tools")
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
STRICT = Step('curl() { command curl --fail-with-body "$@"; }; set -e', ())
"""A failing command, or an answer that is an error, ends the shell."""


@pytest.fixture(scope="module")
def folder(real: Shop, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a reader is after `make quickstart`."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "data").mkdir()
    (folder / "examples").symlink_to(markdown.ROOT / "examples")
    real.server.create_tenant("demo")
    real.server.upload("demo", "pirate", EXAMPLE_ADAPTERS / "pirate")
    (folder / "data" / "quickstart-key").write_text(f"{real.server.create_key('demo')}\n")
    (folder / "data" / "admin-token").write_text(f"{real.server.admin_token}\n")
    return folder


@pytest.mark.parametrize("name", PAGES)
def test_examples_of_a_page_are_served(name: str, real: Shop, folder: Path) -> None:
    here = {
        "127.0.0.1:8000": f"127.0.0.1:{real.server.data_port}",
        "127.0.0.1:8001": f"127.0.0.1:{real.server.admin_port}",
        '"SmolLM2-135M-Instruct"': f'"{SERVED_NAME}"',
    }
    blocks: list[tuple[str, str]] = BLOCK.findall(markdown.read(f"docs/{name}.md"))
    commands = [text for language, text in blocks if language == "bash" and "claude" not in text]
    assert any("curl" in text for text in commands)
    urls = {"LORAPLEX_ADMIN_URL": real.server.admin_url, "LORAPLEX_URL": real.server.data_url}
    run_steps([STRICT, *(Step(text, ()) for text in commands)], folder, shell_environment(**urls), here)
    names = {"URL": real.server.data_url, "KEY": (folder / "data" / "quickstart-key").read_text().strip()}
    for language, text in blocks:
        if language == "python":
            with chdir(folder):
                exec(replaced(text, here), dict(names))


def test_the_call_that_tools_md_prints_is_what_comes(real: Shop, folder: Path) -> None:
    page = markdown.read("docs/tools.md")
    (_, command), *_ = BLOCK.findall(page)
    printed = re.search(r'"name": ("\w+"), "arguments": ("(?:[^"\\]|\\.)*")', page)
    assert printed is not None
    here = {
        "127.0.0.1:8000": f"127.0.0.1:{real.server.data_port}",
        '"SmolLM2-135M-Instruct"': f'"{SERVED_NAME}"',
    }
    (answered,) = run_steps([Step(command, ())], folder, shell_environment(), here)
    called = f'"function":{{"name":{printed[1]},"arguments":{printed[2]}}}'
    assert called in "".join(answered.output), answered
