"""What a server computes in a second, with settings in turns: long prompts, alone and beside a stream, and chats."""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

from bench.hogs.asking import Asking, Outcome, ask
from bench.hogs.figures import Rate
from bench.hogs.mixes import EIGHT, SENTENCE, STREAM
from bench.hogs.servers import in_turns, make_target, name_of, serving, upload
from bench.hogs.tenants import Target, beside, client
from support.servers.live_server import LiveServer

PROMPTS, AT_A_TIME = 8, 4
CHATS, ANSWER = 48, 64
TENANTS = 16
SINGLE_PROMPTS = 4
SETTLE_S = 2.0
RATES = {
    "alone": Rate("prompts of 6,000 tokens, 4 at a time", "tokens/s", 0.99),
    "beside": Rate("the same beside another tenant's stream", "tokens/s", 0.88),
    "one tenant": Rate("16 chats at a time over 16 adapters, of one tenant", "tokens/s", 0.99),
    "tenants": Rate("the same, of 16 tenants", "tokens/s", 0.99),
    "single": Rate("a prompt of 6,000 tokens beside another tenant's stream", "s", 1.2),
}

Request = tuple[str, str, str]
"""A key, the model that is asked with it, and the prompt."""


async def _ask_all(url: str, requests: Sequence[Request], asking: Asking, at_a_time: int) -> list[Outcome]:
    """In their order, `at_a_time` of them at a time."""
    waiting, answers = iter(requests), []
    clients = {key: client(url, key) for key, _, _ in requests}

    async def lane() -> None:
        for key, model, prompt in waiting:
            answers.append(await ask(clients[key], asking, model, prompt))

    await asyncio.gather(*(lane() for _ in range(at_a_time)))
    for http in clients.values():
        await http.aclose()
    return answers


def _ask_long(target: Target, turns: count[int], prompts: int, at_a_time: int) -> list[Outcome]:
    asking = Asking("completions", max_tokens=1)
    mix = EIGHT["long"]
    requests = [
        (target.keys[0], target.base, f"{next(turns)}. {SENTENCE * mix.sentences}") for _ in range(prompts)
    ]
    return asyncio.run(_ask_all(target.url, requests, asking, at_a_time))


def _long_rate(target: Target, turns: count[int]) -> float:
    began = time.perf_counter()
    answers = _ask_long(target, turns, PROMPTS, AT_A_TIME)
    return sum(answer.prompt_tokens for answer in answers) / (time.perf_counter() - began)


def _chat_rate(target: Target, keys: Sequence[str], turns: count[int], chats: int) -> float:
    """Chat `n` asks the adapter `a<n mod 16>` with the key in that place."""
    requests = [
        (keys[number % len(keys)], f"a{number % TENANTS}", f"{next(turns)}. {SENTENCE * 3}")
        for number in range(chats)
    ]
    began = time.perf_counter()
    answers = asyncio.run(_ask_all(target.url, requests, Asking("chat", max_tokens=ANSWER), TENANTS))
    return sum(answer.output_tokens for answer in answers) / (time.perf_counter() - began)


def _set_up(server: LiveServer, work: Path) -> Target:
    """Tenant `chat` has 16 adapters, and each of `hog-1` to `hog-16` one of them."""
    target = make_target(server, TENANTS)
    for number in range(TENANTS):
        for tenant in ("chat", f"hog-{number + 1}"):
            upload(server, tenant, f"a{number}", work, number)
    return target


def measure_one(server: LiveServer, work: Path, names: Sequence[str]) -> dict[str, float]:
    """The figures of one server."""
    target, turns = _set_up(server, work), count()
    senders = target.keys[1 : 1 + TENANTS]
    for keys in (target.keys[:1], senders):  # brings the adapters to the device
        _chat_rate(target, keys, turns, TENANTS)

    def beside_stream(figure: Callable[[], float]) -> float:
        with beside(target, STREAM, SETTLE_S):
            return figure()

    def single() -> float:
        answers = _ask_long(target, turns, SINGLE_PROMPTS, 1)
        return statistics.median(answer.seconds for answer in answers)

    figures: dict[str, Callable[[], float]] = {
        "alone": lambda: _long_rate(target, turns),
        "beside": lambda: beside_stream(lambda: _long_rate(target, turns)),
        "one tenant": lambda: _chat_rate(target, target.keys[:1], turns, CHATS),
        "tenants": lambda: _chat_rate(target, senders, turns, CHATS),
        "single": lambda: beside_stream(single),
    }
    told = {}
    for name in names:
        server.wait(server.idle)
        told[name] = figures[name]()
        print(f"{name}: {told[name]:.4g} {RATES[name].unit}", file=sys.stderr, flush=True)
    return told


def measure(
    model: Path, settings: Sequence[str], rounds: int, names: Sequence[str]
) -> dict[str, dict[str, list[float]]]:
    """By setting and name, a figure of each round."""
    told: dict[str, dict[str, list[float]]] = {
        name_of(given): {name: [] for name in names} for given in settings
    }
    for number, turn in enumerate(in_turns(settings, rounds)):
        for given in turn:
            with tempfile.TemporaryDirectory() as work, serving(model, given) as server:
                found = measure_one(server, Path(work), names)
            for name, figure in found.items():
                told[name_of(given)][name].append(figure)
            print(f"round {number + 1}, {name_of(given)}: {found}", file=sys.stderr, flush=True)
    return told
