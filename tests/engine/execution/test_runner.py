"""The runner on a real (tiny) model: order, lookahead, and faults that stay where they arise."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field

import pytest
import torch

from loraplex.adapters.ref import AdapterRef
from loraplex.engine.config import SchedulerConfig
from loraplex.engine.core.engine_core import EngineCore
from loraplex.engine.execution.executor import Executor
from loraplex.engine.execution.runner import ModelRunner
from loraplex.engine.kv.cache import KVCache
from loraplex.engine.sampling.noise import uniform
from loraplex.engine.types import EngineRequest, SamplingParams, ScheduledSequence, Sequence, StepPlan
from loraplex.kernels.attention import BLOCK_SIZE
from support.engine.fake_transport import FakeTransport, make_cache
from support.models.checkpoints import FAMILIES, VOCAB, PagedRun, reference_logits, save_tiny
from support.models.loading import load_model

NUM_BLOCKS = 64


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("llama"), FAMILIES["llama"])


@pytest.fixture(scope="module")
def model(model_dir):
    return load_model(model_dir, "cpu", "float32")


@pytest.fixture
def make_runner(model):
    made = []

    def make(lora=None, wrapped=None) -> ModelRunner:
        kv = KVCache(model.shape.caches, NUM_BLOCKS, model.dtype, model.device)
        kv.tensor.fill_(float("nan"))
        runner = ModelRunner(wrapped or model, kv, Executor(), eos_ids=frozenset({2}), lora=lora)
        made.append(runner)
        return runner

    yield make
    for runner in made:
        runner.close()


@dataclass
class Driver:
    """A scheduler in small: chunks of prompts mixed with decoding, `lookahead` steps ahead."""

    runner: ModelRunner
    lookahead: int = 0
    seed: int = 0
    failures: dict[str, str] = field(default_factory=dict)

    def __post_init__(self):
        self.rng = random.Random(self.seed)
        self.free = list(range(NUM_BLOCKS))
        self.rng.shuffle(self.free)
        self.steps = 0

    def plan(self, seqs: list[Sequence]) -> StepPlan:
        rows = []
        for seq in seqs:
            total = seq.num_tokens
            if seq.num_computed == total or seq.request_id in self.failures:
                continue
            if seq.num_outputs + seq.num_pending >= seq.request.sampling.max_tokens:
                continue
            pending = seq.num_computed >= len(seq.token_ids)
            count = 1 if pending else min(total - seq.num_computed, self.rng.choice([1, 3, 16, 20]))
            start, end = seq.num_computed, seq.num_computed + count
            while len(seq.block_ids) * BLOCK_SIZE < end:
                seq.block_ids += (self.free.pop(),)
            tokens = (0,) if pending else tuple(seq.token_ids[start:end])
            samples = end == total
            rows.append(
                ScheduledSequence(
                    seq.request, seq.order, seq.epoch, start, count, tokens, seq.block_ids, seq.slot, samples, pending,
                    total - seq.num_prompt, outputs=tuple(seq.token_ids[seq.num_prompt :]),
                )
            )  # fmt: skip
            seq.num_computed = end
            seq.num_pending += samples
        self.sequences = {seq.request_id: seq for seq in seqs}
        self.rng.shuffle(rows)
        self.steps += 1
        return StepPlan(self.steps, tuple(rows))

    def finish(self, seqs: list[Sequence]) -> dict[str, list[int]]:
        flights = []
        while True:
            plan = self.plan(seqs)
            if plan.scheduled:
                flights.append((plan, self.runner.submit(plan)))
            if flights and (len(flights) > self.lookahead or not plan.scheduled):
                self.collect(*flights.pop(0))
            elif not plan.scheduled:
                return {s.request_id: s.token_ids[s.num_prompt :] for s in seqs}

    def collect(self, plan, handle):
        result = self.runner.collect(handle)
        assert result.step_id == plan.step_id
        for item, row in zip(plan.scheduled, result.rows, strict=True):
            tokens = row.token_ids
            if row.failed is not None:
                assert tokens == ()
                self.failures.setdefault(item.request_id, row.failed.reason)
                continue
            assert bool(tokens) == item.samples
            seq = self.sequences[item.request_id]
            seq.token_ids += tokens
            seq.num_pending -= len(tokens)


def sequence(name: str, prompt: list[int], slot: int = -1, **params) -> Sequence:
    params = {"max_tokens": 6, "temperature": 0.0, **params}
    ref = None if slot < 0 else AdapterRef("t", f"a{slot}", 1, "0" * 64, 8)
    request = EngineRequest(name, "t", tuple(prompt), SamplingParams(**params), ref)
    return Sequence(request, 0.0, 0, list(prompt), slot=slot)


def prompts(seed: int, count: int = 5) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB) for _ in range(rng.choice([1, 4, 17, 33, 48]))] for _ in range(count)]


@pytest.fixture(scope="module")
def greedy(model):
    """The greedy continuation, one sequence at a time and without the runner."""

    def continuation(prompt: list[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            run = PagedRun(model, [tokens])
            run.step({0: len(tokens)})
            tokens.append(int(run.result(0)[-1].argmax()))
        return tokens[len(prompt) :]

    return continuation


@pytest.mark.parametrize("lookahead", [0, 1])
def test_greedy_tokens_however_it_is_scheduled(make_runner, greedy, lookahead):
    asked = prompts(1)
    expected = {str(i): greedy(p, 6) for i, p in enumerate(asked)}
    for seed in range(3):
        seqs = [sequence(str(i), p) for i, p in enumerate(asked)]
        assert Driver(make_runner(), lookahead, seed).finish(seqs) == expected


def test_sampling_is_replayed_under_any_schedule_and_lookahead(make_runner):
    """Penalties included: the token that only the device knows counts like any other."""
    options = [
        {"seed": 1}, {"seed": 2, "top_p": 0.8, "temperature": 1.5}, {"seed": 3, "repetition_penalty": 1.8},
        {"seed": 4, "frequency_penalty": 1.2, "presence_penalty": 0.6, "temperature": 2.0},
        {"temperature": 0.0, "repetition_penalty": 1.5, "presence_penalty": 2.0},
    ]  # fmt: skip
    answers = []
    for lookahead in (0, 1):
        for seed in (5, 6):
            seqs = [
                sequence(str(i), p, **{"temperature": 1.0, "max_tokens": 12, **o})
                for i, (p, o) in enumerate(zip(prompts(2), options, strict=True))
            ]
            answers.append(Driver(make_runner(), lookahead, seed).finish(seqs))
    assert all(answer == answers[0] for answer in answers)
    assert uniform(1, 0, 0) != uniform(2, 0, 0)


def test_adapters_come_to_their_own_rows(make_runner, greedy):
    """Rows are handed over sorted by slot, base rows on no list, and each adapter meets its own rows alone."""

    class Pass:
        def __init__(self, segments):
            self.segments = segments

        def apply(self, layer, group, x, y):
            if group == "down":
                for slot, first, count in self.segments:
                    y[first : first + count] += x[first : first + count].sum(-1, keepdim=True) * (slot + 1)

    class Arena:
        def __init__(self):
            self.seen = []

        def lora_pass(self, segments, num_rows):
            self.seen.append((tuple(segments), num_rows))
            return Pass(segments)

        def head_pass(self, segments, num_rows):
            return None

        def expert_pass(self, segments, num_rows):
            return None

        def token_pass(self, segments, logits_segments, upload):
            return None

    asked = prompts(3, 6)
    slots = [2, -1, 0, 2, -1, 1]
    alone = {}
    for i, (p, slot) in enumerate(zip(asked, slots, strict=True)):
        alone |= Driver(make_runner(Arena())).finish([sequence(str(i), p, slot)])
    arena = Arena()
    seqs = [sequence(str(i), p, slot) for i, (p, slot) in enumerate(zip(asked, slots, strict=True))]
    assert Driver(make_runner(arena), 1).finish(seqs) == alone
    assert alone["1"] == greedy(asked[1], 6)
    assert alone["0"] != greedy(asked[0], 6)
    for segments, num_rows in arena.seen:
        assert [s for s, _, _ in segments] == sorted({s for s, _, _ in segments})
        assert segments[-1][1] + segments[-1][2] == num_rows


def test_a_bad_token_or_broken_row_fails_alone(make_runner, greedy):
    class Broken:
        def lora_pass(self, segments, num_rows):
            return self

        def head_pass(self, segments, num_rows):
            return None

        def expert_pass(self, segments, num_rows):
            return None

        def token_pass(self, segments, logits_segments, upload):
            return None

        segments = ()

        def apply(self, layer, group, x, y):
            if layer == 1 and group == "o":
                y[-1] = float("inf")  # the row with the highest slot

    asked = prompts(4, 4)
    driver = Driver(make_runner(Broken()), 1)
    seqs = [
        sequence("good", asked[0]), sequence("alien", [5, VOCAB, 6]), sequence("negative", [-1]),
        sequence("broken", asked[1][:1], slot=3), sequence("also good", asked[2]),
    ]  # fmt: skip
    answers = driver.finish(seqs)
    assert set(driver.failures) == {"alien", "negative", "broken"}
    assert "vocabulary" in driver.failures["alien"]
    assert "not finite" in driver.failures["broken"]
    # Their blocks are dirty now. The next owners do not notice.
    driver.free = [b for s in seqs if s.request_id in driver.failures for b in s.block_ids] + driver.free
    driver.free.reverse()
    late = driver.finish([sequence("late", asked[3])])
    assert {**answers, **late}["late"] == greedy(asked[3], 6)
    assert answers["good"] == greedy(asked[0], 6)
    assert answers["also good"] == greedy(asked[2], 6)


def test_a_failing_forward_surfaces_in_collect_and_the_next_steps_run(make_runner, model, greedy):
    class Sometimes:
        def __init__(self):
            self.fail = False

        def __getattr__(self, name):
            return getattr(model, name)

        def forward(self, batch):
            if self.fail:
                raise RuntimeError("out of memory, say")
            return model.forward(batch)

    broken = Sometimes()
    runner = make_runner(wrapped=broken)
    driver = Driver(runner)
    first = sequence("a", [4, 5, 6])
    broken.fail = True
    handle = runner.submit(driver.plan([first]))
    pending = runner.submit(driver.plan([first]))  # waits for a token that will never be drawn
    with pytest.raises(RuntimeError, match="out of memory"):
        runner.collect(handle)
    with pytest.raises(RuntimeError, match="out of memory"):
        runner.collect(pending)
    broken.fail = False
    assert Driver(runner).finish([sequence("b", [7, 8, 9])])["b"] == greedy([7, 8, 9], 6)


def test_submit_does_not_wait_and_reads_nothing_later(make_runner, model, greedy):
    """The step runs on the worker while this thread changes the sequence; the answer is of the plan."""
    gate = threading.Event()

    class Slow:
        def __getattr__(self, name):
            return getattr(model, name)

        def forward(self, batch):
            assert gate.wait(30)
            return model.forward(batch)

    runner = make_runner(wrapped=Slow())
    driver = Driver(runner)
    seq = sequence("a", [9, 8, 7], repetition_penalty=1.0)
    plan = driver.plan([seq])
    while not plan.scheduled[0].samples:
        gate.set()
        runner.collect(runner.submit(plan))
        gate.clear()
        plan = driver.plan([seq])
    handle = runner.submit(plan)
    seq.token_ids[:] = [3] * 3
    seq.block_ids = (0,)
    gate.set()
    assert [row.token_ids for row in runner.collect(handle).rows] == [(greedy([9, 8, 7], 1)[0],)]


def test_an_adapter_row_without_an_arena_is_refused_before_anything_runs(make_runner, greedy):
    runner = make_runner()
    with pytest.raises(RuntimeError, match="no adapters"):
        runner.submit(Driver(runner).plan([sequence("a", [4], slot=0)]))
    assert Driver(runner).finish([sequence("b", [7, 8, 9])])["b"] == greedy([7, 8, 9], 6)


def test_equal_to_transformers(model_dir, make_runner):
    asked = prompts(8)
    answers = Driver(make_runner(), 1).finish([sequence(str(i), p) for i, p in enumerate(asked)])
    for i, prompt in enumerate(asked):
        full = prompt + answers[str(i)]
        logits = reference_logits(model_dir, [full])[0]
        assert answers[str(i)] == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


def test_inference_leaves_no_graph(make_runner):
    driver = Driver(make_runner())
    driver.finish([sequence("a", [4, 5])])
    assert not driver.runner._kv.tensor.requires_grad
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("lookahead", [0, 1])
def test_preemption_and_prefix_hits_change_no_token(model, greedy, lookahead):
    """The whole engine on a pool that is far too small: sequences lose their blocks, start over, and share prefixes."""
    num_blocks = 14
    kv = KVCache(model.shape.caches, num_blocks, model.dtype, model.device)
    kv.tensor.fill_(float("nan"))
    runner = ModelRunner(model, kv, Executor(), eos_ids=frozenset(), lora=None)
    transport = FakeTransport(time.monotonic, 1)
    core = EngineCore(
        SchedulerConfig(num_blocks, 200, 8, 40, 100, lookahead), runner, make_cache(transport),
        eos_ids=frozenset(), clock=transport.clock,
    )  # fmt: skip
    rng = random.Random(lookahead)
    shared = [rng.randrange(3, VOCAB) for _ in range(35)]
    asked = {
        f"r{i}": shared[: rng.choice([0, 16, 35])] + [rng.randrange(3, VOCAB) for _ in range(9)]
        for i in range(9)
    }
    for name, prompt in asked.items():
        core.add_request(EngineRequest(name, "t", tuple(prompt), SamplingParams(40, temperature=0.0)))
    answers: dict[str, list[int]] = {name: [] for name in asked}
    for _ in range(2000):
        if not core.has_work:
            break
        for event in core.step():
            assert event.error is None, event.error
            answers[event.request_id] += event.token_ids
    assert core.stats().num_preemptions > 0
    assert core.stats().prefix_cache_hits > 0
    for name, prompt in asked.items():
        assert answers[name] == greedy(prompt, 40), name
    runner.close()
