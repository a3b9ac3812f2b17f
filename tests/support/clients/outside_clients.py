"""Clients that others wrote, each in a process and an installation of its own (`make clients`).

A client's script in tests/clients/scripts talks to a running server, prints a JSON line for each check and asks, on
the way, for what happens on the server's side (tests/clients/scripts/conversation.py has the protocol).
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from loraplex.api.drain import Drain, DrainPhase
from loraplex.api.errors import ApiError
from support.engine.fake_engine import Reply
from support.http.data_plane import DataPlane, Refused
from support.models.byte_tokenizer import byte_decode
from support.waiting import eventually

REPOSITORY = Path(__file__).resolve().parents[3]
INSTALLED = REPOSITORY / ".clients"
SCRIPTS = REPOSITORY / "tests" / "clients" / "scripts"
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "langchain": (
        str(INSTALLED / "langchain" / "bin" / "python"),
        str(SCRIPTS / "langchain_conversation.py"),
    ),
    "litellm": (str(INSTALLED / "litellm" / "bin" / "python"), str(SCRIPTS / "litellm_conversation.py")),
    "node": ("node", str(SCRIPTS / "node_conversation.mjs")),
}
TOOL_COMMANDS: Mapping[str, tuple[str, ...]] = {
    **{
        client: (str(INSTALLED / client / "bin" / "python"), str(SCRIPTS / f"{client}_conversation.py"))
        for client in ("openai_agents", "pydantic_ai", "instructor")
    },
    "ai_sdk": ("node", str(SCRIPTS / "ai_sdk_conversation.mjs")),
}
"""Clients that call tools and want answers of a type."""
INSTALLATION = {"ai_sdk": "node"}
"""Where a client is installed, if not under its own name."""
TIMEOUT_S = 240.0
QUIET = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LANGSMITH_TRACING": "false",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}
"""Clients that would talk to their makers at import or on each call do not."""


CITY = {"city": "Bonn"}
WEATHER = {"city": "Bonn", "degrees": 12}
SAID = "It is 12 degrees in Bonn."


def hermes_call(name: str, arguments: Mapping[str, Any]) -> str:
    """A call as a model writes it in the format hermes."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def skip_unless_installed(client: str) -> None:
    if not (INSTALLED / INSTALLATION.get(client, client) / ".installed").exists():
        pytest.skip(f"the client {client} is not installed: make clients")


def converse(client: str, answer: Callable[[str], Any] | None = None, **settings: Any) -> dict[str, Any]:
    """Runs a client's whole script; the value of each check. `answer` does what the script asks for."""
    given = {**settings, "modules": str(INSTALLED / "node" / "node_modules")}
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    process = subprocess.Popen(
        [*(COMMANDS | TOOL_COMMANDS)[client], json.dumps(given)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment | QUIET,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    errors: list[str] = []
    reader = threading.Thread(target=lambda: errors.extend(process.stderr), daemon=True)
    reader.start()
    watchdog = threading.Timer(TIMEOUT_S, process.kill)
    watchdog.start()
    found: dict[str, Any] = {}
    try:
        for line in process.stdout:
            told = json.loads(line) if line.startswith('{"') else {}
            if "check" in told:
                assert told["check"] not in found
                found[told["check"]] = told["value"]
            elif "ask" in told:
                assert answer is not None, f"nobody answers {told['ask']}"
                process.stdin.write(json.dumps(answer(told["ask"])) + "\n")
                process.stdin.flush()
        code = process.wait()
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()
        reader.join()
        for pipe in (process.stdin, process.stdout, process.stderr):
            pipe.close()
    assert code == 0, f"{client} ended with {code} after {list(found)}:\n{''.join(errors[-40:])}"
    return found


class BackAfterOneRefusal(Drain):
    """`refuse` turns one request away; then another server is there, under the same address."""

    @contextmanager
    def admitted(self) -> Iterator[None]:
        with ExitStack() as stack:
            try:
                stack.enter_context(super().admitted())
            except ApiError:
                self.phase = DrainPhase.SERVING
                raise
            yield


class Stage:
    """The server's side of a conversation over a scripted engine: arranges a fault, or tells what arrived."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane

    def __call__(self, asked: str) -> Any:
        return getattr(self, f"_{asked}")()

    def _last(self) -> dict[str, Any]:
        """What the engine was asked for last."""
        request = self._plane.engine.requests[-1]
        sampling = request.sampling
        return {
            "prompt": byte_decode(request.prompt_ids),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "seed": sampling.seed,
            "logit_bias": [list(pair) for pair in sampling.logit_bias],
            "max_tokens": sampling.max_tokens,
        }

    def _say(self) -> None:
        self._play(Reply(text=SAID))

    def _weather_json(self) -> None:
        self._play(Reply(text=json.dumps(WEATHER)))

    def _weather_call(self) -> None:
        self._play(Reply(text=hermes_call("weather", CITY)))

    def _weather_turn(self) -> None:
        """A call, and what is said when its result has come."""
        self._play(Reply(text=hermes_call("weather", CITY)), Reply(text=SAID))

    def _weather_full_call(self) -> None:
        self._play(Reply(text=hermes_call("weather", WEATHER)))

    def _weather_call_of_its_class(self) -> None:
        self._play(Reply(text=hermes_call("Weather", WEATHER)))

    def _weather_call_of_its_partial_class(self) -> None:
        self._play(Reply(text=hermes_call("PartialWeather", WEATHER)))

    def _rate_limit(self) -> None:
        self._plane.limiter.refuse_with = [Refused("rate_limit_exceeded", "slow down", retry_after_s=1)]

    def _quota(self) -> None:
        self._plane.limiter.refuse_with = [Refused("insufficient_quota") for _ in range(4)]

    def _refusals(self) -> int:
        """How many of `quota` the client did not run into."""
        left, self._plane.limiter.refuse_with = len(self._plane.limiter.refuse_with), []
        return left

    def _drain(self) -> None:
        self._plane.on_loop(self._plane.drain.refuse)

    def _overload(self) -> None:
        self._script(Reply(error=("server_overloaded", "the queue is full")))

    def _restart(self) -> None:
        self._script(Reply(error=("engine_restarting", "the engine process died")))

    def _break(self) -> None:
        self._script(Reply(text="abc", error=("engine_restarting", "the engine process died")))

    def _hold(self) -> None:
        self._plane.engine.aborted.clear()
        self._script(Reply(text="Arr, matey", hold=True, hold_after=2))

    def _started(self) -> None:
        self._until(lambda: bool(self._plane.engine.live))

    def _gone(self) -> bool:
        """Whether the engine was told that nobody waits any more."""
        self._until(lambda: not self._plane.engine.live)
        return len(self._plane.engine.aborted) == 1

    def _script(self, reply: Reply) -> None:
        self._plane.on_loop(lambda: self._plane.engine.script(reply))

    def _play(self, *replies: Reply) -> None:
        """These are next, whatever a check before did not ask for."""
        self._plane.on_loop(self._plane.engine.forget_script)
        for reply in replies:
            self._script(reply)

    def _until(self, condition: Callable[[], bool]) -> None:
        eventually(lambda: bool(self._plane.on_loop(condition)))
