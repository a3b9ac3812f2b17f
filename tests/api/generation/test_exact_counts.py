"""What a request is charged: the tokens that the engine drew for it, however it ended and however few were read."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from loraplex.api.generation.generation import Generation
from loraplex.api.generation.planning import engine_requests, make_plan
from loraplex.api.metrics import Metrics
from loraplex.api.openai.parsing import parse_request
from loraplex.api.openai.schemas import CompletionRequest
from loraplex.engine.tenant_terms import DEFAULT_TERMS
from loraplex.engine.types import Usage
from support.engine.fake_engine import FakeEngineClient, Reply
from support.http.data_plane import BASE, DataPlane

TEXT = "abcdefgh"


def wait_for(plane: DataPlane, condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not plane.on_loop(condition):
        assert time.monotonic() < end, "it never became true"
        time.sleep(0.002)


def request_bytes(**fields: Any) -> bytes:
    body = json.dumps({"model": BASE, "prompt": "xyz", **fields}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer lpx_acme\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


def hang_up_when(plane: DataPlane, condition: Callable[[], bool], **fields: Any) -> int:
    """What a request is settled with whose client goes away once that holds."""
    with plane.server.connect() as sock:
        sock.sendall(request_bytes(**fields))
        wait_for(plane, condition)
    plane.settle_all()
    ((_, used),) = plane.limiter.settled
    return used


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("drawn", range(len(TEXT) + 1))
def test_a_hang_up_after_each_token(plane: DataPlane, stream: bool, drawn: int) -> None:
    engine = plane.engine
    engine.script(*[Reply(text=TEXT, hold=True, hold_after=drawn)] * 2)

    def all_drawn() -> bool:
        streams = list(engine._streams.values())
        return len(streams) == 2 and all(stream.num_received == drawn for stream in streams)

    used = hang_up_when(plane, all_drawn, stream=stream, n=2)
    assert used == (3 + 2 * drawn if drawn or used else 0)  # without a token the prompt may not have begun


class Script:
    """A generation over the fake engine, one event at a time."""

    def __init__(self, text: Any, reply: Reply, **fields: Any) -> None:
        self.engine = FakeEngineClient()
        self.engine.default = reply
        self._text = text
        body = {"model": BASE, "prompt": "xyz", "max_tokens": 64, **fields}
        request = parse_request(CompletionRequest, body)
        self._plan = make_plan(
            request, [text.encode("xyz")], max_model_len=4096, vocab_size=260, default_max_tokens=64
        )

    async def start(self) -> Generation:
        await self.engine.start()
        plan = self._plan
        requests = engine_requests(
            plan, internal_id="r", tenant_id="acme", adapter=None, max_output_tokens=None
        )
        metrics = Metrics(BASE)
        return Generation.start(
            self.engine, self._text, plan, requests, metrics, terms=DEFAULT_TERMS, continues=True
        )


@pytest.fixture
def text(plane: DataPlane) -> Any:
    return plane.services.text


async def drawn_in_all(engine: FakeEngineClient, tokens: int) -> None:
    while any(stream.num_received < tokens for stream in engine._streams.values()):
        await asyncio.sleep(0)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("read", range(4))
@pytest.mark.parametrize("drawn", [3, 8])
async def test_tokens_that_nobody_read_count(text: Any, drawn: int, read: int, n: int) -> None:
    script = Script(text, Reply(text=TEXT, hold=True, hold_after=drawn), n=n)
    generation = await script.start()
    shown = 0
    while shown < read:
        shown += sum(len(delta.text) for delta in await generation.next())
    await drawn_in_all(script.engine, drawn)
    await generation.close()
    assert generation.usage() == Usage(3, n * drawn, 0)


@pytest.mark.parametrize("drawn", [0, 1, 5])
async def test_an_engine_that_dies_is_believed_as_far_as_it_had_told(text: Any, drawn: int) -> None:
    script = Script(text, Reply(text=TEXT, hold=True, hold_after=drawn))
    generation = await script.start()
    await drawn_in_all(script.engine, drawn)
    script.engine.kill()
    await generation.close()
    assert generation.usage() == Usage(3 if drawn else 0, drawn, 0)


async def test_an_error_after_some_tokens_counts_them(text: Any) -> None:
    script = Script(text, Reply(text="abcde", error=("internal_error", "broken")))
    generation = await script.start()
    await generation.next()
    await generation.close()
    drawn = generation.usage().completion_tokens
    assert drawn == 5 or script.engine.aborted == ["r-0"]
    assert generation.usage() == Usage(3, drawn, 0)


async def test_a_stop_string_counts_to_its_last_token(text: Any) -> None:
    """The answer says so, and the books say what the answer says, whatever the engine drew meanwhile."""
    script = Script(text, Reply(text=TEXT, chunk=8), stop=["cd"])
    generation = await script.start()
    while await generation.next():
        pass
    await generation.close()
    assert generation.usage() == Usage(3, 4, 0)


async def test_scoring_draws_nothing(text: Any) -> None:
    script = Script(text, Reply(text=""), max_tokens=0, echo=True, logprobs=1)
    generation = await script.start()
    await generation.close()
    assert generation.usage().completion_tokens == 0
