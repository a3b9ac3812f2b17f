"""Compilation at the start, and recordings."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loraplex.engine.execution.cuda_graphs import CudaRecorder
from loraplex.engine.kv.cache import block_bytes
from loraplex.engine.kv.layers import CacheKind
from loraplex.engine.sampling import scoring
from loraplex.kernels.attention import BLOCK_SIZE
from support.adapters.peft_zoo import ALL_SITES
from support.adapters.tiny_adapters import save_adapters
from support.engine.local_engine import LocalEngine
from support.models.checkpoints import VOCAB, save_tiny

pytestmark = pytest.mark.usefixtures("one_torch_thread", "quick_interpreter")

CONFIG = {"model_type": "llama", "num_hidden_layers": 1}


class Repeater:
    """Runs what it records once, as a recorder of CUDA graphs does."""

    def record(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        work()
        return work

    def forget(self) -> None: ...


SETTINGS: dict[str, Any] = {
    "kernels": "triton",
    "dtype": "float32",
    "max_model_len": 64,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 32,
    "kv_cache_memory": 8 * block_bytes((CacheKind(2, 8),), torch.float32),
    "adapter_memory": 1 << 20,
    "adapter_cpu_memory": 1 << 20,
    "num_threads": 1,
}


def start(base: Path, work: Path) -> LocalEngine:
    return LocalEngine(base, work, recorder=Repeater(), **SETTINGS)


def compiled_form(kernel: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """What Triton compiles a kernel for: its constants, its arguments' types, which whole numbers are 1 or multiples of
    16, and which pointers are. Where a kernel opts out of one of the two, that is left out."""

    def names(option: str) -> set[str]:
        listed = kernel.kwargs.get(option) or ()
        return {kernel.arg_names[found] if isinstance(found, int) else found for found in listed}

    plain, unaligned = names("do_not_specialize"), names("do_not_specialize_on_alignment")
    form: list[Any] = [kernel.fn.__name__]
    for name, value in sorted({**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}.items()):
        if isinstance(value, torch.Tensor):
            form.append((name, value.dtype, name in unaligned or value.data_ptr() % 16 == 0))
        elif name.isupper() or name == "num_warps":
            form.append((name, value))
        elif type(value) is int and name in plain:
            form.append((name, value < 2**31))
        elif type(value) is int:
            form.append((name, value < 2**31, value == 1, name in unaligned or value % 16 == 0))
    return tuple(form)


@pytest.fixture
def launched(monkeypatch) -> set[Any]:
    """The forms in which kernels were launched."""
    from triton.runtime.interpreter import InterpretedFunction

    seen: set[Any] = set()
    run = InterpretedFunction.run

    def noted(self, *args, **kwargs):
        options = {name: value for name, value in kwargs.items() if name not in ("grid", "warmup")}
        seen.add(compiled_form(self, args, options))
        return run(self, *args, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", noted)
    return seen


def test_warm_up_launches_every_kernel_of_a_prompt(tmp_path, launched):
    base = save_tiny(tmp_path / "base", CONFIG)
    adapters = save_adapters(
        base, tmp_path, {"one": {"r": 8, "lora_alpha": 16, "target_modules": [*ALL_SITES, "lm_head"]}}
    )
    engine = start(base, tmp_path / "work")
    ref = engine.publish(adapters["one"], name="one")
    warm = set(launched)
    launched.clear()
    engine.add("a", range(3, 3 + BLOCK_SIZE + 4), max_tokens=3, temperature=0.9, top_p=0.5)
    engine.add("b", range(3, 3 + BLOCK_SIZE + 5), ref, max_tokens=3)
    engine.run()
    assert len(engine.tokens("a")) == len(engine.tokens("b")) == 3
    engine.close()
    assert {form[0] for form in launched} > {"shrink", "expand", "attention_program"}
    assert launched - warm == set()


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 1.0},
    "ranked": {"temperature": 0.8, "top_k": 3, "top_p": 0.5, "min_p": 0.1},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "biases": {"logit_bias": ((3, 5.0), (4, -5.0)), "temperature": 0.5},
    "least length": {"min_tokens": 2, "ignore_eos": False},
    "both": {"logit_bias": ((3, 1.0),), "frequency_penalty": 0.2},
    "log probabilities": {"logprobs": 3},
    "of named tokens": {"logprobs": 0, "logprob_token_ids": (1, 2, 3)},
    "of the prompt": {"prompt_logprobs": 2, "prompt_ranks": True},
}


@pytest.mark.parametrize("vocab_size", [VOCAB, pytest.param(VOCAB + 3, id="rows that are not aligned")])
def test_no_request_launches_a_kernel_that_the_start_did_not(tmp_path, launched, vocab_size, monkeypatch):
    base = save_tiny(tmp_path / "base", {**CONFIG, "vocab_size": vocab_size})
    engine = start(base, tmp_path / "work")
    warm = set(launched)
    launched.clear()
    monkeypatch.setattr(scoring, "_MAX_BYTES", 4 * 5 * vocab_size)  # of 19 positions, five at a time
    for name, options in OPTIONS.items():
        engine.add(name, range(3, 3 + 20), max_tokens=3, **options)
    engine.embed("mean", range(3, 3 + 20), pooling="mean")
    engine.embed("last", range(3, 3 + 20), pooling="last")
    engine.run()
    for name in OPTIONS:
        assert len(engine.tokens(name)) == 3
    assert engine.embedding("mean").isfinite().all()
    engine.close()
    assert any(("MASKED", True) in form for form in warm), "the start has launched none for grammars"
    assert {form[0] for form in launched} >= {
        "peaks",
        "pick",
        "penalise",
        "add_bias",
        "tile_sums",
        "join_sums",
    }
    assert launched - warm == set()


def test_recordings_return_their_logits_in_one_piece_of_memory(tmp_path):
    base = save_tiny(tmp_path / "base", CONFIG)
    kept: list[torch.Tensor] = []

    class Keeper(Repeater):
        def record(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
            kept.append(work())
            return work

    engine = LocalEngine(base, tmp_path / "work", recorder=Keeper(), **SETTINGS)
    engine.close()
    assert sorted(logits.shape[0] for logits in kept) == [1, 1, 2, 2]
    assert len({logits.data_ptr() for logits in kept}) == 1


def test_cuda_graphs_are_recorded_on_one_stream(monkeypatch):
    streams: list[Any] = []
    recorded_on: list[Any] = []

    class Stream:
        def __init__(self) -> None:
            streams.append(self)

        def wait_stream(self, other: Any) -> None: ...

    @contextmanager
    def graph(graph: Any, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
        recorded_on.append(stream)
        yield

    current = Stream()
    streams.clear()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(pool=lambda: "pool"))
    monkeypatch.setattr(torch.cuda, "graph", graph)
    recorder = CudaRecorder()
    for _ in range(3):
        recorder.record(lambda: torch.zeros(1))
    assert recorded_on == streams * 3


def test_a_recording_keeps_the_tensors_that_its_graph_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph holds addresses: what lies there must not be given to anything else while the graph can be replayed."""

    class Stream:
        def wait_stream(self, other: Any) -> None: ...

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    graph = SimpleNamespace(pool=lambda: "pool", replay=lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **options: nullcontext())
    rows = torch.arange(3)
    gone = weakref.ref(rows)
    replay = CudaRecorder().record(partial(torch.index_select, torch.zeros(4), 0, rows))
    del rows
    assert gone() is not None
    assert replay().shape == (3,)
    del replay
    assert gone() is None
