"""Events that wait for a slow reader are merged, and nothing of them is lost."""

from __future__ import annotations

import random

from loraplex.engine.event_buffer import EventBuffer
from loraplex.engine.logprobs import Scores, join_scores
from loraplex.engine.types import TokenEvent, Usage
from support.engine.logprobs import pack_logprobs


def scores(count: int) -> Scores:
    return Scores(pack_logprobs([(-float(index), [(index, -0.5)]) for index in range(count)], 1))


def test_however_often_it_is_read_the_parts_are_the_whole() -> None:
    for seed in range(200):
        drawn = random.Random(seed)
        events = [
            TokenEvent(
                "a",
                tuple(drawn.choices(range(1000), k=drawn.choice((0, 1, 1, 1, 3)))),
                adapter_state=drawn.choice(("hot", None, None)),
            )
            for _ in range(drawn.randrange(1, 12))
        ]
        if drawn.random() < 0.5:
            events = [
                TokenEvent("a", e.token_ids, scores=scores(len(e.token_ids)), adapter_state=e.adapter_state)
                for e in events
            ]
        usage = Usage(3, sum(len(event.token_ids) for event in events))
        events.append(TokenEvent("a", (7,), finish_reason="stop", usage=usage, stop_token_id=7))
        buffer, read = EventBuffer(), []
        assert not buffer
        for event in events:
            buffer.add(event)
            assert buffer
            if drawn.random() < 0.4:
                waiting = buffer.num_tokens
                read.append(buffer.take())
                assert (not buffer, buffer.num_tokens, waiting) == (True, 0, len(read[-1].token_ids))
        if buffer:
            read.append(buffer.take())
        assert [i for e in read for i in e.token_ids] == [i for e in events for i in e.token_ids]
        whole = join_scores([e.scores for e in events if e.scores is not None])
        assert join_scores([e.scores for e in read if e.scores is not None]) == whole
        assert all(event.finish_reason is None for event in read[:-1])
        assert (read[-1].finish_reason, read[-1].usage, read[-1].stop_token_id) == ("stop", usage, 7)
        states = [e.adapter_state for e in read if e.adapter_state is not None]
        assert bool(states) == any(e.adapter_state is not None for e in events)


def test_the_adapters_state_stays_with_the_first_event_that_tells_it() -> None:
    buffer = EventBuffer()
    buffer.add(TokenEvent("a", (1,), adapter_state="cold"))
    buffer.add(TokenEvent("a", (2,)))
    assert buffer.take() == TokenEvent("a", (1, 2), adapter_state="cold")
    buffer.add(TokenEvent("a", (3,)))
    assert buffer.take() == TokenEvent("a", (3,))
