"""Lines of batches in the core, with the fake runner and transport: fairly between tenants, below every other request,
and as fast as these while none of them is here."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from loraplex.engine.scheduling.background import MAX_BACKGROUND
from loraplex.engine.scheduling.batch_lines import QUIET_S
from loraplex.engine.scheduling.line_share import LINES_ALONE, REST_S
from loraplex.engine.tenant_terms import TenantTerms
from loraplex.engine.types import EngineRequest
from support.engine.core_engine import adapter, expected
from support.engine.fake_runner import reference_scores
from support.engine.fake_transport import Fate
from tests.engine.core.test_background import Watched


def line(engine: Watched, name: str, *args: Any, **changes: Any) -> EngineRequest:
    return engine.add(name, *args, **{"background": True, "batch": True, "ignore_eos": True, **changes})


def busy(**config: Any) -> Watched:
    """An engine on which another request decodes all the time."""
    engine = Watched(**{"num_blocks": 256, "max_num_seqs": 32, "max_model_len": 2048, **config})
    engine.add("real", prompt_ids=(7, 8, 9), max_tokens=1000, ignore_eos=True, tenant_id="real")
    engine.step(0.01)
    engine.plans.clear()
    return engine


def tokens_by_tenant(engine: Watched) -> Counter[str]:
    rows = [row for plan in engine.plans for row in plan.scheduled if row.request.batch]
    return Counter({t: sum(r.num_tokens for r in rows if r.request.tenant_id == t) for t in "abc"})


@pytest.mark.parametrize("lookahead", [0, 1])
def test_alone_they_are_computed_in_the_steps_of_the_same_requests_without_a_batch(lookahead: int) -> None:
    plans = []
    for batch in (False, True):
        engine = Watched(num_blocks=40, max_num_seqs=6, max_num_batched_tokens=64, lookahead=lookahead)
        for index in range(24):
            engine.add(
                f"r{index}",
                adapter(index % 6) if index % 3 else None,
                prompt_ids=(*range(1, 40), index),
                max_tokens=5 + index,
                tenant_id="abc"[index % 3],
                background=batch,
                batch=batch,
                ignore_eos=True,
            )
        engine.run()
        rows = [[(r.request_id, r.start, r.num_tokens) for r in plan.scheduled] for plan in engine.plans]
        plans.append((rows, {f"r{i}": engine.end(f"r{i}").usage for i in range(24)}))
    assert plans[0] == plans[1]


def test_another_request_gets_places_and_blocks_in_its_first_step() -> None:
    engine = Watched(num_blocks=24, max_num_seqs=4, max_num_batched_tokens=256)
    lines = [line(engine, f"line-{n}", prompt_ids=(n, *range(2, 80)), max_tokens=40) for n in range(4)]
    for _ in range(6):
        engine.step(0.01)
    assert engine.core.stats().num_kv_blocks_used == 0  # what lines hold can be had
    engine.rows()
    names = [f"real-{n}" for n in range(4)]
    for n, name in enumerate(names):
        engine.add(name, prompt_ids=(100 + n, *range(2, 60)), max_tokens=3)
    engine.step(0.01)
    assert [row[0] for row in engine.rows()[0]] == names
    engine.run()
    for request in lines:
        assert engine.tokens(request.request_id) == expected(request, 40)
    assert engine.core.stats().num_preemptions == 0


def test_it_takes_short_steps_until_nobody_has_come_for_a_while() -> None:
    engine = busy(max_num_batched_tokens=512)
    engine.core.abort("real")
    engine.run()
    line(engine, "line", prompt_ids=tuple(range(1, 401)), max_tokens=1)
    engine.step(0.01)
    assert not engine.rows(background=True)
    assert 0.0 < (engine.core.idle_s() or 0.0) <= REST_S
    engine.step(REST_S)
    engine.step(0.01)
    assert {size for step in engine.rows(background=True) for _, _, size in step} == {LINES_ALONE}
    engine.step(QUIET_S)
    assert engine.rows(background=True) == [[("line", 2 * LINES_ALONE, 400 - 2 * LINES_ALONE)]]


def test_an_idle_core_wakes_when_a_line_may_have_its_adapter_loaded() -> None:
    engine = Watched(num_pages=1, num_slots=1)
    engine.add("real", adapter(2))
    engine.run()
    line(engine, "line", adapter(1))
    engine.step(0.01)
    wait = engine.core.idle_s()
    assert wait is not None
    assert 0.0 < wait <= QUIET_S  # what others have used lately stays that long
    engine.run()
    assert engine.end("line").finish_reason == "length"


def test_beside_others_tenants_share_what_is_left_by_their_weights() -> None:
    engine = busy()
    engine.core.set_terms("b", TenantTerms(weight=3.0))
    for n in range(40):
        line(engine, f"a{n}", tenant_id="a", prompt_ids=(n, 1, 2), max_tokens=20)
    for n in range(20):
        line(engine, f"b{n}", tenant_id="b", prompt_ids=(n, 3, 4), max_tokens=20)
    for _ in range(400):
        engine.step(0.01)
    got = tokens_by_tenant(engine)
    assert got["a"] + got["b"] == 400
    assert got["b"] == pytest.approx(3 * got["a"], rel=0.1)


def test_a_tenant_that_comes_late_does_not_wait_for_anothers_lines() -> None:
    engine = busy(num_blocks=96, max_num_batched_tokens=512)
    engine.core.abort("real")
    engine.run()
    for n in range(30):
        line(engine, f"a{n}", tenant_id="a", prompt_ids=(n, *range(100)), max_tokens=200)
    for _ in range(4):
        engine.step(QUIET_S)
    engine.add("real-2", prompt_ids=(5, 6), max_tokens=400, ignore_eos=True, tenant_id="real")
    engine.step(0.01)
    line(engine, "b", tenant_id="b", prompt_ids=tuple(range(150)), max_tokens=3)
    engine.plans.clear()
    for _ in range(360):
        engine.step(0.01)
    assert engine.end("b").finish_reason == "length"
    assert tokens_by_tenant(engine)["a"] > 10


def test_a_large_line_is_not_passed_by_small_ones_for_ever() -> None:
    engine = busy(num_blocks=80)
    engine.core.abort("real")
    engine.step(REST_S)
    small = 0
    for _ in range(3):
        line(engine, f"small-{small}", tenant_id="a", prompt_ids=(small, *range(60)), max_tokens=30)
        small += 1
    engine.step()
    line(engine, "large", tenant_id="a", prompt_ids=tuple(range(1, 250)), max_tokens=60)
    for _ in range(700):
        if small < 200 and small - sum(e.finish_reason is not None for e in engine.events) < 6:
            line(engine, f"small-{small}", tenant_id="a", prompt_ids=(small, *range(60)), max_tokens=30)
            small += 1
        engine.step()  # the clock stands still: it is never quiet
    assert engine.end("large").finish_reason == "length"


def test_leaving_and_coming_back_clears_no_debt() -> None:
    engine = busy()
    engine.core.set_terms("b", TenantTerms(weight=4.0))
    line(engine, "b", tenant_id="b", prompt_ids=(1, 2), max_tokens=900)
    for n in range(30):  # one line at a time, and always a new one
        name = f"a{n}"
        line(engine, name, tenant_id="a", prompt_ids=(n,), max_tokens=1)
        while not any(e.request_id == name and e.finish_reason for e in engine.events):
            engine.step(0.01)
    got = tokens_by_tenant(engine)
    assert got["a"] <= 0.4 * got["b"]


def test_lines_find_each_others_prefix_and_evict_nobody_elses() -> None:
    engine = Watched(num_blocks=40)
    shared = tuple(range(1, 65))
    engine.add("chat", prompt_ids=shared, max_tokens=1)
    engine.run()
    for n in range(20):  # each leaves blocks of its own
        line(engine, f"line-{n}", prompt_ids=(900 + n, *range(200, 280)), max_tokens=1)
        engine.run()
    engine.add("chat-2", prompt_ids=shared, max_tokens=1)
    for name in ("twin", "twin-2"):
        line(engine, name, prompt_ids=tuple(range(300, 364)), max_tokens=1)
        engine.run()
    cached = {name: getattr(engine.end(name).usage, "cached_tokens", None) for name in ("chat-2", "twin-2")}
    assert cached == {"chat-2": 48, "twin-2": 48}


def test_a_prefix_that_a_line_left_and_another_request_used_is_kept_like_any() -> None:
    engine = Watched(num_blocks=40)
    shared = tuple(range(1, 65))
    line(engine, "first", prompt_ids=shared, max_tokens=1)
    engine.run()
    for n, chat in enumerate(("chat", "chat-2")):
        line(engine, f"line-{n}", prompt_ids=(n, *range(100, 580)), max_tokens=1)
        engine.run()
        engine.add(chat, prompt_ids=shared, max_tokens=1)
        engine.run()
    assert getattr(engine.end("chat-2").usage, "cached_tokens", None) == 48


def test_a_shadow_goes_first_and_has_room_of_its_own() -> None:
    engine = Watched(max_num_seqs=4)
    for n in range(MAX_BACKGROUND + 1):
        line(engine, f"line-{n}", prompt_ids=(n + 1, 2), max_tokens=30)
    engine.step(0.01)
    engine.plans.clear()
    engine.add("shadow", background=True, prompt_ids=(1, 2, 3), max_tokens=8, ignore_eos=True)
    for _ in range(8):
        engine.step(0.01)
    assert engine.end("shadow").finish_reason == "length"
    assert engine.error(f"line-{MAX_BACKGROUND}") == "server_overloaded"


def test_lines_take_what_other_requests_take() -> None:
    for alone in (True, False):
        engine = Watched() if alone else busy()
        pooled = line(engine, "pooled", max_tokens=0, pooling="mean", ignore_eos=False)
        scored = line(
            engine, "scored", adapter(1), logprobs=2, prompt_logprobs=0, max_tokens=3, adapter_from=4
        )
        resumed = line(engine, "resumed", adapter(1), max_tokens=6, generated=(11, 12, 13))
        for _ in range(150):
            engine.step(0.01)
        assert engine.end("pooled").pooled is not None
        assert engine.tokens("scored") == expected(scored, 3)
        assert len(engine.tokens("resumed")) == resumed.sampling.max_tokens - 3
        scores = [e.scores for e in engine.events if e.request_id == "scored" and e.scores is not None]
        assert (
            sum(len([*s.prompt.rows()]) for s in scores if s.prompt is not None) == len(scored.prompt_ids) - 1
        )
        assert pooled.request_id not in {e.request_id for e in engine.events if e.error is not None}


def test_other_engines_are_told_of_no_line() -> None:
    engine = Watched()
    engine.core.exchange_service({})
    line(engine, "line", tenant_id="a", max_tokens=20)
    for _ in range(5):
        engine.step(0.01)
    engine.add("real", tenant_id="b", max_tokens=2)
    for _ in range(5):
        engine.step(0.01)
    assert set(engine.core.exchange_service({})) == {"b"}


def test_a_line_whose_adapter_cannot_be_loaded_ends_with_its_error() -> None:
    engine = Watched()
    engine.transport.load_fate = lambda digest: Fate(0.1, error="damaged")
    line(engine, "line", adapter(1))
    engine.run()
    assert engine.error("line") == "adapter_unavailable"


def test_a_batch_that_is_no_background_is_refused() -> None:
    engine = Watched()
    engine.add("odd", batch=True)
    engine.run()
    assert engine.error("odd") == "internal_error"


@pytest.mark.parametrize("first", range(6))
def test_what_a_step_in_flight_scores_is_not_scored_again(first: int) -> None:
    """A line gives up its blocks in a plan while the step before it is in flight; those that are free then would be
    enough for it in the same plan."""
    engine = Watched(
        num_blocks=10,
        max_num_seqs=4,
        lookahead=1,
        max_scored_tokens=3,
        max_model_len=64,
        max_num_batched_tokens=16,
    )
    request = line(engine, "line", prompt_ids=tuple(range(1, 19)), max_tokens=2, prompt_logprobs=1)
    for _ in range(first):
        engine.step(0.01)
    for number in range(3):
        prompt = tuple(range(50 * number, 50 * number + 14))
        engine.add(f"real-{number}", prompt_ids=prompt, max_tokens=20, ignore_eos=True, tenant_id="real")
    engine.run()
    told = [event.scores for event in engine.events if event.request_id == "line" and event.scores]
    prompts = [scores.prompt for scores in told if scores.prompt is not None]
    tokens = tuple(engine.tokens("line"))
    wanted = reference_scores(None, request.prompt_ids, tokens, request.sampling).prompt
    assert wanted is not None
    assert b"".join(each.values for each in prompts) == wanted.values
    assert b"".join(each.ids for each in prompts) == wanted.ids
