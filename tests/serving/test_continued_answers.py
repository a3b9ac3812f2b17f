"""An answer that another engine has begun, through a client."""

from __future__ import annotations

from dataclasses import replace

from loraplex.engine.config import EngineConfig
from loraplex.engine.types import EngineRequest, SamplingParams, TokenEvent
from loraplex.serving.engines.stream import RequestStream
from support.cluster.inprocess import InProcessEngineClient
from support.engine.fake_core import build_fake_engine


async def events_of(stream: RequestStream) -> list[TokenEvent]:
    return [event async for event in stream]


async def test_an_answer_goes_on_behind_what_was_delivered() -> None:
    client = InProcessEngineClient(lambda wake: build_fake_engine(EngineConfig("ok", "/nowhere"), wake))
    await client.start()
    request = EngineRequest("whole", "acme", (1, 2, 3), SamplingParams(40))
    events = await events_of(client.submit(request)[0])
    whole = tuple(token for event in events for token in event.token_ids)
    for count in (1, 39, 40):
        resumed = replace(request, request_id=f"from {count}", generated=whole[:count])
        events = await events_of(client.submit(resumed)[0])
        assert tuple(token for event in events for token in event.token_ids) == whole[count:]
        assert events[-1].finish_reason == "length"
        assert events[-1].usage is not None
        assert events[-1].usage.completion_tokens == 40
    await client.close()
