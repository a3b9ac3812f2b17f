"""Requests with grammars through a real engine with a tiny random model, in mixed batches."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from llguidance import LLMatcher, LLParserLimits

from loraplex.adapters.ref import AdapterRef
from loraplex.engine.grammar import matchers, tokenizer
from loraplex.engine.grammar.masks import MAX_FORCED
from loraplex.engine.grammar.tokenizer import load_grammar_tokenizer, new_matcher
from loraplex.engine.grammar.vocabulary import GrammarVocabulary
from loraplex.engine.kv.cache import block_bytes
from loraplex.engine.kv.layers import CacheKind
from loraplex.engine.logprobs import Logprobs
from loraplex.engine.types import EngineRequest, SamplingParams, TokenEvent
from support.adapters.tiny_adapters import ADAPTERS, save_adapters
from support.engine.grammars import CASES, Case, regex_case, save_byte_model, text_of
from support.engine.local_engine import LocalEngine
from support.models.byte_tokenizer import EOS_ID, PAD_ID, START_ID, THINK_ID
from support.simulator.core_integrity import check_core

pytestmark = pytest.mark.usefixtures("one_torch_thread")

SPELLED = regex_case("[a-z]{2,6}")
LETTERS = regex_case("[a-z]{30}")
ENDLESS = regex_case("x+y?")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_byte_model(tmp_path_factory.mktemp("bytes") / "model", eos_token_id=[EOS_ID, PAD_ID])


@pytest.fixture(scope="module")
def adapters(model_dir: Path) -> dict[str, Path]:
    return save_adapters(model_dir, model_dir.parent, {name: ADAPTERS[name] for name in ("all", "some")})


def make_engine(model_dir: Path, work: Path, *, num_blocks: int = 64, **settings: Any) -> LocalEngine:
    caches = (CacheKind(2, 8),) * 3
    options = {"kernels": "torch", "max_num_seqs": 8, "max_model_len": 160, **settings}
    return LocalEngine(
        model_dir,
        work,
        dtype="float32",
        kv_cache_memory=num_blocks * block_bytes(caches, torch.float32),
        adapter_memory=4 << 20,
        adapter_cpu_memory=4 << 20,
        num_threads=1,
        **options,
    )


@pytest.fixture(scope="module", params=[0, 1], ids=["lookahead 0", "lookahead 1"])
def engine(
    request: pytest.FixtureRequest, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalEngine]:
    engine = make_engine(model_dir, tmp_path_factory.mktemp("work"), lookahead=request.param)
    yield engine
    engine.close()


_numbers = iter(range(10**9))


def ask(
    engine: LocalEngine,
    grammar: Case | str | None,
    *,
    adapter: AdapterRef | None = None,
    prompt: tuple[int, ...] = (65, 66, 67),
    tenant: str = "acme",
    **sampling: Any,
) -> str:
    """Returns the request's name."""
    name = f"r{next(_numbers)}"
    text = grammar.grammar if isinstance(grammar, Case) else grammar
    params = SamplingParams(**{"max_tokens": 40, "temperature": 1.0, "seed": 7, **sampling})
    engine.core.add_request(EngineRequest(name, tenant, prompt, params, adapter, grammar=text))
    return name


def end_of(engine: LocalEngine, name: str) -> TokenEvent:
    engine.run()
    return engine.events[name][-1]


def answer(engine: LocalEngine, name: str) -> str:
    """The text of a request that has not failed."""
    engine.run()
    return text_of(engine.tokens(name))


def check(engine: LocalEngine, model_dir: Path, name: str, case: Case) -> Literal["stop", "length"]:
    """A finished answer matches, one that was cut begins one. Returns why it ended."""
    end, tokens = engine.events[name][-1], engine.tokens(name)
    if end.finish_reason == "stop":
        assert case.matches(text_of(tokens)), (case.name, text_of(tokens))
        return "stop"
    assert end.finish_reason == "length"
    matcher = new_matcher(load_grammar_tokenizer(model_dir, [EOS_ID, PAD_ID]), case.grammar)
    assert matcher.validate_tokens(tokens) == len(tokens) or "<|" in case.name
    return "length"


def play(model_dir: Path, adapters: dict[str, Path], work: Path, count: int, **settings: Any) -> None:
    """`count` random requests with grammars and half as many without, in a pool so small that sequences start over."""
    engine = make_engine(model_dir, work, num_blocks=10, max_num_batched_tokens=40, **settings)
    try:
        refs = [None, *(engine.publish(folder, name=name) for name, folder in adapters.items())]
        rng = random.Random(str(settings))
        asked: dict[str, Case] = {}
        free = []
        for number in range(count + count // 2):
            prompt = tuple(rng.randrange(256) for _ in range(rng.choice((2, 9, 40))))
            options = {
                "adapter": rng.choice(refs),
                "tenant": rng.choice(("acme", "globex")),
                "prompt": prompt,
                "seed": number,
                "temperature": rng.choice((0.0, 0.7, 1.0, 3.0)),
                "top_p": rng.choice((1.0, 0.9)),
                "repetition_penalty": rng.choice((1.0, 1.3)),
                "min_tokens": rng.choice((0, 0, 12)),
                "logprobs": rng.choice((None, 2)),
                "max_tokens": rng.choice((5, 60, 90)),
            }
            if number % 3:
                case = rng.choice(CASES)
                asked[ask(engine, case, **options)] = case
            else:
                free.append(ask(engine, None, **options))
            if number % 20 == 7:
                engine.step()
        engine.run()
        reasons = [check(engine, model_dir, name, case) for name, case in asked.items()]
        assert len(reasons) == count
        assert reasons.count("stop") > count // 2
        assert all(engine.events[name][-1].error is None for name in free)
        assert engine.core.stats().num_preemptions > 0
        check_core(engine.core)
    finally:
        engine.close()


def test_random_answers_match_their_grammars(model_dir, adapters, tmp_path):
    play(model_dir, adapters, tmp_path, 40, lookahead=1)


@pytest.mark.parametrize(
    "count", [pytest.param(60, marks=pytest.mark.slow), pytest.param(240, marks=pytest.mark.soak)]
)
@pytest.mark.parametrize(("kernels", "lookahead"), [("numba", 0), ("numba", 1), ("torch", 0)])
def test_many_random_answers_match_their_grammars(model_dir, adapters, tmp_path, kernels, lookahead, count):
    play(model_dir, adapters, tmp_path, count, kernels=kernels, lookahead=lookahead)


@pytest.mark.slow
def test_the_path_of_gpus_interpreted(tmp_path):
    """Lists of work, one copy a step and Triton's sampling, with the steps planned ahead."""
    model_dir = save_byte_model(tmp_path / "model", num_hidden_layers=1)
    engine = make_engine(model_dir, tmp_path / "work", kernels="triton", lookahead=1, max_num_seqs=4)
    try:
        cases = {ask(engine, case, seed=n, max_tokens=12): case for n, case in enumerate(CASES[:6])}
        free = ask(engine, None, max_tokens=6, temperature=0.0)
        engine.run()
        for name, case in cases.items():
            check(engine, model_dir, name, case)
        assert len(engine.tokens(free)) == 6
    finally:
        engine.close()


def test_answers_do_not_depend_on_neighbours(model_dir, tmp_path):
    """Nor do those without a grammar."""
    engine = make_engine(model_dir, tmp_path, kernels="numba")
    try:
        cases = [*CASES[:5], None, None, SPELLED]
        options = [{"seed": n, "max_tokens": 12} for n in range(len(cases))]
        alone = []
        for case, option in zip(cases, options, strict=True):
            name = ask(engine, case, **option)
            engine.run()
            alone.append(engine.tokens(name))
        names = [ask(engine, case, **option) for case, option in zip(cases, options, strict=True)]
        engine.run()
        assert [engine.tokens(name) for name in names] == alone
    finally:
        engine.close()


def test_forced_tokens_take_one_step_and_change_no_answer(model_dir, tmp_path):
    cases = [
        regex_case("[ab]hello world[cd]{2}forty-two letters and not one more of them![ef]"),
        *CASES,
        None,
    ]
    answers, largest = [], []
    for lookahead in (0, 1):
        engine = make_engine(model_dir, tmp_path / str(lookahead), lookahead=lookahead, max_num_seqs=16)
        try:
            names = [ask(engine, case, seed=n, max_tokens=70) for n, case in enumerate(cases)]
            scored = ask(engine, cases[0], logprobs=1)
            engine.run()
            answers.append([engine.tokens(name) for name in names])
            largest.append([max(len(event.token_ids) for event in engine.events[name]) for name in names])
            assert all(len(event.token_ids) <= 1 for event in engine.events[scored])
        finally:
            engine.close()
    assert answers[0] == answers[1]
    assert largest[0][0] == 1 + MAX_FORCED
    assert largest[0][-1] == 1
    assert set(largest[1]) == {1}


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 12, 13])
def test_forced_tokens_are_not_more_than_asked_for(engine, max_tokens):
    name = ask(engine, regex_case("[ab]hello world[cd]?"), max_tokens=max_tokens)
    assert end_of(engine, name).finish_reason == ("stop" if max_tokens == 13 else "length")
    assert len(engine.tokens(name)) <= max_tokens


# Options, one at a time.


def test_choices_are_different_answers_to_one_grammar(engine):
    names = [ask(engine, SPELLED, choice=choice) for choice in range(8)]
    answers = [answer(engine, name) for name in names]
    assert all(map(SPELLED.matches, answers))
    assert len(set(answers)) > 4


def test_the_grammars_end_ends_the_answer(engine):
    """At its last token, with no end token behind it, that the text would have to be freed of."""
    name = ask(engine, regex_case("ab"))
    end = end_of(engine, name)
    assert engine.tokens(name) == [97, 98]
    assert (end.finish_reason, end.stop_token_id) == ("stop", None)


@pytest.mark.parametrize("end_id", [EOS_ID, PAD_ID])
def test_each_eos_may_end_it(engine, end_id):
    name = ask(engine, ENDLESS, logit_bias=((end_id, 100.0),), temperature=0.0)
    end = end_of(engine, name)
    assert engine.tokens(name) == [ord("x"), end_id]
    assert (end.finish_reason, end.stop_token_id) == ("stop", end_id)


def test_max_tokens_cuts_it(engine):
    name = ask(engine, LETTERS, max_tokens=9)
    assert end_of(engine, name).finish_reason == "length"
    assert len(engine.tokens(name)) == 9
    # Complete with the last token that it may have.
    name = ask(engine, regex_case("ab"), max_tokens=2)
    assert end_of(engine, name).finish_reason == "stop"


def test_min_tokens_bars_the_end_while_the_grammar_goes_on(engine):
    bias = ((EOS_ID, 100.0), (PAD_ID, 90.0), (ord("x"), 80.0))
    name = ask(engine, ENDLESS, min_tokens=6, logit_bias=bias, temperature=0.0)
    assert answer(engine, name) == "x" * 6
    name = ask(engine, regex_case("ab?"), min_tokens=30, logit_bias=bias, temperature=0.0)
    assert answer(engine, name) == "ab"
    assert end_of(engine, name).finish_reason == "stop"


def test_ignore_eos_goes_on_as_long_as_the_grammar_does(engine):
    bias = ((EOS_ID, 100.0),)
    name = ask(engine, regex_case("x+"), ignore_eos=True, logit_bias=bias, max_tokens=12)
    assert (answer(engine, name), end_of(engine, name).finish_reason) == ("x" * 12, "length")
    name = ask(engine, regex_case("ab"), ignore_eos=True, logit_bias=bias)
    assert (answer(engine, name), end_of(engine, name).finish_reason) == ("ab", "stop")


def test_stop_token_ids_end_it_after_min_tokens(engine):
    bias = ((ord("e"), 100.0), (ord("f"), 90.0))
    options = {"stop_token_ids": (ord("e"),), "logit_bias": bias, "temperature": 0.0}
    name = ask(engine, LETTERS, **options)
    end = end_of(engine, name)
    assert (engine.tokens(name), end.finish_reason, end.stop_token_id) == ([ord("e")], "stop", ord("e"))
    name = ask(engine, LETTERS, min_tokens=4, **options)
    assert answer(engine, name) == "ffffe"
    # One that the grammar forces ends it too.
    name = ask(engine, regex_case("[ab]hell[cd]"), stop_token_ids=(ord("e"),))
    assert answer(engine, name)[1:] == "he"
    # One that the grammar demands before then is drawn, and ends nothing.
    name = ask(engine, regex_case("[a-d]eee[a-d]"), min_tokens=5, **options)
    assert end_of(engine, name).finish_reason == "stop"
    assert len(engine.tokens(name)) == 5


def test_log_probabilities_are_of_the_models_own_logits(engine):
    """Those of the answer, and of tokens that the grammar bars; as they would be for a prompt."""
    name = ask(engine, SPELLED, logprobs=4)
    engine.run()
    tokens = engine.tokens(name)
    own = [value for event in engine.events[name] for value in scores_of(event, "output")]
    again = ask(engine, None, prompt=(65, 66, 67, *tokens), prompt_logprobs=4, max_tokens=0)
    engine.run()
    whole = [value for event in engine.events[again] for value in scores_of(event, "prompt")]
    assert own == pytest.approx(whole[-len(own) :], abs=1e-4)


def scores_of(event: TokenEvent, part: Literal["output", "prompt"]) -> list[float]:
    found: Logprobs | None = None if event.scores is None else getattr(event.scores, part)
    if found is None:
        return []
    return memoryview(found.values).cast("f").tolist()


def test_special_tokens_come_where_they_are_named_and_nowhere_else(engine):
    name = ask(engine, f'start: <|start|> "x" <[{THINK_ID}]> "<think>"', ignore_eos=True)
    engine.run()
    assert engine.tokens(name) == [START_ID, ord("x"), THINK_ID, *b"<think>"]
    # Neither these nor what pads the vocabulary, however hot.
    names = [ask(engine, regex_case(r"(.|\n){30}"), temperature=50.0, seed=seed) for seed in range(4)]
    engine.run()
    assert all(max(engine.tokens(name)) < 256 for name in names)


def test_tokens_that_the_model_has_not_got_are_never_drawn(tmp_path):
    model_dir = save_byte_model(tmp_path / "model", vocab_size=258, eos_token_id=EOS_ID)
    engine = make_engine(model_dir, tmp_path / "work")
    try:
        name = ask(engine, f'start: <[{PAD_ID}]> | "a"')
        assert answer(engine, name) == "a"
        error = end_of(engine, ask(engine, f"start: <[{PAD_ID}]>")).error
        assert error is not None
        assert (error.code, error.message.split(": ")[1]) == (
            "grammar_failed",
            "no token of the model can go on with it",
        )
    finally:
        engine.close()


# What fails, and what waits.


def test_a_grammar_that_cannot_be_built_ends_its_request_alone(engine):
    others = [ask(engine, SPELLED), ask(engine, None, max_tokens=5)]
    error = end_of(engine, ask(engine, "start: nosuch")).error
    assert error is not None
    assert error.code == "grammar_failed"
    assert 'unknown name: "nosuch"' in error.message
    assert SPELLED.matches(answer(engine, others[0]))
    assert len(engine.tokens(others[1])) == 5
    long = ask(engine, "start: " + "x" * (1 << 20))
    assert "at most 1048576 are taken" in getattr(end_of(engine, long).error, "message", "")


def test_a_mask_beyond_its_limits_ends_its_request_alone(engine, monkeypatch):
    few = LLParserLimits(max_lexer_states=40, verbose_errors=False)
    monkeypatch.setattr(tokenizer, "parser_limits", lambda: few)
    failing = regex_case("[a-z]{1,200}q")
    others = [ask(engine, ENDLESS, max_tokens=30), ask(engine, None, max_tokens=30)]
    name = ask(engine, failing, max_tokens=100)
    error = end_of(engine, name).error
    assert error is not None
    assert error.code == "grammar_failed"
    assert "too many states" in error.message
    assert "\n" not in error.message
    assert sum(len(event.token_ids) for event in engine.events[name]) > 3
    assert all(engine.events[other][-1].error is None for other in others)
    check_core(engine.core)


class Cramped:
    """A model that finds no memory for each fifth pass."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._passes = itertools.count(1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, batch: Any) -> torch.Tensor:
        if next(self._passes) % 5 == 0:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return self._model.forward(batch)


@pytest.mark.parametrize("lookahead", [0, 1])
def test_steps_that_are_computed_again_change_no_answer(model_dir, tmp_path, lookahead):
    """With lookahead, a step that is void has moved its matchers already."""
    found = []
    for number, wrap in enumerate((lambda model: model, Cramped)):
        engine = make_engine(model_dir, tmp_path / str(number), wrap_model=wrap, lookahead=lookahead)
        try:
            cases = [SPELLED, LETTERS, None, *CASES[:4]]
            names = [ask(engine, case, seed=n, max_tokens=25) for n, case in enumerate(cases)]
            engine.run()
            for name, case in zip(names, cases, strict=True):
                if case is not None:
                    check(engine, model_dir, name, case)
            found.append([engine.tokens(name) for name in names])
            assert (engine.core.stats().num_out_of_memory > 3) == (wrap is Cramped)
        finally:
            engine.close()
    assert found[0] == found[1]


def test_who_waits_for_a_matcher_holds_nobody_back(model_dir, tmp_path, monkeypatch):
    go = threading.Event()
    build = matchers.build_matcher

    def slow(vocabulary: GrammarVocabulary, text: str) -> LLMatcher:
        if text == LETTERS.grammar:
            assert go.wait(60)
        return build(vocabulary, text)

    monkeypatch.setattr(matchers, "build_matcher", slow)
    engine = make_engine(model_dir, tmp_path, max_num_seqs=2)
    try:
        held = [ask(engine, LETTERS) for _ in range(4)]
        aborted = held.pop()
        others = [ask(engine, case) for case in (SPELLED, None, ENDLESS)]
        while not all(engine.events.get(name, [None])[-1] for name in others):
            engine.step()
        while any(engine.events[name][-1].finish_reason is None for name in others):
            engine.step()
        assert not engine.events.keys() & set(held)
        stats = engine.core.stats()
        assert (stats.num_waiting, stats.num_waiting_for_grammar) == (4, 4)
        engine.core.abort(aborted)
        check_core(engine.core)
        stats = engine.core.stats()
        assert (stats.num_waiting, stats.num_waiting_for_grammar) == (3, 3)
        go.set()
        assert all(LETTERS.matches(answer(engine, name)) for name in held)
    finally:
        go.set()
        engine.close()
