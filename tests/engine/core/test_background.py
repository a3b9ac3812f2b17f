"""Background requests in the core, with the fake runner and transport: what they leave alone, and what they get."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.engine.scheduling.background import MAX_BACKGROUND
from loraplex.engine.types import EngineRequest, StepPlan
from support.engine.core_engine import CoreEngine, adapter, expected
from support.engine.fake_transport import Fate


class Watched(CoreEngine):
    """A core whose submitted steps are recorded."""

    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        self.plans: list[StepPlan] = []
        submit = self.runner.submit

        def recording(plan: StepPlan) -> object:
            assert len(plan.scheduled) <= self.config.max_num_seqs
            self.plans.append(plan)
            return submit(plan)

        self.runner.submit = recording  # type: ignore[method-assign]

    def rows(self, *, background: bool = False) -> list[list[tuple[str, int, int]]]:
        """Name, start and size of the slices of each step since the last call, without empty steps."""
        steps = [
            [
                (row.request_id, row.start, row.num_tokens)
                for row in plan.scheduled
                if row.request.background is background
            ]
            for plan in self.plans
        ]
        self.plans.clear()
        return [step for step in steps if step]


@dataclass(frozen=True)
class Act:
    """A request that comes, ends or leaves after `steps` more steps."""

    kind: str
    steps: int
    prompt: int = 1
    tokens: int = 1
    tenant: str = "acme"
    adapter: int | None = None
    scored: bool = False


ACTS = st.lists(
    st.builds(
        Act,
        st.sampled_from(["real", "real", "shadow", "shadow", "shadow", "abort"]),
        st.sampled_from([0, 1, 2, 9]),
        st.integers(1, 90),
        st.integers(1, 30),
        st.sampled_from(["acme", "umbrella"]),
        st.sampled_from([None, 1, 2]),
        st.booleans(),
    ),
    min_size=6,
    max_size=24,
)


@dataclass
class Run:
    """One history in a core, with its background requests or without them."""

    shadowed: bool
    lookahead: int
    batch: bool = False
    step_s: float = 0.01
    trace: list[list[tuple[str, int, int]]] = field(default_factory=list)
    shadows: list[EngineRequest] = field(default_factory=list)
    engine: Watched = field(init=False)

    def __post_init__(self) -> None:
        self.engine = Watched(
            num_blocks=14, max_num_seqs=3, max_num_batched_tokens=48, lookahead=self.lookahead
        )
        for number in (1, 2):  # on the device before, so that no load is part of the history
            self.engine.add(f"warm-up-{number}", adapter(number))
        self.engine.run()
        self.engine.plans.clear()

    def play(self, acts: list[Act]) -> None:
        live: list[str] = []
        for index, act in enumerate(acts):
            for _ in range(act.steps):
                self.step()
            # No two prompts begin alike: hits in the prefix cache are the one thing that may differ.
            prompt = (index + 1, *range(100, 99 + act.prompt))
            if act.kind == "abort":
                if live:
                    self.engine.core.abort(live.pop(act.prompt % len(live)))
            elif act.kind == "real" or self.shadowed:
                name, background = f"{act.kind}-{index}", act.kind == "shadow"
                ref = None if act.adapter is None else adapter(act.adapter, act.tenant)
                request = self.engine.add(
                    name,
                    ref,
                    prompt_ids=prompt,
                    max_tokens=act.tokens,
                    prompt_logprobs=0 if act.scored and background else None,
                    tenant_id=act.tenant,
                    background=background,
                    batch=background and self.batch,
                )
                if background:
                    self.shadows.append(request)
                else:
                    live.append(name)
        for _ in range(3000):
            if not self.engine.core.has_work:
                return
            self.step()
        raise AssertionError("it does not come to an end")

    def step(self) -> None:
        self.engine.step(self.step_s)
        self.trace += self.engine.rows()


@given(ACTS, st.sampled_from([0, 1]), st.booleans(), st.sampled_from([0.01, 0.3]))
def test_requests_are_computed_step_for_step_as_without_background_requests(
    acts: list[Act], lookahead: int, batch: bool, step_s: float
) -> None:
    alone, beside = Run(False, lookahead, batch, step_s), Run(True, lookahead, batch, step_s)
    alone.play(acts)
    beside.play(acts)
    assert beside.trace == alone.trace
    for shadow in beside.shadows:  # preempted or not, its tokens are those of an undisturbed run
        assert beside.engine.end(shadow.request_id).finish_reason in ("length", "stop")
        tokens = beside.engine.tokens(shadow.request_id)
        assert tokens == expected(shadow, len(tokens))


def test_a_preempted_background_request_samples_what_an_undisturbed_one_does() -> None:
    engine = Watched(num_blocks=12, max_num_seqs=2)
    shadow = engine.add("shadow", prompt_ids=tuple(range(1, 60)), max_tokens=40, background=True)
    for index in range(6):
        for _ in range(4):
            engine.step(0.01)
        engine.add(f"real-{index}", prompt_ids=(500 + index, *range(1, 120)), max_tokens=3)
    engine.run()
    end = engine.end("shadow")
    assert end.timing is not None
    assert end.timing.num_preemptions > 0
    assert engine.tokens("shadow") == expected(shadow, len(engine.tokens("shadow")))
    assert engine.core.stats().num_preemptions == 0


def test_nothing_of_it_runs_while_another_request_waits() -> None:
    engine = Watched()
    engine.transport.load_fate = lambda digest: Fate(3.0)
    engine.add("shadow", background=True, max_tokens=50)
    engine.step(0.01)
    assert engine.rows(background=True)
    engine.add("cold", adapter(1))
    for _ in range(5):
        engine.step(0.01)
    assert not engine.rows(background=True)
    engine.run()
    assert engine.end("shadow").finish_reason in ("length", "stop")


def test_beside_others_it_gets_one_token_for_eight_of_theirs() -> None:
    engine = Watched(num_blocks=256, max_num_batched_tokens=512, max_num_seqs=32)
    for index in range(16):
        engine.add(f"real-{index}", prompt_ids=(index + 1, 2, 3), max_tokens=20, ignore_eos=True)
    engine.step(0.01)
    for index in range(8):
        engine.add(f"shadow-{index}", max_tokens=20, background=True, ignore_eos=True)
    engine.plans.clear()
    for _ in range(10):
        engine.step(0.01)
    assert {sum(row[2] for row in step) for step in engine.rows(background=True)} == {2}


def test_a_long_prompt_alone_is_computed_in_short_steps() -> None:
    engine = Watched(num_blocks=256, max_num_batched_tokens=512)
    engine.add("shadow", prompt_ids=tuple(range(1, 401)), max_tokens=1, background=True)
    engine.run()
    assert max(size for step in engine.rows(background=True) for _, _, size in step) == 64


def test_it_is_charged_to_nobody_and_is_no_request_of_its_tenant() -> None:
    engine = Watched()
    engine.add("shadow", adapter(1), background=True, tenant_id="acme", max_tokens=30)
    engine.add("real", tenant_id="acme", max_tokens=30, ignore_eos=True)
    for _ in range(8):
        engine.step(0.01)
    behind = engine.core.stats()
    lone = Watched()
    lone.add("real", tenant_id="acme", max_tokens=30, ignore_eos=True)
    for _ in range(8):
        lone.step(0.01)
    assert behind.tenants == lone.core.stats().tenants
    assert (behind.num_running, behind.num_waiting, behind.waiting_adapters) == (1, 0, ())
    assert behind.num_kv_blocks_used == lone.core.stats().num_kv_blocks_used


def test_its_kv_is_not_found_and_it_finds_none() -> None:
    engine = Watched()
    engine.add("first", background=True, prompt_ids=tuple(range(1, 50)))
    engine.run()
    engine.add("second", prompt_ids=tuple(range(1, 50)))
    engine.add("third", prompt_ids=tuple(range(1, 50)), background=True)
    engine.run()
    usages = [engine.end(name).usage for name in ("second", "third")]
    assert [usage.cached_tokens for usage in usages if usage is not None] == [0, 0]


def test_its_adapter_takes_free_device_memory_alone_and_is_the_first_to_go() -> None:
    engine = Watched(num_pages=2, num_slots=2)
    for number in (1, 2):
        engine.add(f"real-{number}", adapter(number))
    engine.run()
    engine.add("shadow", adapter(3), background=True, deadline=1.0)
    engine.run()
    assert engine.error("shadow") == "deadline_exceeded"
    assert {1, 2} == {n for n in (1, 2, 3) if engine.cache.state(adapter(n).digest) == "hot"}

    engine = Watched(num_pages=2, num_slots=2)
    engine.add("real-1", adapter(1))
    engine.run()
    for _ in range(3):  # used often, and last
        engine.add("shadow", adapter(3), background=True)
        engine.run()
        assert engine.events.pop().finish_reason in ("length", "stop")
        engine.events.clear()
    engine.add("real-2", adapter(2))
    engine.run()
    assert {1, 2} == {n for n in (1, 2, 3) if engine.cache.state(adapter(n).digest) == "hot"}


def test_a_load_waits_one_step_at_most_for_the_adapter_of_a_background_request() -> None:
    engine = Watched(num_pages=1, num_slots=1, lookahead=1)
    engine.add("shadow", adapter(1), background=True, max_tokens=80, ignore_eos=True)
    for _ in range(5):
        engine.step(0.01)
    assert engine.rows(background=True)
    engine.add("real", adapter(2))
    for _ in range(4):
        engine.step(0.01)
    assert engine.rows()


def test_too_many_are_refused_and_no_other_request_for_them() -> None:
    engine = Watched(max_waiting=2, max_num_seqs=1)
    for index in range(MAX_BACKGROUND + 1):
        engine.add(f"shadow-{index}", background=True)
    for index in range(2):
        engine.add(f"real-{index}")
    engine.step()
    ended = {event.request_id: event.error for event in engine.events if event.error is not None}
    assert [(name, error.code) for name, error in ended.items()] == [
        (f"shadow-{MAX_BACKGROUND}", "server_overloaded")
    ]


def test_a_full_queue_ends_no_background_request_for_another() -> None:
    engine = Watched(max_waiting=2, max_num_seqs=1)
    engine.add("shadow", background=True, tenant_id="umbrella")
    for index in range(3):
        engine.add(f"real-{index}")
    engine.run()
    assert engine.error("real-2") == "server_overloaded"
    assert engine.end("shadow").finish_reason in ("length", "stop")


@pytest.mark.parametrize("odd", [{"grammar": "start: /a/"}, {"adapter_from": 1}, {"generated": (1,)}])
def test_what_it_does_not_take_is_refused_by_name(odd: dict[str, Any]) -> None:
    engine = Watched()
    engine.add("shadow", adapter(1), background=True, **odd)
    engine.run()
    assert engine.error("shadow") in ("internal_error", "grammar_failed")


def test_all_of_them_end_when_the_engine_is_to_stop() -> None:
    engine = Watched()
    engine.add("real", max_tokens=10, ignore_eos=True)
    for index in range(3):
        engine.add(f"shadow-{index}", background=True)
    engine.step()
    engine.core.end_background()
    engine.run()
    assert [engine.end(f"shadow-{index}").finish_reason for index in range(3)] == ["abort"] * 3
    assert engine.end("real").finish_reason == "length"


def test_an_idle_core_sleeps_while_the_adapter_of_a_background_request_is_missing() -> None:
    engine = Watched()
    engine.transport.load_fate = lambda digest: Fate(3.0)
    engine.add("shadow", adapter(1), background=True)
    engine.step()
    assert engine.core.idle_s() != 0.0
    engine.run()
    assert engine.end("shadow").finish_reason in ("length", "stop")
