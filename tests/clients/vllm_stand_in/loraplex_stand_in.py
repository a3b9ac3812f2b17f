"""A pytest plugin for vLLM's entrypoint tests: the server that they start is ours, and vLLM is not installed.

It runs in an environment of its own (`make clients`), and is given as environment variables: where
clients.outside.broker starts servers (LORAPLEX_BROKER), a directory with the model's tokenizer
(LORAPLEX_TOKENIZER), adapters to load where a test wants some from a hub (LORAPLEX_ADAPTERS, a folder of folders),
vLLM's version (VLLM_VERSION) and the file that gets one JSON line a test (LORAPLEX_OUTCOMES).
"""

from __future__ import annotations

import base64
import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import json
import os
import sys
import types
import urllib.parse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import anthropic
import httpx
import httpx2
import openai
import pytest
import requests

STUBBED_TESTS = (
    "tests.utils",
    "tests.conftest",
    "tests.entrypoints.openai.chat_completion.test_serving_chat",
    "tests.models",
)
STUBBED = ("vllm", "torch", "PIL", "fastapi", "openai_harmony", "mcp", "lm_eval")
"""Imports of vLLM's tests that a test of a server over HTTP does not need, at least not as they are."""
CLIENTS = (openai.OpenAI, openai.AsyncOpenAI, anthropic.Anthropic, anthropic.AsyncAnthropic)
BROKER_TIMEOUT_S = 300.0


class RemoteServer:
    """Stands where vLLM's tests start `vllm serve`: the same attributes, over a `loraplex serve` of its own."""

    keys: ClassVar[dict[str, str]] = {}
    """Host and port of a server → its key, for requests without one: vLLM wants none, and its tests send none."""
    model = ""
    """What the last server serves, for requests to /v1/responses without a model: vLLM takes its only one."""

    def __init__(
        self, model: str, vllm_serve_args: Sequence[str], *, env_dict: dict[str, str] | None = None, **_: Any
    ) -> None:
        asked = {"model": model, "arguments": [str(argument) for argument in vllm_serve_args]}
        answer = requests.post(os.environ["LORAPLEX_BROKER"], json=asked, timeout=BROKER_TIMEOUT_S)
        if answer.status_code != 200:
            pytest.fail(f"loraplex serve did not start: {answer.text}", pytrace=False)
        started = answer.json()
        self.url_root = str(started["url"])
        self.DUMMY_API_KEY = str(started["key"])
        split = urllib.parse.urlsplit(self.url_root)
        self.keys[split.netloc] = self.DUMMY_API_KEY
        RemoteServer.model = str(started["model"])
        self.host, self.port, self.uds = split.hostname, split.port, None
        self.show_hidden_metrics = False

    def __enter__(self) -> RemoteServer:
        return self

    def __exit__(self, *_: object) -> None:
        """The broker keeps it for the next who asks for the same."""

    def url_for(self, *parts: str) -> str:
        return f"{self.url_root}/{'/'.join(part.strip('/') for part in parts if part)}"

    def _options(self, base: str, options: dict[str, Any]) -> dict[str, Any]:
        return {"base_url": base, "api_key": self.DUMMY_API_KEY, "max_retries": 0, "timeout": 600, **options}

    def get_client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(**self._options(self.url_for("v1"), options))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self._options(self.url_for("v1"), options))

    def get_client_anthropic(self, **options: Any) -> anthropic.Anthropic:
        return anthropic.Anthropic(**self._options(self.url_root, options))

    def get_async_client_anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(**self._options(self.url_root, options))


class _Anything(type):
    """Classes whose every attribute is such a class: good to import, to subclass, to decorate, to be false."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _anything(name)

    def __bool__(cls) -> bool:
        return False

    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        return cls

    def __getitem__(cls, _: Any) -> Any:
        return cls

    def __iter__(cls) -> Iterator[Any]:
        return iter(())


def _anything(name: str) -> Any:
    exceptional = name.endswith(("Error", "Exception"))
    return type(name, (Exception,), {}) if exceptional else _Anything(name, (), {})


class _Stub(types.ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _anything(name)


@functools.cache
def _local_tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(os.environ["LORAPLEX_TOKENIZER"])


def _tokenizer(*_: Any, **__: Any) -> Any:
    """The served model's, whatever name is asked for."""
    return _local_tokenizer()


class _ModelConfig:
    """vLLM's, as far as a test asks for the size of the vocabulary."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def get_vocab_size(self) -> int:
        return len(_tokenizer())


class _Embeddings(openai.types.CreateEmbeddingResponse):
    """vLLM's answer: with fields of its own, which it fills in where they are missing."""

    id: str = "embd"
    created: int = 0


def _other_vectors(*_: Any, **__: Any) -> None:
    pytest.skip("compares vectors with those of the model that the test names")


class _Hub:
    """Adapters of a hub: each name has one of ours, always the same."""

    def snapshot_download(self, repo_id: str = "", **_: Any) -> str:
        folders = sorted(path for path in Path(os.environ["LORAPLEX_ADAPTERS"]).iterdir() if path.is_dir())
        return str(folders[sum(repo_id.encode()) % len(folders)])


def _filled(module: types.ModuleType) -> None:
    """What tests of a server do need of these modules."""
    given: dict[str, dict[str, Any]] = {
        "vllm.config": {"ModelConfig": _ModelConfig},
        "vllm.tokenizers": {"get_tokenizer": _tokenizer},
        "vllm.transformers_utils.repo_utils": {"hf_api": _Hub},
        "vllm.entrypoints.pooling.embed.protocol": {"EmbeddingResponse": _Embeddings},
        "tests.models.language.pooling.embed_utils": {"run_embedding_correctness_test": _other_vectors},
        "torch": {"iinfo": lambda _: types.SimpleNamespace(min=-(2**63), max=2**63 - 1)},
        "vllm.version": {"__version__": os.environ["VLLM_VERSION"]},
        "vllm": {
            "__version__": os.environ["VLLM_VERSION"],
            "version": types.SimpleNamespace(_prev_minor_version=lambda: "0.0"),
        },
        "tests.utils": {
            "RemoteOpenAIServer": RemoteServer,
            "RemoteOpenAIServerCustom": RemoteServer,
            "RemoteVLLMServer": RemoteServer,
            "VLLM_PATH": Path.cwd(),
            "ROCM_EXTRA_ARGS": [],
            "multi_gpu_only": pytest.mark.skip(reason="wants several GPUs"),
            "requires_fp8": pytest.mark.skip(reason="wants a GPU with FP8"),
        },
    }
    vars(module).update(given.get(module.__name__, {}))


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Any, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        in_stub = any(f"{name}.".startswith(f"{stub}.") for stub in STUBBED_TESTS)
        if in_stub or name.partition(".")[0] in STUBBED:
            return importlib.util.spec_from_loader(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        _filled(module)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    from transformers import AutoTokenizer

    sys.meta_path.insert(0, _Finder())
    sys.modules["pybase64"] = base64  # the same functions
    _local_tokenizer()
    AutoTokenizer.from_pretrained = _tokenizer  # of a hub, in some tests
    for client, method in (
        (requests.Session, "prepare_request"),
        (httpx.Client, "build_request"),
        (httpx.AsyncClient, "build_request"),
        (httpx2.Client, "build_request"),
        (httpx2.AsyncClient, "build_request"),
    ):
        _completed(client, method)


def _completed(client: type, method: str) -> None:
    """Requests that this method of a client class makes carry the key of the server that they go to, if they have
    none, and those to /v1/responses a model."""
    make = getattr(client, method)

    def made(self: Any, *arguments: Any, **options: Any) -> Any:
        if str(options.get("url", "")).endswith("/responses") and options.get("content"):
            body = json.loads(options["content"])
            if body.get("model") is None:
                options["content"] = json.dumps({**body, "model": RemoteServer.model})
        request = make(self, *arguments, **options)
        key = RemoteServer.keys.get(urllib.parse.urlsplit(str(request.url)).netloc)
        if key and not {"authorization", "x-api-key"} & {name.lower() for name in request.headers}:
            request.headers["authorization"] = f"Bearer {key}"
        return request

    setattr(client, method, made)


def _asks_a_server(item: pytest.Item) -> bool:
    values = getattr(item, "funcargs", {}).values()
    each = [one for value in values for one in (value if isinstance(value, tuple) else (value,))]
    if any(isinstance(value, (RemoteServer, *CLIENTS)) for value in each):
        return True
    return "Remote" in inspect.getsource(item.function)  # type: ignore[attr-defined]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    if not _asks_a_server(item):
        pytest.skip("in process: about vLLM's own classes")


@pytest.fixture(scope="session")
def local_asset_server() -> Any:
    """vLLM's server of images, for tests of models that see."""
    return _anything("local_asset_server")


@pytest.fixture(scope="session")
def hf_runner() -> Any:
    """What loads the model that a test names, to compare."""
    return lambda *_, **__: contextlib.nullcontext()


def _tell(line: dict[str, Any]) -> None:
    with open(os.environ["LORAPLEX_OUTCOMES"], "a") as file:
        file.write(json.dumps(line) + "\n")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.passed:
        return
    told = report.longrepr
    text = told[2] if isinstance(told, tuple) else str(told or "")
    _tell({"test": report.nodeid, "when": report.when, "outcome": report.outcome, "text": text[-4000:]})


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        text = str(report.longrepr)[-4000:]
        _tell({"test": report.nodeid, "when": "collect", "outcome": "failed", "text": text})
