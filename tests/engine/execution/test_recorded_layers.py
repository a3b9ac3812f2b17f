"""Steps whose layers are repeated from a recording give the same bits as steps that run them."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from loraplex.engine import devices
from loraplex.engine.model.base import ForwardBatch
from loraplex.kernels.backend import resolve_kernels
from loraplex.kernels.bundle import Kernels
from loraplex.kernels.linear.packed import PackedLinear
from loraplex.kernels.numba_layers import MAX_ROWS, NumbaRecordedLayers
from loraplex.kernels.ops import Ops
from loraplex.kernels.weight_form import WeightForm
from support.adapters.tiny_adapters import ADAPTERS, KINDS, save_adapters, with_gates
from support.engine.local_engine import LocalEngine
from support.models import loading
from support.models.checkpoints import FAMILIES, VOCAB, PagedRun, save_tiny

pytestmark = pytest.mark.usefixtures("one_torch_thread")


class Counting:
    """Counts the steps that were repeated, and those that were not."""

    def __init__(self, seen: Counter[bool]) -> None:
        self._seen = seen
        self._layers = NumbaRecordedLayers()

    def run(self, *given: Any) -> Any:
        done = self._layers.run(*given)
        self._seen[done is not None] += 1
        return done


class Both:
    """Computes each step both ways."""

    def __init__(self, model: Any, plain: Any) -> None:
        self._model, self._plain = model, plain

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        hidden: list[torch.Tensor] = []
        take_hidden = None if batch.take_hidden is None else hidden.append
        want = self._plain.forward(dataclasses.replace(batch, take_hidden=take_hidden))
        if batch.take_hidden is not None:
            given = batch.take_hidden
            batch = dataclasses.replace(
                batch, take_hidden=lambda x: (given(x), _equal(x, hidden[0], "hidden rows"))[0]
            )
        logits: torch.Tensor = self._model.forward(batch)
        _equal(logits, want, f"{len(batch.token_ids)} rows")
        return logits


def _equal(found: torch.Tensor, want: torch.Tensor, what: str) -> None:
    assert torch.equal(found.view(torch.uint8), want.view(torch.uint8)), what


def ops_that(change: Any) -> AbstractContextManager[None]:
    return changed_ops(lambda ops: dataclasses.replace(ops, record_layers=change))


@contextmanager
def changed_ops(change: Callable[[Ops], Ops]) -> Iterator[None]:
    def changed(*args: Any, **kwargs: Any) -> Kernels:
        kernels = resolve_kernels(*args, **kwargs)
        return dataclasses.replace(kernels, ops=change(kernels.ops))

    with (
        mock.patch.object(devices, "resolve_kernels", changed),
        mock.patch.object(loading, "resolve_kernels", changed),
    ):
        yield


@pytest.mark.parametrize(
    ("family", "dtype", "threads"),
    [
        ("llama-biases", "bfloat16", 1),
        ("llama-biases", "bfloat16", 2),
        ("gemma2", "float32", 1),
        ("gemma2", "float32", 2),
        ("gemma4-e2b", "bfloat16", 1),
    ],
)
def test_repeated_layers_give_the_same_bits(family: str, dtype: str, threads: int, tmp_path: Path) -> None:
    options = FAMILIES[family] | ({"sliding_window": 20} if family == "gemma2" else {})
    base = save_tiny(tmp_path / "base", options)
    folders = save_adapters(base, tmp_path, with_gates(ADAPTERS | KINDS, options))
    seen: Counter[bool] = Counter()
    with ops_that(None):
        plain = loading.load_model(
            base, "cpu", dtype, max_model_len=100, kernels="numba", batch_invariant=True
        )
    with ops_that(lambda: Counting(seen)):
        engine = LocalEngine(
            base,
            tmp_path / "work",
            wrap_model=lambda model: Both(model, plain),
            kernels="numba",
            dtype=dtype,
            batch_invariant=True,
            max_model_len=100,
            max_num_seqs=10,
            max_num_batched_tokens=MAX_ROWS + 6,
            kv_cache_memory=4 << 20,
            adapter_memory=4 << 20,
            adapter_cpu_memory=4 << 20,
            num_threads=threads,
        )
    rng = random.Random(family)
    refs = {name: engine.publish(folder, name=name) for name, folder in folders.items()}
    for number, name in enumerate([None, *refs] * 3):
        prompt = [rng.randrange(3, VOCAB) for _ in range(rng.choice([2, 9, 40, 75]))]
        engine.add(f"{number}", prompt, refs.get(name), max_tokens=rng.choice([3, 9, 20]))
    engine.embed("embedding", [5] * 30, refs["dora"])
    engine.run()
    for events in engine.events.values():
        assert events[-1].error is None
    engine.close()
    assert seen[True] > 25, "decoding, and the chunks of prompts that fit"
    assert seen[False] > 0, "steps of too many rows"


@pytest.mark.parametrize(
    "family",
    [
        "granite4-h",
        "olmo_hybrid",
        "nemotron_h",
        "qwen3_5_moe",
        "qwen3_next",
        "glm4_moe",
        "granite4-tiny",
        "gemma4-moe",
    ],
)
def test_steps_of_states_and_experts_are_recorded_with_multipliers_and_wide_norms_too(
    family: str, tmp_path: Path
) -> None:
    base = save_tiny(tmp_path / "base", FAMILIES[family])
    seen: Counter[bool] = Counter()
    prompts, runs = [[number * 7 % VOCAB for number in range(length)] for length in (40, 18)], []
    for change in (None, lambda: Counting(seen)):
        with ops_that(change):
            model = loading.load_model(base, "cpu", "bfloat16", kernels="numba", batch_invariant=True)
        run = PagedRun(model, prompts)
        for counts in ({0: 21, 1: 17}, {0: 1, 1: 1}, *[{0: 1}] * 12, {0: 6}):
            run.step(counts)
        runs.append(run)
    for number in range(len(prompts)):
        _equal(runs[1].result(number), runs[0].result(number), f"sequence {number}")
    assert seen == {True: 15}


def test_products_of_a_library_are_not_recorded(tmp_path: Path) -> None:
    """As oneDNN's, on processors with AMX."""
    base = save_tiny(tmp_path / "base", FAMILIES["llama"])
    seen: Counter[bool] = Counter()

    def with_library(ops: Ops) -> Ops:
        @dataclasses.dataclass(frozen=True)
        class OfLibrary(PackedLinear):
            packed: PackedLinear

            def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
                return self.packed(x.clone(), bias)

        def pack(weight: Any, form: WeightForm, dtype: torch.dtype) -> OfLibrary:
            packed = ops.pack(weight, form, dtype)
            return OfLibrary(packed.shape, dtype, packed)

        return dataclasses.replace(ops, pack=pack, record_layers=lambda: Counting(seen))

    with changed_ops(with_library):
        engine = LocalEngine(base, tmp_path / "work", kernels="numba", dtype="float32", num_threads=1)
    engine.add("one", [5, 6, 7], max_tokens=5)
    engine.run()
    assert len(engine.tokens("one")) == 5
    engine.close()
    assert not seen[True]
    assert seen[False] >= 5
