"""The engine core with planted drafters: nothing that a request is told depends on drafts."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from loraplex.engine.core.engine_core import EngineCore
from loraplex.engine.logprobs import join_scores
from loraplex.engine.scheduling.drafting import Drafter
from loraplex.engine.scheduling.speculation import Speculation
from loraplex.engine.scheduling.timing.step_costs import StepCosts
from support.engine.core_engine import EOS, VOCAB_SIZE, CoreEngine, adapter, expected
from support.simulator.drafters import FREE, KINDS, DrafterKind, PlantedDrafter
from support.simulator.histories import play
from support.simulator.summary import Summary

HISTORIES = 8


def core_engine(drafter: Drafter | None, costs: StepCosts = FREE, **config: Any) -> CoreEngine:
    engine = CoreEngine(**config)
    engine.core = EngineCore(
        engine.config,
        engine.runner,
        engine.cache,
        eos_ids=frozenset({EOS}),
        clock=lambda: engine.now,
        speculation=None if drafter is None else Speculation(drafter, costs),
    )
    engine.core.exchange_service({})
    return engine


def planted(kind: DrafterKind) -> PlantedDrafter:
    return PlantedDrafter(kind, random.Random(1), VOCAB_SIZE)


@pytest.mark.parametrize("kind", KINDS)
def test_histories_with_drafts_keep_every_promise(kind: DrafterKind) -> None:
    total = Summary()
    for seed in range(HISTORIES):
        total.add(play(seed, fair=False, drafts=kind))
    print(total)
    assert total.drafted > 20 * HISTORIES
    assert (total.accepted > 0) == (kind != "wrong")
    assert total.accepted < total.drafted or kind == "right"
    assert min(total.preemptions, total.prefix_hits, total.out_of_memory, total.poisoned) > 0


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_histories_with_drafts(kind: DrafterKind) -> None:
    for seed in range(1000):
        play(seed, fair=False, drafts=kind)


def answers(drafter: PlantedDrafter | None) -> tuple[dict[str, tuple[Any, ...]], dict[str, float], int]:
    """The answers to 24 requests of two tenants, the service that these got, and the number of steps."""
    engine, draw = core_engine(drafter, max_num_seqs=8, num_blocks=24), random.Random(5)
    for number in range(24):
        tenant = f"t{number % 2}"
        prompt = tuple(draw.randrange(1, VOCAB_SIZE) for _ in range(draw.randint(1, 40)))
        ref = adapter(number % 2, tenant) if number % 3 else None
        chain = expected(engine.add(f"probe{number}", ref, tenant_id=tenant, prompt_ids=prompt), 30)
        engine.core.abort(f"probe{number}")
        engine.add(
            f"r{number}",
            ref,
            tenant_id=tenant,
            prompt_ids=prompt,
            max_tokens=draw.choice((1, 2, 9, 30)),
            stop_token_ids=(chain[draw.randrange(30)],) if number % 2 else (),
            min_tokens=draw.choice((0, 8)),
            logprobs=draw.choice((None, 2)),
            prompt_logprobs=1 if number % 4 == 3 else None,
            speculation=number % 5 != 4,
        )
    events = engine.run()
    told: dict[str, tuple[Any, ...]] = {}
    for name in {event.request_id for event in events if event.request_id.startswith("r")}:
        mine = [event for event in events if event.request_id == name]
        end = mine[-1]
        assert end.usage is not None
        usage = (end.usage.prompt_tokens, end.usage.completion_tokens)
        scores = join_scores([event.scores for event in mine if event.scores is not None])
        told[name] = (engine.tokens(name), scores, usage, end.finish_reason, end.stop_token_id)
    return told, engine.core.exchange_service({}), engine.runner.num_steps


@pytest.mark.parametrize("kind", KINDS)
def test_answers_usage_and_charges_are_those_without_drafts(kind: DrafterKind) -> None:
    drafter = planted(kind)
    told, served, steps = answers(drafter)
    plain_told, plain_served, plain_steps = answers(None)
    assert told == plain_told
    assert len(told) == 24
    assert not drafter.complaints
    rejected = sum(drafted - accepted for drafted, accepted in drafter.log)
    assert (rejected == 0) == (kind == "right")
    assert (steps < plain_steps) == (kind != "wrong")
    more = sum(served.values()) - sum(plain_served.values())
    lost = rejected + drafter.num_behind_end
    # A row with an adapter is dearer than one of the base.
    assert lost <= more + 1e-6 <= 2 * lost + 1e-6


@pytest.mark.parametrize("accepted", [1, 3, 8])
def test_an_answer_ends_at_a_stop_token_inside_its_draft(accepted: int) -> None:
    for changes in ({"stop": True}, {"length": True}, {"late": True}):
        engine = core_engine(planted("right"))
        chain = expected(engine.add("probe", max_tokens=20), 20)
        engine.core.abort("probe")
        stop = chain[accepted]
        options: dict[str, Any] = {"max_tokens": 20, "stop_token_ids": (stop,)}
        wanted, reason = chain[: chain.index(stop) + 1], "stop"
        if "length" in changes:
            options, wanted, reason = {"max_tokens": accepted + 1}, chain[: accepted + 1], "length"
        elif "late" in changes:
            options["min_tokens"] = accepted + 1
            wanted, reason = chain, "length"
        engine.add("r", **options)
        engine.run()
        assert engine.tokens("r") == wanted
        assert engine.end("r").finish_reason == reason
        assert engine.core.stats().num_kv_blocks_used == 0


def test_drafts_behind_the_end_of_an_answer_are_charged_as_rejected_ones() -> None:
    served: list[float] = []
    for drafter in (planted("right"), None):
        engine = core_engine(drafter)
        chain = expected(engine.add("probe", max_tokens=20), 20)
        engine.core.abort("probe")
        engine.add("r", max_tokens=20, stop_token_ids=(chain[3],))
        engine.run()
        assert engine.tokens("r") == chain[:4]
        served.append(sum(engine.core.exchange_service({}).values()))
        assert drafter is None or drafter.num_behind_end == 5
    assert served[0] == pytest.approx(served[1] + 5), "three of the eight were delivered"


def test_an_answer_behind_a_draft_is_found_as_a_prefix() -> None:
    """Blocks that hold accepted drafts are found, with the right content; those with rejected ones are not."""
    for kind in KINDS:
        engine = core_engine(planted(kind))
        first = engine.add("first", max_tokens=60)
        engine.run()
        prompt = (*first.prompt_ids, *engine.tokens("first"))
        follow = engine.add("follow", prompt_ids=prompt, max_tokens=5)
        engine.run()
        assert engine.tokens("follow") == expected(follow, 5)
        usage = engine.end("follow").usage
        assert usage is not None
        assert usage.cached_tokens == (len(prompt) - 1) // 16 * 16


@pytest.mark.parametrize("is_deleted", [False, True])
def test_answers_of_a_version_that_is_deleted_are_not_kept(is_deleted: bool) -> None:
    drafter = Drafter(bytes_per_tenant=1 << 20, total_bytes=1 << 20)
    engine = core_engine(drafter)
    engine.add("ended", adapter(1), max_tokens=8)
    engine.run()
    assert drafter.num_bytes > 0
    engine.add("live", adapter(1), max_tokens=8)
    while not engine.tokens("live"):
        engine.step()
    if is_deleted:
        engine.core.drop(adapter(1).digest)
    kept = drafter.num_bytes
    assert (kept == 0) == is_deleted
    engine.run()
    assert len(engine.tokens("live")) == 8
    assert (drafter.num_bytes > kept) != is_deleted


@pytest.mark.parametrize(
    ("options", "is_kept"), [({}, True), ({"speculation": False}, False), ({"background": True}, False)]
)
def test_answers_are_kept_of_requests_alone_that_may_draft(options: dict[str, Any], is_kept: bool) -> None:
    drafter = Drafter(bytes_per_tenant=1 << 20, total_bytes=1 << 20)
    engine = core_engine(drafter)
    engine.add("aborted", max_tokens=60, **options)
    while not engine.tokens("aborted"):
        engine.step()
    engine.core.abort("aborted")
    assert drafter.num_bytes == 0
    engine.add("ended", max_tokens=8, **options)
    engine.run()
    assert len(engine.tokens("ended")) == 8
    assert (drafter.num_bytes > 0) == is_kept


AVX2_COSTS = StepCosts.from_seconds(
    {1: 1.0, 2: 1.2, 3: 1.28, 4: 1.29, 5: 1.71, 8: 2.1, 9: 2.19, 16: 3.6, 17: 3.8, 32: 5.5, 64: 11.0}
)
FLAT_COSTS = StepCosts(tuple(1.0 + 0.035 * rows for rows in range(64)))
"""A device on which a row costs little, so that poor drafts are worth a row for longer."""


def cost_beside_nonsense(
    costs: StepCosts, drafter: Drafter | None, num_nonsense: int
) -> tuple[float, Counter[str]]:
    """The cost of all steps of a request beside sequences whose tokens repeat without any order, and rows by tenant."""
    engine = core_engine(drafter, costs, num_blocks=600, max_model_len=1200, max_num_batched_tokens=256)
    engine.runner.vocab_size = 23  # nearly every pair of tokens occurred before, and says nothing of the next
    engine.runner.keep_plans = True
    for number in range(num_nonsense):
        engine.add(
            f"n{number}",
            tenant_id="nonsense",
            prompt_ids=(number + 1,) * 2,
            max_tokens=800,
            ignore_eos=True,
        )
    engine.add("r", tenant_id="other", prompt_ids=(1, 2), max_tokens=600, ignore_eos=True, speculation=False)
    while engine.core.has_work and "r" in engine.core._tracker.live:
        engine.now += 0.01
        engine.events += engine.core.step()
    assert len(engine.tokens("r")) == 600
    rows: Counter[str] = Counter()
    for plan in engine.runner.plans:
        for part in plan.scheduled:
            rows[part.request.tenant_id] += part.num_tokens
    return sum(costs.cost(plan.num_tokens) for plan in engine.runner.plans), rows


@pytest.mark.parametrize(("costs", "num_nonsense"), [(AVX2_COSTS, 2), (FLAT_COSTS, 7)])
def test_a_tenant_that_drafts_nonsense_costs_others_one_percent_at_most(
    costs: StepCosts, num_nonsense: int
) -> None:
    drafter = Drafter(bytes_per_tenant=1 << 20, total_bytes=1 << 20)
    cost, rows = cost_beside_nonsense(costs, drafter, num_nonsense)
    plain, plain_rows = cost_beside_nonsense(costs, None, num_nonsense)
    assert rows["nonsense"] > plain_rows["nonsense"], "it drafts"
    assert rows["other"] == plain_rows["other"], "it does not"
    assert cost <= 1.01 * plain
