"""An answer that another engine has begun goes on as if nothing had happened, to the bit.

Every request is answered by one engine alone first. Then its answer is cut, and engines get it with what came before
the cut as `generated`: the same engine, whose prefix cache has all of it, and new ones with few blocks, in company.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.adapters.ref import AdapterRef
from loraplex.engine.kv.cache import block_bytes
from loraplex.engine.kv.layers import CacheKind
from loraplex.engine.logprobs import Scores, cut_scores, join_scores
from loraplex.engine.types import EngineRequest, SamplingParams, TokenEvent
from loraplex.kernels.linear import numba_dense
from support.adapters.tiny_adapters import ADAPTERS, KINDS, save_adapters
from support.engine.grammars import CASES, VOCAB_SIZE, choice_case, regex_case, save_byte_model
from support.engine.local_engine import LocalEngine
from support.engine.same_bits import Recorder
from support.models.byte_tokenizer import EOS_ID
from support.simulator.core_integrity import check_core

pytestmark = pytest.mark.usefixtures("one_torch_thread")

CHOSEN = {name: (ADAPTERS | KINDS)[name] for name in ("all", "many-ranks", "dora", "head")}
FORCED = regex_case("call=[a-z]{3}, then stop here[.!]")
OPEN = regex_case("[a-z]{1,90}")
"""An answer that may end anywhere."""
LETTERS = 97
"""The first of 26 tokens that are letters."""


class Engine:
    """A real engine that records its logits."""

    def __init__(
        self, model_dir: Path, work: Path, adapters: dict[str, Path], *, num_blocks: int, **settings: Any
    ) -> None:
        work.mkdir()
        self.recorder = Recorder(convolving=())
        caches = (CacheKind(2, 8),) * 3
        with self.recorder.patched():
            self.engine = LocalEngine(
                model_dir,
                work,
                dtype="float32",
                kernels="numba",
                kv_cache_memory=num_blocks * block_bytes(caches, torch.float32),
                adapter_memory=4 << 20,
                adapter_cpu_memory=4 << 20,
                num_threads=1,
                max_model_len=160,
                **{"max_num_seqs": 8, "max_num_batched_tokens": 40, **settings},
            )
        self.refs = [
            self.engine.publish(folder, name=name, tenant="brook" if number % 2 else "acme")
            for number, (name, folder) in enumerate(adapters.items())
        ]

    def answer(self, name: str) -> Answer:
        """The answer of a request that has ended well."""
        events = self.engine.events[name]
        assert events[-1].error is None, events[-1].error
        scores = join_scores([event.scores for event in events if event.scores is not None])
        tokens = tuple(token for event in events for token in event.token_ids)
        return Answer(tokens, scores, self.recorder.logits.get(name, {}), tuple(events))


@dataclass(frozen=True)
class Answer:
    """`logits` by output index: the bytes of what the token was sampled from; none of a forced token."""

    tokens: tuple[int, ...]
    scores: Scores | None
    logits: dict[int, bytes]
    events: tuple[TokenEvent, ...]

    @property
    def end(self) -> TokenEvent:
        return self.events[-1]

    def check_tail(self, tail: Answer, cut: int) -> None:
        """`tail` is what goes on behind the first `cut` tokens."""
        assert tail.tokens == self.tokens[cut:]
        shared = tail.logits.keys() & self.logits.keys()
        assert {index: tail.logits[index] for index in shared} == {
            index: self.logits[index] for index in shared
        }
        assert all(index >= cut for index in tail.logits)
        scores = cut_scores(self.scores, cut, len(self.tokens))
        output = scores.output if scores is not None and cut < len(self.tokens) else None
        assert (tail.scores or Scores()) == Scores(output)
        ends = [(a.finish_reason, a.stop_token_id) for a in (tail.end, self.end)]
        assert ends[0] == ends[1]
        assert tail.end.usage is not None
        assert self.end.usage is not None
        assert replace(tail.end.usage, cached_tokens=0) == replace(self.end.usage, cached_tokens=0)
        assert tail.end.usage.cached_tokens <= tail.end.usage.prompt_tokens
        states = [event.adapter_state is not None for event in tail.events]
        assert states[0] == (self.events[0].adapter_state is not None)
        assert not any(states[1:])


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not numba_dense.is_for(torch.float32):
        pytest.skip("on this processor a library multiplies in float32")
    return save_byte_model(tmp_path_factory.mktemp("bytes") / "model")


@pytest.fixture(scope="module")
def adapters(model_dir: Path) -> dict[str, Path]:
    return save_adapters(model_dir, model_dir.parent, CHOSEN)


@pytest.fixture(scope="module")
def engines(
    model_dir: Path, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Engine]]:
    """The one that is asked first, and those in which answers go on in company."""
    root = tmp_path_factory.mktemp("engines")
    made = [
        Engine(model_dir, root / "alone", adapters, num_blocks=400, max_num_batched_tokens=160),
        Engine(model_dir, root / "0", adapters, num_blocks=14, lookahead=0),
        Engine(model_dir, root / "1", adapters, num_blocks=14, lookahead=1),
    ]
    yield made
    for engine in made:
        engine.engine.close()


def requests(rng: random.Random, count: int, refs: Sequence[AdapterRef | None]) -> list[EngineRequest]:
    """With all options in turns; some are other choices of one prompt. Some adapters are activated: they act from a
    place in the prompt on."""
    made: list[EngineRequest] = []
    activating = random.Random(count)
    for number in range(count):
        prompt = tuple(rng.randrange(256) for _ in range(rng.choice((2, 15, 16, 17, 40))))
        ref = rng.choice(refs)
        if number % 4 == 3:
            prompt, ref = made[-1].prompt_ids, made[-1].adapter
        grammar = rng.choice((FORCED, OPEN, OPEN, OPEN, *CASES)) if rng.random() < 0.4 else None
        logprobs = rng.choice((None, None, 0, 3))
        sampling = SamplingParams(
            max_tokens=rng.choice((4, 40, 70, 90)),
            temperature=rng.choice((0.0, 0.7, 1.0, 1.5)),
            top_p=rng.choice((1.0, 0.9)),
            top_k=rng.choice((0, 20)),
            min_p=rng.choice((0.0, 0.02)),
            repetition_penalty=rng.choice((1.0, 1.3)),
            presence_penalty=rng.choice((0.0, 0.6)),
            frequency_penalty=rng.choice((0.0, 0.4)),
            seed=number // 4,
            choice=number % 4,
            logit_bias=rng.choice(((), ((EOS_ID, 3.0),), ((LETTERS, 2.0), (7, -100.0)))),
            stop_token_ids=rng.choice(((), (), tuple(range(LETTERS, LETTERS + 12)))),
            min_tokens=rng.choice((0, 0, 12)),
            ignore_eos=rng.random() < 0.3,
            logprobs=logprobs,
            prompt_logprobs=rng.choice((None, None, 2)),
            logprob_token_ids=rng.choice(((), (5, 9))) if logprobs is not None else (),
        )
        tenant = "acme" if ref is None else ref.tenant_id
        text = None if grammar is None else grammar.grammar
        is_activated = ref is not None and activating.random() < 0.4
        place = activating.randrange(len(prompt)) if is_activated else 0
        made.append(
            EngineRequest(f"r{number}", tenant, prompt, sampling, ref, grammar=text, adapter_from=place)
        )
    return made


def cuts(rng: random.Random, num_prompt: int, count: int) -> set[int]:
    """Where to cut an answer of this many tokens: behind the first, at the last, at the end, within, and where a KV
    block is about to be full, is full, or has one more."""
    edges = [cut for cut in range(1, count) if (num_prompt + cut) % 16 in (0, 1, 15)]
    within = [rng.randint(1, count), *rng.sample(edges, min(1, len(edges)))]
    return {cut for cut in (rng.choice((1, count - 1, count)), *within) if cut}


def in_company(
    engine: Engine, waiting: Sequence[EngineRequest], rng: random.Random, *, most: int = 8
) -> None:
    """Answer all of them, up to `most` at a time."""
    todo, ended = list(waiting), 0
    while ended < len(waiting):
        while todo and len(waiting) - len(todo) - ended < most and rng.random() < 0.7:
            engine.engine.core.add_request(todo.pop())
        ended += sum(event.finish_reason is not None for event in engine.engine.step())


@pytest.mark.parametrize("count", [16, pytest.param(300, marks=pytest.mark.soak)])
def test_a_continued_answer_is_the_undisturbed_ones_tail(engines: list[Engine], count: int) -> None:
    rng = random.Random(count)
    lone, *crowds = engines
    asked = requests(rng, count, [None, *lone.refs])
    asked = [replace(request, request_id=f"{count}-{request.request_id}") for request in asked]
    answers: dict[str, Answer] = {}
    begun: dict[str, tuple[EngineRequest, Answer, int]] = {}
    seen: Counter[str] = Counter()
    for request in asked:
        lone.engine.core.add_request(request)
        lone.engine.run()
        answers[request.request_id] = whole = lone.answer(request.request_id)
        seen[f"ended by {whole.end.finish_reason}"] += 1
        for cut in cuts(rng, len(request.prompt_ids), len(whole.tokens)):
            name = f"{request.request_id}-{cut}"
            resumed = replace(request, request_id=name, generated=whole.tokens[:cut])
            begun[name] = resumed, whole, cut
            lone.engine.core.add_request(resumed)
            lone.engine.run()
            whole.check_tail(lone.answer(name), cut)
            seen["complete"] += cut == len(whole.tokens)
            seen["forced at the cut"] += request.grammar is not None and cut not in whole.logits
    for crowd in crowds:
        resumed_ones = [request for request, _, _ in begun.values()]
        in_company(crowd, rng.sample([*resumed_ones, *asked], len(begun) + count), rng)
        assert all(crowd.answer(name).tokens == whole.tokens for name, whole in answers.items())
        for name, (_, whole, cut) in begun.items():
            tail = crowd.answer(name)
            whole.check_tail(tail, cut)
            assert tail.end.timing is not None
            seen["preempted again"] += tail.end.timing.num_preemptions > 0
            seen["found in the prefix cache"] += (
                tail.end.usage is not None and tail.end.usage.cached_tokens > 0
            )
        check_core(crowd.engine.core)
    print(dict(seen))
    wanted = {"ended by stop", "ended by length", "complete", "forced at the cut", "preempted again"}
    assert {*wanted, "found in the prefix cache"} <= {*+seen}


YES_NO = choice_case("yes", "no")
NOT_TOKENS = (VOCAB_SIZE, 2**31 - 1)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_grammar_that_has_ended_or_refuses_ends_the_request(engines: list[Engine], number: int) -> None:
    core = engines[number].engine.core
    sampling = SamplingParams(max_tokens=9, temperature=0.0)
    begun = {
        "ended": b"yes",
        "refused": b"yo",
        "behind its end": b"yesy",
        "goes on": b"ye",
        "at its limit": b"ye",
    }
    for name, text in begun.items():
        params = replace(sampling, max_tokens=2) if name == "at its limit" else sampling
        core.add_request(
            EngineRequest(name, "acme", (65, 66), params, grammar=YES_NO.grammar, generated=tuple(text))
        )
    num_steps = core.stats().num_steps
    engines[number].engine.run()
    ends = {name: engines[number].engine.events.pop(name)[-1] for name in begun}
    assert {name: end.error.code for name, end in ends.items() if end.error is not None} == {
        "refused": "grammar_failed",
        "behind its end": "grammar_failed",
    }
    assert [(ends[name].finish_reason, ends[name].token_ids) for name in ("ended", "at its limit")] == [
        ("stop", ()),
        ("length", ()),
    ]
    assert (ends["goes on"].finish_reason, ends["goes on"].token_ids) == ("stop", (ord("s"),))
    assert core.stats().num_steps <= num_steps + 2
    check_core(core)


@pytest.mark.parametrize("grammar", [None, YES_NO.grammar])
@pytest.mark.parametrize("token", NOT_TOKENS)
def test_a_generated_id_that_is_no_token_fails_its_own_request(
    engines: list[Engine], token: int, grammar: str | None
) -> None:
    engine = engines[0].engine
    penalised = SamplingParams(max_tokens=9, repetition_penalty=1.5)
    for name, generated in (("last", (121, token)), ("within", (token, 121))):
        request = EngineRequest(name, "acme", (65, 66), penalised, grammar=grammar, generated=generated)
        engine.core.add_request(request)
    engine.add("neighbour", (65, 66), max_tokens=5)
    engine.run()
    code = "internal_error" if grammar is None else "grammar_failed"
    for name in ("last", "within"):
        error = engine.events.pop(name)[-1].error
        assert error is not None
        assert error.code == code
    assert len(engine.tokens("neighbour")) == 5
    del engine.events["neighbour"]
