"""A device that has too little memory, and numbers that are not finite, on a real (tiny) model with real adapters:
other requests notice nothing."""

from __future__ import annotations

import random
import shutil
import weakref
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from loraplex.adapters.device.arena import AdapterArena
from loraplex.engine.execution.device_errors import DeviceLost, DeviceOutOfMemory
from loraplex.engine.execution.torch_errors import as_device_fault
from loraplex.engine.kv.cache import block_bytes
from loraplex.engine.kv.layers import CacheKind
from loraplex.engine.logprobs import join_scores
from loraplex.kernels.attention import BLOCK_SIZE
from support.adapters.tiny_adapters import ADAPTERS, save_adapters
from support.engine.local_engine import LocalEngine
from support.models.checkpoints import FAMILIES, VOCAB, save_tiny
from support.simulator.core_integrity import check_core
from support.waiting import eventually

pytestmark = pytest.mark.usefixtures("one_torch_thread")

CACHES = (CacheKind(2, 8),) * 3
OUTPUTS = 10
CPU = torch.device("cpu")


class Around:
    """The model, with something of the test's before each pass and after it."""

    def __init__(self, model):
        self.model = model
        self.before = lambda batch: None
        self.after = lambda batch, logits: None

    def __getattr__(self, name):
        return getattr(self.model, name)

    def forward(self, batch):
        batch = self.before(batch) or batch
        logits = self.model.forward(batch)
        self.after(batch, logits)
        return logits


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("llama"), FAMILIES["llama"])


@pytest.fixture(scope="module")
def folders(base, tmp_path_factory):
    """Two adapters, and one that is finite and admitted, whose products are not."""
    made = save_adapters(base, tmp_path_factory.mktemp("adapters"), {n: ADAPTERS[n] for n in ("all", "some")})
    made["overflows"] = Path(shutil.copytree(made["all"], made["all"].parent / "overflows"))
    path = made["overflows"] / "adapter_model.safetensors"
    tensors = {name: tensor * 1e20 for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    return made


@pytest.fixture
def make_engine(base, folders, tmp_path):
    made = []

    def make(*, num_blocks=40, lookahead=0, **settings):
        engine = LocalEngine(
            base,
            tmp_path / str(len(made)),
            wrap_model=Around,
            dtype="float32",
            max_model_len=100,
            max_num_seqs=8,
            kv_cache_memory=num_blocks * block_bytes(CACHES, torch.float32),
            adapter_memory=4 << 20,
            adapter_cpu_memory=4 << 20,
            num_threads=1,
            lookahead=lookahead,
            **{"max_num_batched_tokens": 40, **settings},
        )
        engine.around = engine.built.runner._model
        engine.refs = {None: None} | {
            name: engine.publish(folder, name=name) for name, folder in folders.items()
        }
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


def workload(seed=7, count=8):
    rng = random.Random(seed)
    names = [None, "all", "some"]
    return {
        f"r{i}": (names[i % 3], [rng.randrange(3, VOCAB) for _ in range(rng.choice([2, 17, 45, 70]))])
        for i in range(count)
    }


def answers(engine, asked):
    """Tokens and log probabilities of each request; all must have come to a proper end."""
    return {
        name: (
            engine.tokens(name),
            join_scores([e.scores for e in engine.events[name] if e.scores is not None]),
        )
        for name in asked
    }


def ask(engine, asked, **sampling):
    for number, (name, (adapter, prompt)) in enumerate(asked.items()):
        scored = {"logprobs": 2} if number % 2 else {}
        if number % 4 == 3:
            scored["prompt_logprobs"] = 1
        engine.add(name, prompt, engine.refs[adapter], **{"max_tokens": OUTPUTS, **scored, **sampling})


def assert_same(found, expected):
    """Log probabilities up to rounding, which depends on the sizes of a step's products."""
    assert found.keys() == expected.keys()
    for name, (tokens, scores) in found.items():
        other_tokens, other = expected[name]
        assert tokens == other_tokens, name
        assert (scores is None) == (other is None)
        if scores is None or other is None:
            continue
        for mine, theirs in ((scores.output, other.output), (scores.prompt, other.prompt)):
            assert (mine is None) == (theirs is None)
            if mine is not None and theirs is not None:
                assert mine.ids == theirs.ids
                assert torch.allclose(floats(mine), floats(theirs), atol=1e-4)


def floats(logprobs):
    return torch.frombuffer(bytearray(logprobs.values), dtype=torch.float32)


@pytest.fixture(scope="module")
def undisturbed():
    return {}


def expected_answers(make_engine, asked, cache):
    """What an engine gives to which nothing happens."""
    if not cache:
        engine = make_engine()
        ask(engine, asked)
        engine.run()
        cache.update(answers(engine, asked))
    return cache


# Memory.


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("room", [1, 6])
def test_every_request_is_answered_by_a_device_that_takes_only_small_steps(
    make_engine, undisturbed, lookahead, room
):
    asked = workload()
    expected = expected_answers(make_engine, asked, undisturbed)
    engine = make_engine(lookahead=lookahead)

    def refuse(batch):
        if batch.token_ids.shape[0] > room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    engine.around.before = refuse
    ask(engine, asked)
    engine.run()
    assert_same(answers(engine, asked), expected)
    stats = engine.core.stats()
    assert stats.num_out_of_memory > 2
    assert (stats.num_kv_blocks_used, stats.num_leases) == (0, 0)


class CutShort:
    """A KV cache whose last layer finds no memory: the layers before it have written theirs."""

    def __init__(self, kv):
        self._kv = kv

    def __getattr__(self, name):
        return getattr(self._kv, name)

    def layer(self, index):
        if index == len(CACHES) - 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return self._kv.layer(index)


@pytest.mark.parametrize("lookahead", [0, 1])
def test_memory_that_runs_out_in_the_middle_of_passes_changes_no_token(make_engine, undisturbed, lookahead):
    asked = workload()
    expected = expected_answers(make_engine, asked, undisturbed)
    engine = make_engine(lookahead=lookahead, num_blocks=20)
    passes = count(1)
    engine.around.before = lambda batch: (
        replace(batch, kv=CutShort(batch.kv)) if next(passes) % 5 == 0 else None
    )
    ask(engine, asked)
    engine.run()
    assert_same(answers(engine, asked), expected)
    assert engine.core.stats().num_out_of_memory > 3


def test_a_sequence_that_needs_too_much_ends_and_the_others_do_not(make_engine, undisturbed):
    asked = workload()
    expected = expected_answers(make_engine, asked, undisturbed)
    engine = make_engine()
    long = [5] * 90

    def refuse(batch):
        if int(batch.positions.max()) >= 85:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    engine.around.before = refuse
    engine.add("long", long, engine.refs["all"], max_tokens=4)
    ask(engine, asked)
    engine.run()
    error = engine.events["long"][-1].error
    assert error is not None
    assert (error.code, "too little memory" in error.message) == ("server_overloaded", True)
    assert_same(answers(engine, asked), expected)


def test_an_adapter_that_finds_no_memory_is_told_and_tried_again(make_engine, monkeypatch):
    engine = make_engine()
    write, full = AdapterArena.write, [True]

    def no_room(self, image, slot, pages):
        if full:
            full.clear()
            raise torch.OutOfMemoryError("CUDA out of memory.")
        write(self, image, slot, pages)

    monkeypatch.setattr(AdapterArena, "write", no_room)
    monkeypatch.setattr("loraplex.adapters.cache.failures.FIRST_BACKOFF_S", 0.2)
    engine.add("adapter", [4, 5, 6], engine.refs["all"])
    engine.add("base", [4, 5, 6])
    engine.run()
    error = engine.events["adapter"][-1].error
    assert error is not None
    assert error.code == "adapter_unavailable"
    assert len(engine.tokens("base")) == 16
    check_core(engine.core)

    def comes_back():
        engine.events.pop("again", None)
        engine.add("again", [4, 5, 6], engine.refs["all"])
        engine.run()
        return engine.events["again"][-1].error is None

    eventually(comes_back)
    assert len(engine.tokens("again")) == 16
    check_core(engine.core)


def test_failed_step_releases_its_memory(make_engine):
    engine = make_engine()
    held = []

    def allocate_and_fail(batch):
        if not held:
            activations = torch.zeros(1000)
            held.append(weakref.ref(activations))
            raise torch.OutOfMemoryError("CUDA out of memory.")
        assert held[0]() is None, "the next step finds the memory of the last one taken"

    engine.around.before = allocate_and_fail
    engine.add("r", [4, 5, 6])
    engine.run()
    assert len(engine.tokens("r")) == 16


def test_device_errors_are_told_apart_from_others(monkeypatch):
    with pytest.raises(RuntimeError) as refused:
        torch.empty(1 << 60)
    assert isinstance(as_device_fault(refused.value, CPU), DeviceOutOfMemory)
    for error in (
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried …"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("could not create a primitive"),
    ):
        assert isinstance(as_device_fault(error, CPU), DeviceOutOfMemory)
    bug = ValueError("a table is too short")
    assert as_device_fault(bug, CPU) is bug
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert as_device_fault(bug, gpu) is bug

    def lost(device):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    assert isinstance(as_device_fault(RuntimeError("device-side assert triggered"), gpu), DeviceLost)


# Numbers.


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("budget", [16, 64])
def test_an_adapter_whose_products_overflow_fails_its_own_rows_alone(
    make_engine, undisturbed, lookahead, budget
):
    """In one batch, in chunks of prompts and in decoding, with and without log probabilities, on a pool so small that
    its blocks come to others at once."""
    asked = workload()
    expected = expected_answers(make_engine, asked, undisturbed)
    engine = make_engine(lookahead=lookahead, num_blocks=16, max_num_batched_tokens=budget)
    bad = {
        "short": ([4, 5], {}),
        "long": ([6] * 70, {}),
        "scored": ([7] * 40, {"logprobs": 3}),
        "prompt scored": ([8] * 40, {"prompt_logprobs": 1}),
        "prompt alone": ([9] * 40, {"max_tokens": 0, "prompt_logprobs": 0}),
    }
    names = iter(bad)
    for name, (adapter, prompt) in asked.items():
        ask(engine, {name: (adapter, prompt)})
        if (found := next(names, None)) is not None:
            engine.add(found, bad[found][0], engine.refs["overflows"], **bad[found][1])
        engine.step()
    engine.run()
    for name in bad:
        error = engine.events[name][-1].error
        assert error is not None, name
        assert error.code == "adapter_not_finite"
        assert "overflows@v1" in error.message
        assert not any(event.token_ids or event.scores for event in engine.events[name])
    found = answers(engine, asked)
    assert {name: tokens for name, (tokens, _) in found.items()} == {
        name: tokens for name, (tokens, _) in expected.items()
    }
    stats = engine.core.stats()
    assert (stats.num_kv_blocks_used, stats.num_leases) == (0, 0)
    for name, (adapter, prompt) in asked.items():
        engine.add(f"{name} again", prompt, engine.refs[adapter], max_tokens=OUTPUTS)
        engine.run()
        assert engine.tokens(f"{name} again") == expected[name][0]


def test_a_prompt_that_cannot_be_computed_ends_with_its_first_chunk(make_engine):
    engine = make_engine(max_num_batched_tokens=16)
    engine.add("long", [6] * 90, engine.refs["overflows"], max_tokens=4)
    engine.run()
    assert engine.events["long"][-1].error is not None
    assert engine.core.stats().num_steps == 1
    engine.add("again", [6] * 90, engine.refs["overflows"], max_tokens=4)
    engine.run()
    usage = engine.events["again"][-1].usage
    assert usage is not None
    assert usage.cached_tokens == 0


@pytest.mark.parametrize("lookahead", [0, 1])
def test_kv_that_went_bad_in_passing_fails_one_request_and_is_cleaned(make_engine, lookahead):
    """A fault of the device's memory, in a prompt that is still being computed: the request ends, the next one with
    the same prompt gets what it should, and so does the next owner of the blocks."""
    engine = make_engine(num_blocks=8, lookahead=lookahead, max_num_batched_tokens=24)
    prompt, other = [5, 9, 11, 13] * 20, [8, 6, 4] * 30
    spoilt = []

    def spoil(batch, logits):
        rows = (batch.positions == 40).nonzero()[:, 0].tolist()
        if rows and not spoilt:
            slot = int(batch.attention[0].slots[rows[0]])
            batch.kv.pools[0][:, slot // BLOCK_SIZE, slot % BLOCK_SIZE] = float("nan")
            spoilt.append(slot // BLOCK_SIZE)

    engine.around.after = spoil
    engine.add("bad", prompt, max_tokens=4)
    engine.run()
    assert spoilt
    error = engine.events["bad"][-1].error
    assert error is not None
    assert error.code == "internal_error"
    engine.add("again", prompt, max_tokens=4)
    engine.add("other", other, engine.refs["all"], max_tokens=4)
    engine.run()
    fresh = make_engine(max_num_batched_tokens=24)
    fresh.add("again", prompt, max_tokens=4)
    fresh.add("other", other, fresh.refs["all"], max_tokens=4)
    fresh.run()
    for name in ("again", "other"):
        assert engine.tokens(name) == fresh.tokens(name)
