"""Shadows: which requests are sampled, what is compared, and what nobody notices."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from loraplex.api.generation import shadow
from loraplex.api.generation.shadow import first_difference, is_comparable, is_sampled
from loraplex.engine.types import SamplingParams
from loraplex.serving.text.detokenize import TextDelta, TextStream
from loraplex.serving.text.processor import TextProcessor
from support.engine import fake_engine
from support.engine.fake_engine import Reply, fake_row
from support.http.data_plane import MAX_MODEL_LEN
from support.models.byte_tokenizer import write_byte_tokenizer
from support.releases.shadows import ANSWER, KEY, LIVE, PROMPT, SHADOW, Bench, asked, model


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextProcessor:
    return TextProcessor(write_byte_tokenizer(tmp_path_factory.mktemp("model")), max_model_len=MAX_MODEL_LEN)


@pytest.fixture
def bench(text: TextProcessor) -> Bench:
    return Bench(text)


def played(bench: Bench, act: Callable[[], Any]) -> None:
    async def play() -> None:
        await bench.engine.start()
        act()
        await bench.settle()

    asyncio.run(play())


# Sampling.


def test_a_share_of_requests_is_sampled_by_their_ids_alone() -> None:
    ids = [f"request-{number}" for number in range(10_000)]
    tenth = {one for one in ids if is_sampled(one, 0.1)}
    half = {one for one in ids if is_sampled(one, 0.5)}
    assert tenth < half  # a larger share has the same requests, and more
    assert abs(len(tenth) - 1000) < 100
    assert all(is_sampled(one, 1.0) for one in ids)
    assert not any(is_sampled(one, 0.0) for one in ids)


@pytest.mark.parametrize(
    ("one", "other", "place"),
    [((), (), None), ((1, 2), (1, 2), None), ((1, 2), (1, 3), 1), ((1,), (1, 2), 1), ((2,), (), 0)],
)
def test_the_first_difference(one: tuple[int, ...], other: tuple[int, ...], place: int | None) -> None:
    assert first_difference(one, other) == place


@pytest.mark.parametrize(
    "odd",
    [
        {"adapter": None},
        {"adapter": replace(LIVE, invocation=(1,))},
        {"adapter_from": 2},
        {"grammar": "start: /a/"},
        {"pooling": "mean"},
        {"sampling": SamplingParams(max_tokens=0)},
        {"sampling": SamplingParams(max_tokens=4, prompt_logprobs=0)},
    ],
)
def test_what_is_not_compared(odd: dict[str, Any]) -> None:
    assert is_comparable(asked(), SHADOW)
    assert not is_comparable(asked(**odd), SHADOW)
    assert not is_comparable(asked(), replace(SHADOW, invocation=(1,)))


def test_several_sequences_are_skipped_and_counted(bench: Bench) -> None:
    played(bench, lambda: bench.shadows.offer("r", model(), None, ()))
    assert (bench.outcomes, bench.engine.requests) == ({"skipped": 1}, [])


# Comparing.


def test_the_shadow_answers_in_the_background_with_the_same_parameters(bench: Bench) -> None:
    played(bench, lambda: bench.offer(request=asked(generated=(1, 2), deadline=3.0, max_load=0.5)))
    answer, live, other = bench.engine.requests
    assert answer == replace(
        asked(),
        request_id="r-0-shadow",
        adapter=SHADOW,
        sampling=replace(asked().sampling, logprobs=None),
        deadline=shadow.PATIENCE_S,
        background=True,
    )
    assert [request.adapter for request in (live, other)] == [LIVE, SHADOW]
    for request in (live, other):
        assert request.background
        assert request.prompt_ids == (*PROMPT, *ANSWER)
        assert (request.sampling.max_tokens, request.sampling.prompt_logprobs) == (0, 0)


def test_equal_answers_are_exact(bench: Bench) -> None:
    bench.engine.default = Reply(text="ok", eos=False)
    played(bench, bench.offer)
    own = sum(fake_row(token, len(PROMPT) + place, 0)[0] for place, token in enumerate(ANSWER))
    assert bench.store.sums[KEY].sums == {
        "samples": 1,
        "exact": 1,
        "diverged_at": 0,
        "live_tokens": 2,
        "shadow_tokens": 2,
        "scored": 2,
        "live_logprob": own,
        "shadow_logprob": own,
    }
    assert bench.store.sums[KEY].texts == []


def test_another_answer_is_counted_with_the_place_of_its_first_difference(bench: Bench) -> None:
    bench.engine.script(Reply(text="oh, no", eos=False))
    played(bench, lambda: bench.offer(keep_texts=True))
    assert bench.outcomes == {"different": 1}
    assert (bench.store["exact"], bench.store["diverged_at"], bench.store["shadow_tokens"]) == (0, 1, 6)
    ((_, *texts),) = bench.store.sums[KEY].texts
    assert texts == ["say ok", "ok", "oh"], "no more tokens than the caller paid for"


def test_texts_that_are_kept_are_made_beside_the_event_loop(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text of thousands of tokens would keep every stream waiting."""
    made: list[tuple[tuple[int, ...], bool]] = []
    push = TextStream.push

    def counted(self: TextStream, tokens: Sequence[int], **more: Any) -> TextDelta:
        made.append((tuple(tokens), threading.current_thread() is threading.main_thread()))
        return push(self, tokens, **more)

    monkeypatch.setattr(TextStream, "push", counted)
    bench.engine.script(Reply(text="oh, no", eos=False))
    played(bench, lambda: bench.offer(keep_texts=True))
    assert [(tokens, False) for tokens in (PROMPT, ANSWER, tuple(b"oh"))] == made[-3:]


def test_a_stop_string_ends_the_shadow_where_it_ends_the_answer(bench: Bench) -> None:
    bench.engine.script(Reply(text="ok. And so on"))
    played(bench, lambda: bench.offer(stops=["."], tokens=tuple(b"ok.")))
    assert bench.outcomes == {"exact": 1}
    assert bench.engine.aborted == ["r-0-shadow"]


def test_a_version_with_the_same_weights_is_scored_once(bench: Bench) -> None:
    twin = replace(LIVE, version=2)
    played(
        bench,
        lambda: bench.shadows.offer("r", replace(model(), shadow=twin), (asked(), ANSWER), ()),
    )
    assert len(bench.engine.requests) == 2
    assert bench.store["live_logprob"] == bench.store["shadow_logprob"] != 0


# What goes wrong.


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("adapter_not_finite", "failed"),
        ("adapter_unavailable", "failed"),
        ("internal_error", "failed"),
        ("deadline_exceeded", "dropped"),
        ("server_overloaded", "dropped"),
        ("engine_restarting", "dropped"),
        ("draining", "dropped"),
    ],
)
@pytest.mark.parametrize("request_number", [0, 1, 2])
def test_a_failure_is_counted_and_raised_nowhere(
    bench: Bench, code: Any, outcome: str, request_number: int
) -> None:
    bench.engine.script(*[Reply(text="ok")] * request_number, Reply(error=(code, "no")))
    played(bench, bench.offer)
    assert bench.outcomes == {outcome: 1}
    assert bench.store.sums[KEY].sums == {outcome: 1}


@pytest.mark.parametrize("number", [float("-inf"), float("nan")])
def test_a_score_that_no_database_takes_is_a_failure(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, number: float
) -> None:
    monkeypatch.setattr(fake_engine, "fake_row", lambda token_id, position, num_top: (number, []))
    bench.engine.default = Reply(text="ok", eos=False)
    played(bench, bench.offer)
    assert bench.store.sums[KEY].sums == {"failed": 1}


def test_an_engine_that_takes_nothing_drops_the_sample(bench: Bench) -> None:
    bench.engine.max_inflight = 0
    played(bench, bench.offer)
    assert bench.outcomes == {"dropped": 1}


def test_a_sample_that_waited_too_long_is_dropped(bench: Bench) -> None:
    def act() -> None:
        bench.engine.default = Reply(text="ok", eos=False)
        for number in range(shadow.AT_ONCE_OF_TENANT + 1):
            bench.offer(f"r{number}")
        bench.now += shadow.PATIENCE_S + 1  # none has been submitted yet

    played(bench, act)
    assert bench.outcomes == {"dropped": shadow.AT_ONCE_OF_TENANT + 1}
    assert bench.engine.requests == []


def test_a_tenant_fills_its_part_of_the_queue_and_the_engine_alone(bench: Bench) -> None:
    async def play() -> None:
        await bench.engine.start()
        bench.engine.default = Reply(text="ok", hold=True, eos=False)
        for number in range(200):
            bench.offer(f"a{number}")
        bench.offer("b", tenant="rival")
        await asyncio.sleep(0)
        assert bench.gauge("waiting") == shadow.MOST_OF_TENANT
        assert bench.gauge("running") == shadow.AT_ONCE_OF_TENANT + 1
        assert bench.outcomes == {"dropped": 200 - shadow.MOST_OF_TENANT - shadow.AT_ONCE_OF_TENANT}
        bench.engine.default = Reply(text="ok", eos=False)
        bench.engine.release()
        await bench.settle()

    asyncio.run(play())
    assert bench.outcomes["exact"] == shadow.MOST_OF_TENANT + shadow.AT_ONCE_OF_TENANT + 1


def test_all_tenants_together_fill_the_queue_alone(bench: Bench) -> None:
    async def play() -> None:
        await bench.engine.start()
        bench.engine.default = Reply(text="ok", hold=True, eos=False)
        for number in range(500):
            bench.offer(f"r{number}", tenant=f"tenant-{number % 10}")
        await asyncio.sleep(0)
        assert (bench.gauge("waiting"), bench.gauge("running")) == (shadow.MOST_WAITING, shadow.AT_ONCE)
        bench.drain.begin()
        await bench.shadows.write()
        await bench.settle()

    asyncio.run(play())


def test_nothing_is_taken_and_all_is_dropped_when_the_server_drains(bench: Bench) -> None:
    async def play() -> None:
        await bench.engine.start()
        bench.engine.default = Reply(text="ok", hold=True)
        for number in range(20):
            bench.offer(f"r{number}")
        for _ in range(5):
            await asyncio.sleep(0)
        bench.drain.begin()
        bench.offer("late")
        await bench.shadows.write()
        while bench.gauge("running"):
            await asyncio.sleep(0)
        while bench.engine.live:
            await asyncio.sleep(0)
        await bench.shadows.write()

    asyncio.run(play())
    assert bench.outcomes == {"dropped": 20}
    assert bench.store["dropped"] == 20


def test_sums_outlast_a_database_that_is_away(bench: Bench) -> None:
    async def play() -> None:
        await bench.engine.start()
        bench.engine.default = Reply(text="ok", eos=False)
        bench.store.broken = True
        for number in range(2):
            bench.offer(f"r{number}", keep_texts=True)
            with pytest.raises(ConnectionError):
                await bench.settle()
        bench.store.broken = False
        await bench.settle()

    asyncio.run(play())
    assert (bench.store["samples"], bench.store["exact"], len(bench.store.sums[KEY].texts)) == (2, 2, 2)


def test_a_database_that_is_away_leaves_few_texts_in_memory(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shadow, "MOST_TEXTS_HELD", 3)
    bench.engine.default = Reply(text="ok", eos=False)

    def offer() -> None:
        for number, tenant in enumerate(["acme", "zeta", "acme", "zeta", "acme"]):
            bench.offer(f"r{number}", tenant=tenant, keep_texts=True)

    played(bench, offer)
    assert bench.store["exact"] == 5
    assert sum(len(sums.texts) for sums in bench.store.sums.values()) == 3
    played(bench, offer)
    assert sum(len(sums.texts) for sums in bench.store.sums.values()) == 6


async def test_texts_that_are_too_old_are_removed_at_the_start_and_every_hour(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shadow, "EVERY_S", 0.0)
    running = asyncio.create_task(bench.shadows.run())
    for hours in range(3):
        bench.now = hours * 3600.0
        async with asyncio.timeout(60):
            while bench.store.num_cleanings <= hours:
                await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        assert bench.store.num_cleanings == hours + 1
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
