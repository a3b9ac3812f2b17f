"""Requests with tokens that another engine has delivered, through the core's own seam (see test_continued_answers)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import msgspec
import pytest

from loraplex.engine.config import Charges
from loraplex.engine.ipc import protocol as wire
from loraplex.engine.types import EngineRequest, SamplingParams, Timing
from support.engine.core_engine import CoreEngine, adapter, expected
from support.engine.fake_runner import reference_scores
from support.engine.fake_transport import Fate


@pytest.fixture(params=[0, 1], ids=["lookahead-0", "lookahead-1"])
def lookahead(request: pytest.FixtureRequest) -> Literal[0, 1]:
    return request.param


def resume(engine: CoreEngine, request: EngineRequest, count: int, name: str = "") -> EngineRequest:
    """Send it again, with its first `count` tokens as generated."""
    generated = tuple(expected(request, count))
    again = replace(request, request_id=name or f"{request.request_id}-{count}", generated=generated)
    engine.core.add_request(again)
    return again


def undisturbed(**changes: Any) -> EngineRequest:
    return CoreEngine().add("r", **changes)


@pytest.mark.parametrize("count", [1, 11, 12, 13, 28, 39])
def test_an_answer_goes_on_where_it_was_cut(count: int, lookahead: Literal[0, 1]) -> None:
    engine = CoreEngine(lookahead=lookahead)
    asked = undisturbed(adapter=adapter(1), max_tokens=40, logprobs=2, prompt_logprobs=1)
    request = resume(engine, asked, count)
    engine.run()
    whole = expected(asked, 40)
    assert engine.tokens(request.request_id) == whole[count:]
    end = engine.end(request.request_id)
    assert end.finish_reason == "length"
    assert end.usage is not None
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (20, 40)
    told = [event.scores for event in engine.events if event.scores is not None]
    scores = reference_scores(adapter(1).digest, asked.prompt_ids, tuple(whole), asked.sampling)
    assert scores.output is not None
    assert all(part.prompt is None for part in told)
    assert (
        b"".join(part.output.values for part in told if part.output) == scores.output.part(count, 40).values
    )
    assert [event.adapter_state for event in engine.events] == ["cold", *(None,) * (39 - count)]


PROMPT = tuple(range(1, 21))


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"generated": (1,) * 6}, "internal_error"),
        ({"generated": (1,), "max_tokens": 0}, "internal_error"),
        ({"generated": (1, -1)}, "internal_error"),
        ({"generated": (1, 2**31)}, "internal_error"),
        ({"generated": (1,), "max_tokens": 0, "pooling": "mean"}, "internal_error"),
        ({"generated": (1,), "grammar": "a grammar"}, "grammar_failed"),  # this engine takes none
        ({"generated": (1,) * 490, "max_tokens": 500}, "context_length_exceeded"),
        ({"generated": (1, 2), "prompt_ids": ()}, "internal_error"),
    ],
)
def test_what_cannot_be_is_refused_and_hurts_nobody(changes: dict[str, Any], code: str) -> None:
    engine = CoreEngine()
    neighbour = engine.add("neighbour")
    engine.add("r", **changes)
    engine.run()
    assert engine.error("r") == code
    usage = engine.end("r").usage
    assert usage is not None
    # Another engine has delivered them: they count.
    assert usage.completion_tokens == len(changes["generated"])
    assert engine.tokens("neighbour") == expected(neighbour, 5)


@pytest.mark.parametrize(
    ("sampling", "generated", "reason", "stop"),
    [
        ({"max_tokens": 3}, (8, 7, 6), "length", None),
        ({"stop_token_ids": (7,)}, (8, 7), "stop", 7),
        ({"stop_token_ids": (7,), "max_tokens": 2}, (8, 7), "stop", 7),
        ({}, (8, 0), "stop", 0),
        ({"ignore_eos": True, "max_tokens": 2}, (8, 0), "length", None),
        ({"stop_token_ids": (7,), "min_tokens": 2, "max_tokens": 2}, (8, 7), "length", None),
    ],
)
def test_a_complete_answer_ends_without_a_step(
    sampling: dict[str, Any], generated: tuple[int, ...], reason: str, stop: int | None
) -> None:
    engine = CoreEngine()
    engine.add("r", adapter(1), generated=generated, **sampling)
    (event,) = engine.step()
    assert (event.finish_reason, event.stop_token_id, event.token_ids) == (reason, stop, ())
    assert event.usage is not None
    assert (event.usage.prompt_tokens, event.usage.completion_tokens) == (20, len(generated))
    assert event.adapter_state == "cold"
    assert engine.runner.num_steps == 0
    assert not engine.core.has_work


def test_a_stop_id_before_min_tokens_does_not_end_it() -> None:
    engine = CoreEngine()
    request = undisturbed(max_tokens=8)
    stop = expected(request, 2)[1]
    request = replace(request, sampling=replace(request.sampling, stop_token_ids=(stop,), min_tokens=3))
    assert resume(engine, request, 2).generated[-1] == stop
    engine.run()
    assert engine.tokens("r-2") == expected(request, 8)[2:]


def test_its_tenant_is_charged_for_new_tokens_alone() -> None:
    engine = CoreEngine(max_num_batched_tokens=16)
    keeps_counters = engine.add("other", tenant_id="other", max_tokens=60)
    resume(engine, undisturbed(max_tokens=40), 30)
    while "r-30" not in {event.request_id for event in engine.events if event.finish_reason}:
        counters = {name: stats.counter for name, stats in engine.core.stats().tenants.items()}
        engine.step(0.01)
    charges = Charges()
    new = len([event for event in engine.events if event.request_id == "r-30" and event.token_ids])
    assert counters["acme"] == (new - 1) * charges.decode
    assert keeps_counters.request_id in engine.core._tracker.live


def test_a_full_queue_neither_refuses_nor_sheds_it() -> None:
    engine = CoreEngine(max_num_seqs=1, max_waiting=2)
    engine.add("runs", max_tokens=60)
    engine.step()
    for name in ("w1", "w2"):
        engine.add(name)
    request = resume(engine, undisturbed(max_tokens=20), 9)
    engine.add("more")
    engine.add("of another", tenant_id="globex")
    engine.run()
    assert engine.tokens(request.request_id) == expected(request, 20)[9:]
    assert engine.error("more") == engine.error("w2") == "server_overloaded"


def test_it_goes_ahead_of_what_its_tenant_waits_for() -> None:
    engine = CoreEngine(max_num_seqs=1)
    engine.add("runs", max_tokens=3)
    engine.step()
    engine.add("urgent", priority=5)
    resume(engine, undisturbed(max_tokens=20), 9)
    engine.run()
    ends = [event.request_id for event in engine.events if event.finish_reason]
    assert ends == ["runs", "r-9", "urgent"]


@pytest.mark.parametrize("max_load", [0.0, 0.5])
def test_it_waits_for_its_adapter_as_long_as_that_takes(max_load: float) -> None:
    engine = CoreEngine()
    engine.transport.load_fate = lambda digest: Fate(3.0)
    request = resume(engine, undisturbed(adapter=adapter(1), max_tokens=20, max_load=max_load), 9)
    for _ in range(8):
        engine.step(0.6)
    engine.run()
    assert engine.tokens(request.request_id) == expected(request, 20)[9:]


def test_output_blocks_are_found_again_and_cached_tokens_are_of_the_prompt(lookahead: Literal[0, 1]) -> None:
    engine = CoreEngine(lookahead=lookahead)
    asked = undisturbed(max_tokens=60)
    resume(engine, asked, 40, "first")
    engine.run()
    computed = engine.runner.num_tokens
    resume(engine, asked, 45, "second")
    engine.run()
    assert engine.tokens("second") == expected(asked, 60)[45:]
    # 64 of 65 positions lie in full blocks that the first has left.
    assert engine.runner.num_tokens - computed == 1 + 14
    cached = [event.usage.cached_tokens for event in engine.events if event.usage is not None]
    assert cached == [0, 16]
    assert engine.core.stats().prefix_cache_hits == 16


def test_it_is_computed_again_in_slices_as_a_prompt_is() -> None:
    engine = CoreEngine(max_num_seqs=2, max_num_batched_tokens=16)
    resume(engine, undisturbed(max_tokens=101), 100)
    engine.run()
    assert engine.runner.num_steps == 8, "120 positions"


def test_times_are_of_this_engine_and_an_abort_tells_the_whole_usage() -> None:
    engine = CoreEngine()
    engine.now = 50.0
    resume(engine, undisturbed(max_tokens=5), 3)
    engine.step(0.5)
    engine.step(0.5)
    assert engine.end("r-3").timing == Timing(0.5, 0.5, 1.0, last_token_s=1.0, arrived=50.0)
    engine.transport.load_fate = lambda digest: Fate(None)
    resume(engine, undisturbed(adapter=adapter(1)), 3, "waits")
    engine.step()
    engine.core.abort("waits")
    engine.step()
    usage = engine.end("waits").usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (20, 3)
    assert engine.core.stats().generation_tokens == 2
    assert engine.core.stats().prompt_tokens == 0


def test_an_older_frame_has_none() -> None:
    request = EngineRequest("r", "acme", (1, 2), SamplingParams(5), generated=(7, 8))
    frame = msgspec.msgpack.encode(wire.Add(request))
    assert msgspec.msgpack.decode(frame, type=wire.Add).request == request
    plain = msgspec.msgpack.decode(frame)
    del plain["request"]["generated"]
    older = msgspec.msgpack.decode(msgspec.msgpack.encode(plain), type=wire.Add)
    assert older.request == replace(request, generated=())
