"""States of delta nets and of Mamba-2 in an engine with its real kernels: what is found again, shared, and spoilt."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.engine.kv.cache import KVCache
from loraplex.engine.kv.states import state_bytes
from loraplex.engine.logprobs import join_scores
from loraplex.engine.types import EngineRequest, SamplingParams
from support.adapters.tiny_adapters import ADAPTERS, save_adapters
from support.engine.grammars import VOCAB_SIZE, regex_case, text_of
from support.engine.local_engine import LocalEngine
from support.models.byte_tokenizer import EOS_ID, write_byte_tokenizer
from support.models.checkpoints import FAMILIES, save_tiny
from support.models.loading import plan_model
from support.simulator.core_integrity import check_core

pytestmark = pytest.mark.usefixtures("one_torch_thread")

INVOCATION = (1, 2)
JUDGES = tuple(f"judge{number}" for number in range(8))


@pytest.fixture(
    scope="module",
    params=["qwen3_5-2", *(pytest.param(f, marks=pytest.mark.soak) for f in ("olmo_hybrid", "granite4-h"))],
)
def folders(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Path]]:
    root, family = tmp_path_factory.mktemp("delta"), FAMILIES[request.param]
    base = save_tiny(root / "base", family | {"vocab_size": VOCAB_SIZE, "eos_token_id": EOS_ID})
    write_byte_tokenizer(base)
    judge = {**ADAPTERS["all"], "alora_invocation_tokens": list(INVOCATION)}
    chosen = {name: {**judge, "r": 1 + n} for n, name in enumerate(JUDGES)} | {"plain": ADAPTERS["all"]}
    return base, save_adapters(base, root, chosen)


class Unlucky:
    """A model that finds no memory for attention, behind layers that have written their states, in the passes that
    `fails` names by their numbers from now on."""

    def __init__(self) -> None:
        self.fails: set[int] = set()

    def wrap(self, model: Any) -> Any:
        unlucky = self

        class Model:
            def __getattr__(self, name: str) -> Any:
                return getattr(model, name)

            def forward(self, batch: Any) -> torch.Tensor:
                now, unlucky.fails = 0 in unlucky.fails, {number - 1 for number in unlucky.fails if number}
                if not now:
                    return model.forward(batch)
                recorded, model._recorded = model._recorded, None
                try:
                    return model.forward(replace(batch, attention=NoMemory()))
                finally:
                    model._recorded = recorded

        return Model()


class NoMemory:
    def __getitem__(self, group: int) -> Any:
        raise torch.OutOfMemoryError("the device is out of memory")


@pytest.fixture(scope="module")
def unlucky() -> Unlucky:
    return Unlucky()


@pytest.fixture(scope="module")
def engine(
    folders: tuple[Path, dict[str, Path]], unlucky: Unlucky, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalEngine]:
    state = state_bytes(plan_model(folders[0]).shape.caches)
    made = LocalEngine(
        folders[0], tmp_path_factory.mktemp("engine"), dtype="float32", kernels="numba", max_model_len=256,
        max_num_seqs=12, num_threads=1, kv_cache_memory=8 << 20, max_num_batched_tokens=50, adapter_memory=4 << 20,
        adapter_cpu_memory=4 << 20, state_cache=24 * state, wrap_model=unlucky.wrap,
    )  # fmt: skip
    yield made
    check_core(made.core)
    made.close()


def words(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, EOS_ID) for _ in range(count)]


def cached(engine: LocalEngine, name: str) -> int:
    usage = engine.events[name][-1].usage
    assert usage is not None
    return usage.cached_tokens


def took(engine: LocalEngine, name: str) -> tuple[Any, ...]:
    """The tokens, log probabilities and embedding of a request that has ended well."""
    events = engine.events[name]
    assert events[-1].error is None, name
    scores = join_scores([event.scores for event in events if event.scores is not None])
    return engine.tokens(name), scores, events[-1].pooled


def memory(engine: LocalEngine) -> KVCache:
    kv = engine.built.runner._kv
    assert isinstance(kv, KVCache)
    return kv


def test_turns_of_a_chat_compute_16_rows_more_than_what_is_new_and_copy_nothing(engine: LocalEngine) -> None:
    said, states = words(1, 37), memory(engine).states
    for turn, count in enumerate((20, 3, 17, 30)):
        before = states.clone()
        engine.add(f"turn {turn}", said, max_tokens=count)
        engine.run()
        answer = engine.tokens(f"turn {turn}")
        computed = len(said) - cached(engine, f"turn {turn}") + count
        assert turn == 0 or computed <= 9 + 16 + count
        written = int((states != before).any(1).sum())
        assert written <= (len(said) + count) // 16 - cached(engine, f"turn {turn}") // 16
        said = [*said, *answer, *words(2 + turn, 9)]
        engine.add(
            f"alone {turn}", said[: -len(answer) - 9], max_tokens=count, prompt_logprobs=0
        )  # finds no prefix
        engine.run()
        assert cached(engine, f"alone {turn}") == 0
        assert engine.tokens(f"alone {turn}") == answer


def test_judges_over_one_conversation_hold_its_state_together(
    engine: LocalEngine, folders: tuple[Path, dict[str, Path]]
) -> None:
    talk = words(3, 51)
    refs = {name: engine.publish(folders[1][name]) for name in JUDGES}
    alone = {}
    for name, ref in refs.items():  # each before anything can be found
        engine.add(f"{name} alone", [*talk, *INVOCATION], ref, max_tokens=8, prompt_logprobs=0)
        engine.run()
        alone[name] = engine.tokens(f"{name} alone")
    engine.add("talk", talk, max_tokens=1)
    engine.run()
    states = memory(engine).states
    before = states.clone()
    for name, ref in refs.items():
        engine.add(name, [*talk, *INVOCATION], ref, max_tokens=8)
    most = running = 0
    while engine.core.has_work:
        engine.step()
        stats = engine.core.stats()
        most, running = max(most, stats.num_states_used), max(running, stats.num_running)
    assert (running, most) == (8, 1)
    assert {name: engine.tokens(name) for name in JUDGES} == alone
    assert {cached(engine, name) for name in JUDGES} == {48}
    assert torch.equal(states, before)  # nothing is copied


def test_a_state_that_is_not_finite_ends_its_own_request_and_is_not_found(engine: LocalEngine) -> None:
    prompts = {"spoilt": words(4, 40), "neighbour": words(5, 40)}
    for name, prompt in prompts.items():
        engine.add(f"{name} before", prompt, max_tokens=12, prompt_logprobs=0)
        engine.run()
    for name, prompt in prompts.items():
        engine.add(name, prompt, max_tokens=12)
    while len(engine.events.get("neighbour", ())) < 2:
        engine.step()
    (state,) = (seq.states[-1][1] for seq in engine.core._scheduler.running if seq.request_id == "spoilt")
    memory(engine).states[state].view(torch.float32).fill_(float("nan"))
    engine.run()
    error = engine.events["spoilt"][-1].error
    assert error is not None
    assert engine.tokens("neighbour") == engine.tokens("neighbour before")
    engine.add("again", prompts["spoilt"], max_tokens=12)
    engine.run()
    assert engine.tokens("again") == engine.tokens("spoilt before")


def test_an_answer_that_another_engine_began_goes_on_as_it_was(engine: LocalEngine) -> None:
    prompt = words(6, 30)
    engine.add("whole", prompt, max_tokens=24, prompt_logprobs=0)
    engine.run()
    answer = engine.tokens("whole")
    for cut in (1, 2, 3, 18, 19, 23):  # before, at and behind the ends of windows
        sampling = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, prompt_logprobs=0)
        begun = tuple(answer[:cut])
        engine.core.add_request(
            EngineRequest(f"from {cut}", "acme", tuple(prompt), sampling, generated=begun)
        )
    engine.run()
    for cut in (1, 2, 3, 18, 19, 23):
        assert engine.tokens(f"from {cut}") == answer[cut:]


@pytest.mark.parametrize("count", [17, 40, 100])
def test_a_short_beginning_is_found(count: int, engine: LocalEngine) -> None:
    """In vLLM blocks of Qwen3.5 grew to 528 positions, and no shorter beginning was found (vllm#40696)."""
    shared = words(20 + count, count)
    for number in range(4):
        engine.add(f"{count} {number}", [*shared, *words(30 + number, 25)], max_tokens=2)
        engine.run()
    # The second request shows that someone shares it, and leaves its state.
    assert [cached(engine, f"{count} {number}") for number in range(4)] == [0, 0, *2 * [count // 16 * 16]]


def test_states_of_a_version_that_left_go_first_and_of_other_tenants_are_not_found(
    folders: tuple[Path, dict[str, Path]], engine: LocalEngine
) -> None:
    ref, prompts = engine.publish(folders[1]["plain"]), {"kept": words(60, 40), "left": words(61, 40)}
    for name, adapter in (("left", ref), ("kept", None)):
        engine.add(f"{name} first", prompts[name], adapter, max_tokens=2)
        engine.run()
    sampling = SamplingParams(max_tokens=2, temperature=0.0)
    engine.core.add_request(EngineRequest("other tenant", "brook", tuple(prompts["kept"]), sampling))
    engine.run()
    assert cached(engine, "other tenant") == 0
    engine.core.drop(ref.digest)
    for number in range(engine.core.stats().num_snapshots // 2):
        engine.add(f"more {number}", words(100 + number, 20), max_tokens=1)
        engine.run()
    for name, adapter in (("left", ref), ("kept", None)):
        engine.add(f"{name} again", prompts[name], adapter, max_tokens=2)
        engine.run()
    assert (cached(engine, "left again"), cached(engine, "kept again")) == (0, 32)
    assert engine.tokens("left again") == engine.tokens("left first")


def test_a_step_without_memory_between_two_layers_changes_no_answer(
    engine: LocalEngine, unlucky: Unlucky
) -> None:
    prompts = {f"memory {number}": words(70 + number, 13 + 9 * number) for number in range(4)}
    for name, prompt in prompts.items():
        engine.add(f"{name} alone", prompt, max_tokens=40, prompt_logprobs=0, logprobs=0)
        engine.run()
    failed = engine.core.stats().num_out_of_memory
    unlucky.fails = {0, 2, 5, 14, 15, 16, 30}
    for name, prompt in prompts.items():
        engine.add(name, prompt, max_tokens=40, prompt_logprobs=0, logprobs=0)
    engine.run()
    assert not unlucky.fails
    assert engine.core.stats().num_out_of_memory >= failed + 7
    for name in prompts:
        assert took(engine, name) == took(engine, f"{name} alone"), name


def test_all_kinds_of_requests_beside_each_other(engine: LocalEngine) -> None:
    """An answer, log probabilities of a prompt, an embedding, a shadow, a line of a batch, and grammars. One dictates
    tokens over the ends of windows."""
    grammars = {
        "spelled": regex_case("[a-z]{2,40}"),
        "dictated": regex_case("the weather of all the places is fine: [a-z]{6}"),
    }

    def ask(name: str) -> None:
        kind, prompt = name.split()[0], words(len(name.split()[0]), 45)
        sampling = SamplingParams(max_tokens=60, temperature=0.0)
        if kind == "embedded":
            engine.embed(name, prompt)
        elif kind == "scored":
            engine.add(name, prompt, max_tokens=20, prompt_logprobs=2, logprobs=1)
        else:
            grammar = grammars[kind].grammar if kind in grammars else None
            request = EngineRequest(name, "acme", tuple(prompt), sampling, grammar=grammar)
            aside = {"background": kind in ("shadow", "line"), "batch": kind == "line"}
            engine.core.add_request(replace(request, **aside))

    kinds = ("answer", "scored", "embedded", "shadow", "line", *grammars)
    for kind in kinds:
        ask(f"{kind} alone")
        engine.run()
    for kind in kinds:
        ask(f"{kind} beside")
    engine.run()
    for kind in kinds:
        alone, beside = (took(engine, f"{kind} {when}") for when in ("alone", "beside"))
        assert alone == beside, kind
    assert grammars["dictated"].matches(text_of(engine.tokens("dictated beside")))
