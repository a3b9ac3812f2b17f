"""Activated LoRA in the scheduler: the base's KV before the invocation, the adapter's behind it, and their names."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from loraplex.adapters.ref import AdapterRef
from loraplex.engine.config import Charges
from loraplex.engine.kv import prefix_keys
from loraplex.engine.types import BlockKey, EngineRequest, SamplingParams, Sequence
from loraplex.kernels.attention import BLOCK_SIZE
from support.engine.core_engine import CoreEngine, adapter, expected

CHARGES = Charges()


def keys_of(
    tokens: list[int], *, place: int = 0, tenant: str = "acme", digest: str | None = "d"
) -> list[BlockKey]:
    ref = None if digest is None else AdapterRef(tenant, "judge", 1, digest, 8)
    request = EngineRequest("r", tenant, tuple(tokens), SamplingParams(1), ref, adapter_from=place)
    return list(prefix_keys.extend_keys(Sequence(request, 0.0, 0, list(tokens))))


def test_a_generated_invocation_and_one_of_the_prompt_are_other_content() -> None:
    """One has its invocation at 20 and generates it again at 24; of the other the same tokens are the prompt, so that
    its adapter acts from 24 on. The same tokens, and other KV at 20 to 23."""
    engine = CoreEngine(num_blocks=64)
    first = engine.add("first", adapter(1), prompt_ids=tuple(range(100, 124)), adapter_from=20, max_tokens=9)
    engine.run()
    spelled = (*first.prompt_ids, *engine.tokens("first"))
    second = engine.add("second", adapter(1), prompt_ids=(*spelled, 7), adapter_from=24)
    other = replace(second, adapter_from=20)
    assert expected(second, 5) != expected(other, 5)
    engine.run()
    assert engine.tokens("second") == expected(second, 5)


@st.composite
def kv_of_requests(draw: st.DrawFn) -> tuple[list[BlockKey], list[tuple[Any, ...]]]:
    """A request's tokens, of few kinds so that beginnings are common: the keys of its full blocks, and what each holds.
    KV is a function of the tokens up to a block's end and of the adapter at each of them; tenants never share it."""
    tenant = draw(st.sampled_from(["a", "b"]))
    digest = draw(st.sampled_from([None, "d", "e"]))
    shared = draw(st.integers(0, 3 * BLOCK_SIZE))
    own = draw(st.lists(st.integers(0, 1), min_size=1, max_size=2 * BLOCK_SIZE))
    tokens = [0] * shared + own
    # The prompt ends somewhere behind the place; what follows was generated.
    place = 0 if digest is None else draw(st.integers(0, len(tokens) - 1))
    acting = [None] * place + [digest] * (len(tokens) - place)
    ends = range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE)
    contents = [(tenant, tuple(tokens[:end]), tuple(acting[:end])) for end in ends]
    return keys_of(tokens, place=place, tenant=tenant, digest=digest), contents


@given(st.lists(kv_of_requests(), min_size=2, max_size=12))
def test_blocks_are_shared_where_the_content_is_the_same_and_nowhere_else(
    requests: list[tuple[list[BlockKey], list[tuple[Any, ...]]]],
) -> None:
    by_key: dict[BlockKey, tuple[Any, ...]] = {}
    by_content: dict[tuple[Any, ...], BlockKey] = {}
    for keys, contents in requests:
        for key, content in zip(keys, contents, strict=True):
            assert by_key.setdefault(key, content) == content
            assert by_content.setdefault(content, key) == key
            assert key[0][0] == content[0]


def rows_of(engine: CoreEngine, names: Collection[str]) -> list[tuple[Any, ...]]:
    """What each step has computed for these requests: the time that it took them, without a clock."""
    return [
        tuple(
            (row.request_id, row.start, row.num_tokens, row.slot >= 0)
            for row in plan.scheduled
            if row.request_id in names
        )
        for plan in engine.runner.plans
        if any(row.request_id in names for row in plan.scheduled)
    ]


@st.composite
def probes(draw: st.DrawFn, tenant: str) -> list[dict[str, Any]]:
    """Requests of a tenant about one of two conversations: on the base, on plain and on activated adapters, whose bytes
    others may have pushed too; answers, log probabilities of the prompt, and embeddings."""
    asked = []
    for _ in range(draw(st.integers(1, 4))):
        prompt = tuple(range(100, 100 + draw(st.sampled_from([2, 17, 33, 40, 70]))))
        number = draw(st.sampled_from([None, 1, 2]))
        changes: dict[str, Any] = {"prompt_ids": prompt, "tenant_id": tenant, "max_tokens": 2}
        changes |= draw(
            st.sampled_from([{}, {}, {"prompt_logprobs": 0}, {"pooling": "mean", "max_tokens": 0}])
        )
        if number is not None:
            changes |= {
                "adapter": adapter(number, tenant),
                "adapter_from": draw(st.sampled_from([0, 1, len(prompt) // 2, len(prompt) - 1])),
            }
        asked.append(changes)
    return asked


def observed(engine: CoreEngine, probes: list[dict[str, Any]]) -> list[Any]:
    """What their tenant sees of them, one after the other: all that is answered, and what was computed for it."""
    engine.runner.keep_plans = True
    names = [f"probe-{number}" for number in range(len(probes))]
    for name, probe in zip(names, probes, strict=True):
        engine.add(name, **probe)
        engine.run()
    events = [
        structs.replace(event, timing=None, adapter_state=None)
        for event in engine.events
        if event.request_id in names
    ]
    return [events, rows_of(engine, names)]


@given(probes("victim"), probes("spy"))
def test_a_tenant_learns_nothing_of_anothers_conversations(
    asked: list[dict[str, Any]], spied: list[dict[str, Any]]
) -> None:
    """The same conversations on the base and on adapters of the same bytes, first all that the victim asked: usage, log
    probabilities and the positions that are computed, which are the time to the first token, are what they are on an
    engine that nobody else has used."""
    repeated = [probe | {"tenant_id": "spy"} for probe in asked]
    for probe in repeated:
        if "adapter" in probe:
            probe["adapter"] = replace(probe["adapter"], tenant_id="spy")
    spied = [*repeated, *spied]
    used, unused = CoreEngine(num_blocks=200), CoreEngine(num_blocks=200)
    for number, request in enumerate(asked):
        used.add(f"victim-{number}", **request)
        used.run()
    assert observed(used, spied) == observed(unused, spied)


def test_the_base_and_every_activated_adapter_share_one_conversation() -> None:
    engine = CoreEngine(num_blocks=64)
    conversation = tuple(range(1, 83))
    engine.add("base", None, prompt_ids=conversation)
    engine.run()
    for number in (1, 2):
        request = engine.add(
            f"judge-{number}", adapter(number), prompt_ids=(*conversation, 90, 91), adapter_from=82
        )
        engine.run()
        assert engine.tokens(request.request_id) == expected(request, 5)
        usage = engine.end(request.request_id).usage
        assert usage is not None
        assert usage.cached_tokens == 80
    # And the base finds what an adapter's request computed before its invocation.
    longer = tuple(range(200, 250))
    engine.add("judge-first", adapter(1), prompt_ids=(*longer, 90), adapter_from=50)
    engine.run()
    plain = engine.add("base-after", None, prompt_ids=(*longer, 5))
    engine.run()
    usage = engine.end("base-after").usage
    assert usage is not None
    assert usage.cached_tokens == 48
    assert engine.tokens("base-after") == expected(plain, 5)


def test_the_chunk_ends_at_the_place_and_its_rows_have_no_slot() -> None:
    engine = CoreEngine(num_blocks=64, max_num_batched_tokens=16)
    engine.runner.keep_plans = True
    request = engine.add("r", adapter(1), prompt_ids=tuple(range(1, 41)), adapter_from=20, max_tokens=2)
    engine.run()
    rows = [
        (row.start, row.num_tokens, row.slot >= 0) for plan in engine.runner.plans for row in plan.scheduled
    ]
    assert rows == [(0, 16, False), (16, 4, False), (20, 12, True), (32, 8, True), (40, 1, True)]
    # What is left of a step is the adapter's.
    assert [len(plan.scheduled) for plan in engine.runner.plans] == [1, 2, 1, 1]
    assert engine.tokens("r") == expected(request, 2)


@pytest.mark.parametrize("max_num_seqs", [1, 2])
def test_a_step_has_no_more_slices_than_places(max_num_seqs: int) -> None:
    engine = CoreEngine(num_blocks=64, max_num_seqs=max_num_seqs)
    engine.runner.keep_plans = True
    requests = [
        engine.add(name, adapter(1), prompt_ids=tuple(range(1, 30)), adapter_from=10) for name in ("a", "b")
    ]
    engine.run()
    assert max(len(plan.scheduled) for plan in engine.runner.plans) == max_num_seqs
    assert [engine.tokens(r.request_id) for r in requests] == [expected(r, 5) for r in requests]


def test_positions_before_the_place_cost_what_the_base_costs() -> None:
    def charged(place: int) -> float:
        engine = CoreEngine(num_blocks=64, max_num_batched_tokens=8)
        engine.add("r", adapter(1), prompt_ids=tuple(range(1, 31)), adapter_from=place, max_tokens=2)
        while not engine.tokens("r"):
            engine.step()
        return engine.core.stats().tenants["acme"].counter

    surcharge = CHARGES.prefill * (CHARGES.price(8) - 1)
    assert charged(0) - charged(20) == pytest.approx(20 * surcharge)
    assert charged(0) - charged(29) == pytest.approx(29 * surcharge)


def test_log_probabilities_go_on_across_the_place() -> None:
    from support.engine.fake_runner import reference_scores

    engine = CoreEngine(num_blocks=64, max_num_batched_tokens=8)
    request = engine.add(
        "r", adapter(1), prompt_ids=tuple(range(1, 31)), adapter_from=13, max_tokens=2, prompt_logprobs=2
    )
    engine.run()
    told = [
        event.scores.prompt for event in engine.events if event.scores is not None and event.scores.prompt
    ]
    scores = reference_scores(
        adapter(1).digest, request.prompt_ids, tuple(engine.tokens("r")), request.sampling, 13
    )
    assert scores.prompt is not None
    assert sum(map(len, told)) == len(scores.prompt) == 29
    first = 0
    for part in told:
        assert part == scores.prompt.part(first, first + len(part))
        first += len(part)


def test_an_answer_goes_on_behind_generated_tokens() -> None:
    engine = CoreEngine(num_blocks=64)
    whole = engine.add("whole", adapter(1), prompt_ids=tuple(range(1, 31)), adapter_from=18, max_tokens=8)
    engine.run()
    engine.core.add_request(replace(whole, request_id="rest", generated=tuple(engine.tokens("whole")[:3])))
    engine.run()
    assert engine.tokens("rest") == engine.tokens("whole")[3:] == expected(whole, 8)[3:]


def test_embeddings_are_of_both_sides_of_the_place() -> None:
    from support.engine.fake_runner import reference_pooled

    for pooling in ("mean", "last"):
        engine = CoreEngine(num_blocks=64)
        request = engine.add(
            "r", adapter(1), prompt_ids=tuple(range(1, 31)), adapter_from=18, max_tokens=0, pooling=pooling
        )
        engine.run()
        found = reference_pooled(adapter(1).digest, request.prompt_ids, pooling, 18)
        assert engine.end("r").pooled == found


@pytest.mark.parametrize(("ref", "place"), [(adapter(1), 20), (adapter(1), -1), (None, 3)])
def test_a_place_outside_the_prompt_or_without_an_adapter_is_refused(
    ref: AdapterRef | None, place: int
) -> None:
    engine = CoreEngine()
    engine.add("r", ref, adapter_from=place)
    assert engine.run()[-1].error is not None
    assert engine.error("r") == "internal_error"
