"""Engines and whole servers killed while prefixes go to host memory and to the disk, and come back from there: each
answer is that of a server without either."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.servers.live_server import LiveServer, checked, write_tiny_adapter

SIZES = {"dtype": "float32", "max_model_len": 400, "adapter_memory": "16MiB", "adapter_cpu_memory": "16MiB"}
MODELS = ("tiny", "same", "own")
"""The base, an adapter whose bytes are equal in both tenants, and one that differs."""
TENANTS = ("acme", "globex")
PROMPTS = 6
CLIENTS = 3


@dataclass(frozen=True)
class Question:
    tenant: str
    model: str
    prompt: str


@dataclass(frozen=True)
class Answer:
    """The text, and the log probability of each of its tokens."""

    text: str
    logprobs: tuple[float, ...]
    cached: int = field(compare=False)


QUESTIONS = [
    Question(tenant, model, f"{number} " * 100 + "and then")
    for tenant in TENANTS
    for model in MODELS
    for number in range(PROMPTS)
]


class Tenants:
    """The two tenants on a server, with their adapters and keys."""

    def __init__(self, server: LiveServer, folder: Path) -> None:
        self.server = server
        self.keys = {}
        for seed, tenant in enumerate(TENANTS, 10):
            server.create_tenant(tenant)
            self.keys[tenant] = server.create_key(tenant)
            server.upload(tenant, "same", write_tiny_adapter(folder / "same", seed=1))
            server.upload(tenant, "own", write_tiny_adapter(folder / tenant, seed=seed))

    def ask(self, question: Question) -> Answer | None:
        """None where the engine died meanwhile."""
        body = {
            "model": question.model, "prompt": question.prompt, "max_tokens": 6, "temperature": 0, "logprobs": 1,
            "ignore_eos": True,
        }  # fmt: skip
        try:
            with self.server.client(self.keys[question.tenant]) as client:
                answer = client.post("/v1/completions", json=body)
        except httpx.TransportError:
            return None
        told: dict[str, Any] = answer.json()
        if answer.status_code != 200:
            assert told["error"]["code"] == "engine_restarting", told
            return None
        (choice,) = told["choices"]
        return Answer(
            choice["text"],
            tuple(choice["logprobs"]["token_logprobs"]),
            told["usage"]["prompt_tokens_details"]["cached_tokens"],
        )


@pytest.fixture(scope="module")
def undisturbed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Question, Answer]:
    folder = tmp_path_factory.mktemp("undisturbed")
    with LiveServer(tiny_model, folder / "data", kv_cache_memory="16MiB", **SIZES) as server:
        tenants = Tenants(server, folder)
        answers = {question: tenants.ask(question) for question in QUESTIONS}
    found = {question: answer for question, answer in answers.items() if answer is not None}
    assert len(found) == len(QUESTIONS)
    assert len({(answer.text, answer.logprobs) for answer in found.values()}) > PROMPTS * len(MODELS)
    return found


@pytest.fixture
def kept(tiny_model: Path, tmp_path: Path) -> Iterator[Tenants]:
    """The device has room for a few prompts, host memory for a third of them, and the disk for all."""
    disk = f"{tmp_path / 'prefixes'},bytes=64MiB"
    with LiveServer(
        tiny_model, tmp_path / "data", kv_cache_memory="384KiB", kv_host_memory="1MiB", kv_disk=disk, **SIZES
    ) as server:
        yield Tenants(server, tmp_path)


class Crowd:
    """Clients that ask in random order until the first of them finds no engine. `answers` are theirs."""

    def __init__(self, tenants: Tenants, seed: int) -> None:
        self.answers: list[tuple[Question, Answer]] = []
        self._tenants = tenants
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(f"{seed}/{number}"),))
            for number in range(CLIENTS)
        ]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()

    def _run(self, order: random.Random) -> None:
        while (answer := self._tenants.ask(question := order.choice(QUESTIONS))) is not None:
            self.answers.append((question, answer))


def drill(tenants: Tenants, undisturbed: dict[Question, Answer], kills: int) -> None:
    """Every fifth time the whole server is killed, else its engine, after a random number of answers."""
    server, moments = tenants.server, random.Random(59)
    asked = cached = from_host = from_disk = 0
    for number in range(kills):
        crowd, enough = Crowd(tenants, number), moments.randint(4, 80)
        server.wait(lambda: len(crowd.answers) >= enough, 120)  # noqa: B023
        tiers = checked(server.admin.get("cache"))["totals"]["prefixes"]
        from_host, from_disk = from_host + tiers["restored"], from_disk + tiers["disk"]["restored"]
        if number % 5 == 4:
            server.kill()
            crowd.join()
            server.start()
        else:
            server.kill_engine()
            crowd.join()
            server.wait_ready()
        for question, answer in crowd.answers:
            assert answer == undisturbed[question], question
        asked, cached = asked + len(crowd.answers), cached + sum(a.cached for _, a in crowd.answers)
    print(
        f"{kills} kills, {asked} answers, {cached} prompt tokens found, "
        f"{from_host} blocks from host memory, {from_disk} from the disk"
    )
    assert min(cached, from_host, from_disk) > 0
    for question in QUESTIONS:
        assert tenants.ask(question) == undisturbed[question]


@pytest.mark.slow
def test_no_kill_changes_an_answer(kept: Tenants, undisturbed: dict[Question, Answer]) -> None:
    drill(kept, undisturbed, 5)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_two_hundred_kills_change_no_answer(kept: Tenants, undisturbed: dict[Question, Answer]) -> None:
    drill(kept, undisturbed, 200)


@pytest.mark.slow
def test_prefixes_of_a_deleted_version_leave_the_disk(kept: Tenants, tmp_path: Path) -> None:
    def files() -> int:
        return sum(path.is_file() for path in (tmp_path / "prefixes").rglob("*"))

    for _ in range(3):
        for question in QUESTIONS:
            assert kept.ask(question) is not None
    kept.server.wait(
        lambda: checked(kept.server.admin.get("cache"))["totals"]["prefixes"]["disk"]["bytes_used"] > 0
    )
    before = files()
    checked(kept.server.admin.delete("tenants/acme/adapters/own"), 204)
    kept.server.wait(lambda: files() < before)
