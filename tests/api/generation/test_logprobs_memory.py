"""What answers with many log probabilities take of the API process, and from whom."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from loraplex.api.openai.chat_format import ChatFormat
from loraplex.api.openai.delta import Delta
from loraplex.api.openai.formats import AnswerFormat, CompletionFormat, WholeChoice
from loraplex.api.openai.logprobs import ChatLogprobs, CompletionLogprobs, ScoredToken
from loraplex.engine.types import Usage
from loraplex.serving.output.parts import AnswerText
from support.engine.fake_engine import Reply
from support.http.data_plane import BASE, DataPlane, running_data_plane
from support.waiting import eventually

ROOM = 300_000
LARGE = 140_000
"""Log probabilities that an answer to `ASKED` may have: 6 megabytes of JSON, more than the network holds."""
ASKED: dict[str, Any] = {
    "model": BASE,
    "messages": [{"role": "user", "content": "hi"}],
    "logprobs": True,
    "top_logprobs": 20,
    "n": 2,
    "max_tokens": LARGE // 42,
}


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DataPlane]:
    directory = tmp_path_factory.mktemp("model")
    with running_data_plane(directory, max_kept_logprobs=ROOM) as running:
        yield running
        running.settle_all()


async def ask(plane: DataPlane, tenant: str, **fields: Any) -> httpx.Response:
    async with httpx.AsyncClient(timeout=60, headers={"authorization": f"Bearer lpx_{tenant}"}) as http:
        return await http.post(f"{plane.url}/v1/chat/completions", json={**ASKED, **fields})


async def until_live(plane: DataPlane, number: int) -> None:
    await asyncio.to_thread(eventually, lambda: len(plane.on_loop(lambda: plane.engine.live)) == number)


async def test_a_tenant_has_its_share_of_what_is_kept(plane: DataPlane) -> None:
    plane.reset()
    plane.engine.default = Reply(text="a", hold=True)
    first = asyncio.create_task(ask(plane, "acme"))
    await until_live(plane, 2)
    refused = await ask(plane, "acme")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_overloaded")
    assert "retry-after" in refused.headers
    assert "stream" in refused.json()["error"]["message"]
    # There is room for others, and for what need not be kept.
    half = {"max_tokens": ASKED["max_tokens"] // 2}
    others = [asyncio.create_task(ask(plane, "rival", **half))]
    others += [asyncio.create_task(ask(plane, "acme", stream=True))]
    others += [asyncio.create_task(ask(plane, "acme", logprobs=False, top_logprobs=0))]
    await until_live(plane, 8)
    plane.on_loop(plane.engine.release)
    assert [answer.status_code for answer in await asyncio.gather(first, *others)] == [200] * 4
    plane.engine.default = Reply(text="a")
    assert (await ask(plane, "acme")).status_code == 200


async def test_unread_answer_is_counted(plane: DataPlane) -> None:
    plane.reset()
    text = "x" * ASKED["max_tokens"]
    plane.engine.default = Reply(text=text, eos=False, finish_reason="length", chunk=100)
    body = json.dumps(ASKED).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    for stall_s in (0.4, 1.6, 6.4):  # before it is cut another one has to be refused
        plane.be_patient(stall_s)
        with plane.server.connect(receive_buffer=4096) as sock:
            sock.sendall(f"{head}Authorization: Bearer lpx_acme\r\n\r\n".encode() + body)
            assert sock.recv(12) == b"HTTP/1.1 200"  # complete, and on its way
            plane.be_patient(60)
            assert plane.on_loop(lambda: plane.engine.live) == []
            status = (await ask(plane, "acme")).status_code
            await asyncio.to_thread(eventually, lambda: plane.drain.in_flight == 0)  # cut
            answer = await ask(plane, "acme")
        if status == 503:
            break
    assert status == 503
    assert answer.status_code == 200
    assert len(answer.content) > 6 << 20
    told = [choice["logprobs"]["content"] for choice in answer.json()["choices"]]
    assert [len(entries) for entries in told] == [ASKED["max_tokens"]] * 2


@pytest.mark.parametrize(
    ("kind", "logprobs", "num_top", "max_bytes"),
    [(ChatFormat, ChatLogprobs, 20, 90), (CompletionFormat, CompletionLogprobs, 5, 60)],
)
def test_the_memory_of_a_whole_answer(
    plane: DataPlane, kind: type[AnswerFormat], logprobs: Any, num_top: int, max_bytes: int
) -> None:
    """It comes in pieces, is kept as JSON, and is copied only to be sent."""
    answer, choice = kind("id", 1, BASE, logprobs(plane.services.text.token)), WholeChoice()
    number = 1 << 16
    tracemalloc.start()
    for first in range(0, number // (1 + num_top), 64):
        tokens = tuple(
            ScoredToken(
                97 + place % 26, -0.1234567, tuple((32 + i, -0.2345678 - i) for i in range(num_top)), place
            )
            for place in range(first, first + 64)
        )
        answer.add(choice, Delta(0, (AnswerText("x" * 64),), tokens=tokens))
    del tokens
    kept, _ = tracemalloc.get_traced_memory()
    body = answer.whole([choice], Usage(1, 1))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(body) / number < max_bytes
    assert kept < 1.2 * len(body) + 100_000
    assert peak < 4.5 * len(body)
    print(
        f"\n{kind.__name__}: {len(body) / number:.0f} bytes each, peak {peak / len(body):.1f} times the answer"
    )


def test_parts_that_choices_share_are_rendered_once(plane: DataPlane) -> None:
    rendered: list[int] = []

    class Counting(CompletionLogprobs):
        def render(self, tokens: Any) -> Any:
            rendered.append(len(tokens))
            return super().render(tokens)

    answer = CompletionFormat("id", 1, BASE, Counting(plane.services.text.token))
    shared = tuple(ScoredToken(97, -1.0, (), place) for place in range(5))
    own = (ScoredToken(98, -1.0, (), 5),)
    choices = [WholeChoice() for _ in range(3)]
    for index, choice in enumerate(choices):
        answer.add(choice, Delta(index, (AnswerText("aaaaa"),), tokens=shared))
    for index, choice in enumerate(choices):
        answer.add(choice, Delta(index, (AnswerText("b"),), "stop", tokens=own if index else own + own))
    assert rendered == [5, 2, 1]
    told = json.loads(answer.whole(choices, Usage(1, 1)))["choices"]
    assert [choice["logprobs"]["tokens"] for choice in told] == [
        [*"aaaaabb"], [*"aaaaab"], [*"aaaaab"],
    ]  # fmt: skip
