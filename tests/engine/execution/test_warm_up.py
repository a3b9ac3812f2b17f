"""What is compiled at the start, and the adapters' A side on a lane of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.engine.config import BLOCK_SIZE
from loraplex.engine.execution.cuda_graphs import record_decoding
from loraplex.engine.execution.kv_cache import block_bytes
from loraplex.engine.execution.packed_inputs import PackedSource
from loraplex.engine.model.base import ModelShape
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


class LateLane:
    """As late as a stream may be: the work is done when it is waited for."""

    def __init__(self) -> None:
        self.waiting: Callable[[], None] | None = None
        self.joined = 0

    def fork(self, work: Callable[[], None]) -> None:
        assert self.waiting is None
        self.waiting = work

    def join(self) -> None:
        assert self.waiting is not None
        self.waiting()
        self.waiting = None
        self.joined += 1


def start(base: Path, work: Path) -> LocalEngine:
    return LocalEngine(
        base,
        work,
        recorder=Repeater(),
        kernels="triton",
        dtype="float32",
        max_model_len=64,
        max_num_seqs=2,
        max_num_batched_tokens=32,
        kv_cache_memory=8 * block_bytes(ModelShape(1, 2, 8, VOCAB, 512), torch.float32),
        adapter_memory=1 << 20,
        adapter_cpu_memory=1 << 20,
        num_threads=1,
    )


def test_warm_up_launches_every_kernel_of_a_prompt(tmp_path, monkeypatch):
    """Triton compiles again for other constants, and for whole numbers that are 1 or a multiple of 16."""
    from triton.runtime.interpreter import InterpretedFunction

    seen: Counter[Any] = Counter()
    run = InterpretedFunction.run

    def counted(self, *args, **kwargs):
        options = tuple(sorted((name, value) for name, value in kwargs.items() if name.isupper()))
        seen[self.fn.__name__, options] += 1
        return run(self, *args, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", counted)
    base = save_tiny(tmp_path / "base", CONFIG)
    adapters = save_adapters(
        base, tmp_path, {"one": {"r": 8, "lora_alpha": 16, "target_modules": [*ALL_SITES, "lm_head"]}}
    )
    engine = start(base, tmp_path / "work")
    ref = engine.publish(adapters["one"], name="one")
    warm = set(seen)
    seen.clear()
    engine.add("a", range(3, 3 + BLOCK_SIZE + 4), max_tokens=3, temperature=0.9, top_p=0.5)
    engine.add("b", range(3, 3 + BLOCK_SIZE + 5), ref, max_tokens=3)
    engine.run()
    assert len(engine.tokens("a")) == len(engine.tokens("b")) == 3
    engine.close()
    assert sum(seen.values()) > 20
    assert {name for name, _ in seen} > {"shrink", "expand", "attention_program"}
    assert set(seen) <= warm


def test_the_a_side_on_a_lane_of_its_own_changes_nothing(tmp_path):
    base = save_tiny(tmp_path / "base", CONFIG)
    adapters = save_adapters(base, tmp_path)
    answers = []
    for lane in (None, LateLane()):
        engine = start(base, tmp_path / f"work-{lane is None}")
        runner = engine.built.runner
        source = runner._inputs
        assert isinstance(source, PackedSource)
        if lane is not None:
            record_decoding(runner._model, runner._kv, source, Repeater(), lane=lane)
        ref = engine.publish(adapters["all"], name="all")
        engine.add("a", [5, 9, 2], ref, max_tokens=5)
        engine.add("b", [7, 7], max_tokens=5)
        engine.run()
        answers.append((engine.tokens("a"), engine.tokens("b")))
        engine.close()
    assert answers[0] == answers[1]
    assert answers[0][0] != answers[0][1]
    # Four groups in one layer, in the first run of each of two recordings and in each of four replays.
    assert lane.joined == 4 * (2 + 4)
    assert lane.waiting is None
