"""Log probabilities: the formula, and the whole engine against transformers on a tiny model."""

from __future__ import annotations

import random
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from loraplex.engine.config import SchedulerConfig
from loraplex.engine.core.engine_core import EngineCore
from loraplex.engine.execution.executor import Executor
from loraplex.engine.execution.runner import ModelRunner
from loraplex.engine.kv.cache import KVCache
from loraplex.engine.logprobs import Logprobs, Scores, cut_scores, join_scores, wrong_scores
from loraplex.engine.sampling import sampler, scoring
from loraplex.engine.sampling.scoring import score_tokens
from loraplex.engine.types import EngineRequest, SamplingParams, TokenEvent
from support.engine.fake_transport import FakeTransport, make_cache
from support.engine.logprobs import pack_logprobs
from support.models.checkpoints import FAMILIES, VOCAB, reference_logits, save_tiny
from support.models.loading import load_model

MAX_SCORED = 12


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("llama"), FAMILIES["llama"])


@pytest.fixture(scope="module")
def model(model_dir: Path) -> Any:
    return load_model(model_dir, "cpu", "float32")


class InThisThread(Executor):
    """So that what torch does can be counted."""

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(work())
        return future


class CountedModel:
    """Counts the rows whose logits are wanted."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.num_rows: list[int] = []
        self.spoil: Callable[[torch.Tensor], None] = lambda logits: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, batch: Any) -> torch.Tensor:
        logits = self._model.forward(batch)
        self.num_rows.append(logits.shape[0])
        self.spoil(logits)
        return logits


class Engine:
    """A core with a small model and a small pool."""

    def __init__(
        self, model: Any, *, lookahead: int = 0, num_blocks: int = 64, executor: Executor | None = None
    ) -> None:
        kv = KVCache(model.shape.caches, num_blocks, model.dtype, model.device)
        kv.tensor.fill_(float("nan"))
        self.model = CountedModel(model)
        self.runner = ModelRunner(self.model, kv, executor or Executor(), eos_ids=frozenset(), lora=None)
        transport = FakeTransport(time.monotonic, 1)
        self.core = EngineCore(
            SchedulerConfig(num_blocks, 400, 8, 40, 100, 1 if lookahead else 0, MAX_SCORED),
            self.runner,
            make_cache(transport),
            eos_ids=frozenset(),
            clock=transport.clock,
        )
        self.events: dict[str, list[TokenEvent]] = {}

    def add(self, name: str, prompt: list[int], **sampling: Any) -> None:
        given = {"max_tokens": 8, "temperature": 0.0, **sampling}
        self.core.add_request(EngineRequest(name, "t", tuple(prompt), SamplingParams(**given)))

    def run(self) -> None:
        for _ in range(3000):
            if not self.core.has_work:
                return
            for event in self.core.step():
                self.events.setdefault(event.request_id, []).append(event)
        raise AssertionError("it does not end")

    def tokens(self, name: str) -> list[int]:
        assert self.events[name][-1].error is None, self.events[name][-1].error
        return [token for event in self.events[name] for token in event.token_ids]

    def scores(self, name: str) -> Scores:
        return join_scores([e.scores for e in self.events[name] if e.scores is not None]) or Scores()


@pytest.fixture
def make_engine(model: Any) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(**options: Any) -> Engine:
        made.append(Engine(model, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.runner.close()


def check_equal(
    found: Logprobs | None,
    expected: torch.Tensor,
    tokens: list[int],
    num_top: int,
    named: tuple[int, ...] = (),
) -> None:
    """expected: [n, V] log_softmax at the places of `tokens`; `named` tokens come behind the likeliest."""
    assert found is not None
    assert (len(found), found.num_top) == (len(tokens), num_top + len(named))
    for row, token, (own, told) in zip(expected, tokens, found.rows(), strict=True):
        assert abs(own - float(row[token])) < 1e-4
        values = [value for _, value in told]
        assert values[:num_top] == pytest.approx(row.topk(num_top).values.tolist(), abs=1e-4)
        assert values == pytest.approx([float(row[token_id]) for token_id, _ in told], abs=1e-4)
        assert tuple(token_id for token_id, _ in told[num_top:]) == named


def check_ranks(found: Logprobs | None, expected: torch.Tensor, tokens: list[int]) -> None:
    """Except tokens that are as likely as another one to float32's precision."""
    assert found is not None
    for row, token, rank in zip(expected, tokens, found.token_ranks(), strict=True):
        least, most = (int((row >= row[token] + shift).sum()) for shift in (1e-5, -1e-5))
        assert least <= rank <= most
        assert rank >= 1


@pytest.mark.parametrize("lookahead", [0, 1])
def test_equal_to_transformers_through_chunks_preemption_and_prefixes(
    model_dir: Path, make_engine: Callable[..., Engine], lookahead: int
) -> None:
    """A pool that is far too small, prompts that begin alike, and rows that ask beside rows that don't."""
    engine = make_engine(lookahead=lookahead, num_blocks=14)
    rng = random.Random(lookahead)
    shared = [rng.randrange(3, VOCAB) for _ in range(35)]
    asked = {
        f"r{i}": (
            shared[: rng.choice([0, 16, 35])] + [rng.randrange(3, VOCAB) for _ in range(9)],
            {
                "logprobs": (None, 0, 20)[i % 3],
                "prompt_logprobs": (None, None, 0, 5)[i % 4],
                "prompt_ranks": i % 8 > 2,
                "logprob_token_ids": ((), (), (4,), (), (90, VOCAB - 1, 0, 7))[i % 5] if i % 3 else (),
            },
        )
        for i in range(12)
    }
    asked["alone"] = ([7], {"prompt_logprobs": 2, "logprobs": 1})
    asked["scored only"] = (shared + [9] * 40, {"prompt_logprobs": 1, "max_tokens": 0})
    asked["computed only"] = (shared, {"max_tokens": 0})
    for start in (0, 20, 34, 73):
        asked[f"scored from {start}"] = (
            shared + [8] * 40,
            {"prompt_logprobs": 1, "max_tokens": 0, "scored_from": start},
        )
    for name, (prompt, options) in asked.items():
        engine.add(name, prompt, **{"max_tokens": 40, **options})
    engine.run()
    assert engine.core.stats().num_preemptions > 0
    assert engine.core.stats().prefix_cache_hits > 0
    assert max(engine.model.num_rows) <= MAX_SCORED + 8
    for name, (prompt, options) in asked.items():
        outputs, scores = engine.tokens(name), engine.scores(name)
        assert len(outputs) == options.get("max_tokens", 40)
        expected = reference_logits(model_dir, [prompt + outputs])[0].float().log_softmax(-1)
        if options.get("logprobs") is None:
            assert scores.output is None
        else:
            named = options.get("logprob_token_ids", ())
            check_equal(scores.output, expected[len(prompt) - 1 : -1], outputs, options["logprobs"], named)
        if options.get("prompt_logprobs") is None or len(prompt) == 1:
            assert scores.prompt is None
        else:
            start = options.get("scored_from", 0)
            check_equal(
                scores.prompt,
                expected[start : len(prompt) - 1],
                prompt[start + 1 :],
                options["prompt_logprobs"],
            )
            if options.get("prompt_ranks"):
                check_ranks(scores.prompt, expected[: len(prompt) - 1], prompt[1:])
            else:
                assert scores.prompt.ranks == b""


def test_blocks_before_the_tokens_to_score_come_from_the_prefix_cache(
    make_engine: Callable[..., Engine],
) -> None:
    engine = make_engine()
    prompt = [5 + i % 90 for i in range(50)]
    engine.add("prompt", prompt, max_tokens=1)
    engine.run()
    engine.add("scored", [*prompt, 7, 8], max_tokens=0, prompt_logprobs=0, scored_from=49)
    engine.add("nowhere", prompt, max_tokens=0, prompt_logprobs=0, scored_from=50)
    engine.run()
    usage = engine.events["scored"][-1].usage
    assert usage is not None
    assert usage.cached_tokens == 48
    assert len(engine.scores("scored").prompt or ()) == 2
    assert engine.events["nowhere"][-1].error is not None


def test_a_scored_prompt_takes_nothing_from_the_prefix_cache_and_leaves_its_blocks_there(
    make_engine: Callable[..., Engine],
) -> None:
    engine = make_engine()
    prompt = [5 + i % 90 for i in range(50)]
    for name, options in {"a": {"prompt_logprobs": 1}, "b": {"prompt_logprobs": 1}, "c": {}}.items():
        engine.add(name, prompt, **options)
        engine.run()
    cached = {
        name: events[-1].usage.cached_tokens for name, events in engine.events.items() if events[-1].usage
    }
    assert cached == {"a": 0, "b": 0, "c": 48}
    assert engine.scores("a") == engine.scores("b")
    assert engine.tokens("a") == engine.tokens("c")


def test_logprobs_are_of_raw_logits_whatever_the_sampling_options(
    model_dir: Path, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine()
    prompt = [9, 8, 7, 6, 5]
    engine.add(
        "biased", prompt, logprobs=3, temperature=1.5, seed=4, repetition_penalty=2.0, presence_penalty=1.0,
        logit_bias=((11, 100.0),), top_k=3, stop_token_ids=(12,), min_tokens=8,
    )  # fmt: skip
    engine.add("cold", prompt, logprobs=3)
    engine.run()
    assert 11 in engine.tokens("biased")
    for name in ("biased", "cold"):
        outputs = engine.tokens(name)
        expected = reference_logits(model_dir, [prompt + outputs])[0].float().log_softmax(-1)
        check_equal(engine.scores(name).output, expected[len(prompt) - 1 : -1], outputs, 3)


def test_a_prompt_row_that_is_not_finite_fails_its_request_alone(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    engine.model.spoil = lambda logits: logits[0].fill_(float("nan")) if logits.shape[0] > 3 else None
    engine.add("bad", [5, 6, 7, 8, 9], prompt_logprobs=0)
    engine.run()
    engine.model.spoil = lambda logits: None
    engine.add("alien", [5, 6, VOCAB], prompt_logprobs=0)
    engine.add("alien later", [5] * MAX_SCORED + [VOCAB], prompt_logprobs=0, max_tokens=0)
    engine.add("named", [5, 6, 7], logprobs=0, logprob_token_ids=(3, VOCAB))
    engine.add("unasked", [5, 6, 7], logprob_token_ids=(3,))
    engine.add("many", [5, 6, 7], logprobs=0, logprob_token_ids=tuple(range(129)))
    engine.add("negative", [5, 6, 7], logprobs=0, logprob_token_ids=(-1,))
    engine.add("good", [5, 6, 7, 8, 9], prompt_logprobs=0, logprobs=0, logprob_token_ids=(3, 4))
    engine.run()
    errors = {name: events[-1].error.code for name, events in engine.events.items() if events[-1].error}
    wrong = ("bad", "alien", "alien later", "named", "unasked", "many", "negative")
    assert errors == dict.fromkeys(wrong, "internal_error")
    assert len(engine.scores("good").prompt or ()) == 4
    assert [len(top) for _, top in engine.scores("good").output.rows()] == [2] * 8


class Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def count_ops(engine: Engine, options: list[dict[str, Any]]) -> Counter[str]:
    for index, given in enumerate(options):
        engine.add(f"{index}", [5, 6, 7, 8 + index], max_tokens=1, **given)
    with Ops() as ops:
        engine.run()
    return ops.seen


def test_logprobs_that_are_not_requested_cost_nothing(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def count(*options: dict[str, Any]) -> Counter[str]:
        return count_ops(make_engine(executor=InThisThread()), list(options))

    count({}, {}, {}, {})  # what a process does once: it compiles kernels and computes tables of positions
    plain = count({}, {}, {}, {})
    one, all_four = count({"logprobs": 20}, {}, {}, {}), count(*[{"logprobs": 20}] * 4)
    scored = count({"prompt_logprobs": 5}, *[{"prompt_logprobs": 5}] * 2, {"logprobs": 3})
    assert one == all_four, "the number of operations depends on how many rows ask"
    assert one["logsumexp"] == 1
    assert plain["ge"] == one["ge"] == scored["ge"] == 0, "ranks that nobody asks for"
    ranked = count({"prompt_logprobs": 5, "prompt_ranks": True}, {}, {}, {})
    assert ranked["ge"] == 1
    named = count({"logprobs": 0, "logprob_token_ids": (5, 6)}, {"logprobs": 3}, {}, {})
    assert named["gather"] == one["gather"] + 1
    assert named["logsumexp"] == 1
    assert scored["logsumexp"] == 2
    assert plain["logsumexp"] == plain["topk"] == plain["gather"] == 0
    assert plain.total() < one.total()
    # A step without them is the forward pass, one look-up of the rows' input tokens, and the draw.
    monkeypatch.setattr(sampler, "score_tokens", None)
    parts = {name: Ops() for name in ("forward", "sample", "_run")}

    def watched(name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            with parts[name]:
                return function(*args)

        return call

    for place, name in ((CountedModel, "forward"), (sampler, "sample"), (ModelRunner, "_run")):
        monkeypatch.setattr(place, name, watched(name, getattr(place, name)))
    count({}, {}, {}, {})
    assert parts["forward"].seen
    assert parts["sample"].seen
    assert parts["_run"].seen == parts["forward"].seen + parts["sample"].seen + Counter(index_select=1)


def test_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    logits = torch.randn(9, 50) * 20
    logits[1, [3, 7, 40]] = 99.0  # equals, in the order of their ids
    logits[2] = 0.0
    tokens = torch.randint(0, 50, (9,))
    before, exact = logits.clone(), logits.double().log_softmax(-1)
    for max_bytes in (1, 50 * 4 * 2, 1 << 20):
        monkeypatch.setattr(scoring, "_MAX_BYTES", max_bytes)
        found = score_tokens(logits, tokens, 5)
        assert torch.equal(logits, before)
        assert torch.allclose(found.values[:, 0].double(), exact.gather(1, tokens[:, None])[:, 0], atol=1e-5)
        assert torch.allclose(found.values[:, 1:].double(), exact.topk(5).values, atol=1e-5)
        assert torch.allclose(exact.gather(1, found.ids.long()), exact.topk(5).values, atol=1e-9)
        assert found.ids[1, :3].tolist() == [3, 7, 40]
        assert (found.listed, found.ranks) == (None, None)
        listed = torch.arange(27).view(9, 3) + 20
        found = score_tokens(logits, tokens, 0, listed=listed, ranked=True)
        assert torch.allclose(found.listed.double(), exact.gather(1, listed), atol=1e-5)
        assert found.ranks.tolist() == (exact >= exact.gather(1, tokens[:, None])).sum(-1).tolist()
        assert found.ranks[2] == 50
    assert score_tokens(logits, tokens, 60).ids.shape == (9, 50)
    assert score_tokens(logits, tokens, 0).ids.shape == (9, 0)
    logits[4, 0] = float("nan")
    finite = score_tokens(logits, tokens, 0).values.isfinite()[:, 0].tolist()
    assert finite == [True] * 4 + [False] + [True] * 4


def test_packed_parts_join_and_cut() -> None:
    rows = [
        (-0.5, [(7, -0.25), (300, -8.0)]),
        (-1.5, [(2**31 - 1, -1.0), (0, -2.0)]),
        (-2.0, [(1, -3.0), (2, -4.0)]),
    ]
    whole = pack_logprobs(rows, 2)
    assert len(whole) == 3
    assert list(whole.rows()) == [(own, tuple(top)) for own, top in rows]
    assert list(whole.part(1, 3).rows()) == list(whole.rows())[1:]
    assert len(whole.part(2, 1)) == 0
    ranked = replace(whole, ranks=struct.pack("<3i", 4, 1, 70_000))
    halves = Scores(prompt=ranked.part(0, 2)), Scores(prompt=ranked.part(2, 3))
    assert join_scores(halves) == Scores(prompt=ranked)
    assert [list(half.prompt.token_ranks()) for half in halves] == [[4, 1], [70_000]]
    parts = [Scores(prompt=whole), Scores(output=whole.part(0, 1)), Scores(output=whole.part(1, 3))]
    assert join_scores(parts) == Scores(whole, whole)
    assert join_scores(parts[:1]) == parts[0]
    assert join_scores([]) is None
    assert cut_scores(Scores(whole, whole), 1, 2) == Scores(whole.part(1, 2), whole)
    assert cut_scores(None, 0, 1) is None
    assert Scores(whole, whole.part(0, 1)).num_values == 12
    bare = pack_logprobs([(-1.0, []), (-2.0, [])], 0)
    assert [len(bare), list(bare.rows())] == [2, [(-1.0, ()), (-2.0, ())]]
    assert wrong_scores(Scores(whole), 3, 0) is None
    assert wrong_scores(None, 0, 0) is None
    assert "2" in (wrong_scores(Scores(whole), 2, 0) or "")
    assert wrong_scores(Scores(whole), 3, 1) is not None
