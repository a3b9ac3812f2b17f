"""States of delta nets in an engine with its real kernels: what is found again, shared, and spoilt."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from loraplex.engine.kv.cache import KVCache
from loraplex.engine.types import EngineRequest, SamplingParams
from support.adapters.tiny_adapters import ADAPTERS, save_adapters
from support.engine.local_engine import LocalEngine
from support.models.checkpoints import FAMILIES, VOCAB, save_tiny
from support.simulator.core_integrity import check_core

pytestmark = pytest.mark.usefixtures("one_torch_thread")

INVOCATION = (1, 2)
JUDGES = tuple(f"judge{number}" for number in range(8))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path]]:
    root = tmp_path_factory.mktemp("delta")
    base = save_tiny(root / "base", FAMILIES["qwen3_5-2"])
    judge = {**ADAPTERS["all"], "alora_invocation_tokens": list(INVOCATION)}
    return base, save_adapters(base, root, {name: {**judge, "r": 1 + n} for n, name in enumerate(JUDGES)})


@pytest.fixture(scope="module")
def engine(
    folders: tuple[Path, dict[str, Path]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalEngine]:
    made = LocalEngine(
        folders[0], tmp_path_factory.mktemp("engine"), dtype="float32", kernels="numba", max_model_len=256,
        max_num_seqs=12, num_threads=1, kv_cache_memory=8 << 20, adapter_memory=4 << 20,
        adapter_cpu_memory=4 << 20,
    )  # fmt: skip
    yield made
    check_core(made.core)
    made.close()


def words(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(count)]


def cached(engine: LocalEngine, name: str) -> int:
    usage = engine.events[name][-1].usage
    assert usage is not None
    return usage.cached_tokens


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
