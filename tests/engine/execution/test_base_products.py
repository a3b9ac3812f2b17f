"""How many products with the base's weights a step takes: one for each linear, whatever adapters its rows have."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from support.adapters.lora_zoo import OpCounter
from support.adapters.tiny_adapters import ADAPTERS, save_adapters
from support.engine.local_engine import LocalEngine
from support.models.checkpoints import FAMILIES, OTHERS, VOCAB, save_tiny

pytestmark = pytest.mark.usefixtures("one_torch_thread")

NUM_ADAPTERS = 16
LAYERS = 3
PRODUCTS = frozenset({"mm", "addmm", "linear", "_linear_pointwise", "base_linear"})
"""Operations that multiply with a base weight; those of adapters are batched ("bmm") or kernels of their own."""


class CountingModel:
    """A model that counts the products with base weights of each forward pass."""

    def __init__(self, model: Any, calls_of_packed: Counter[str]) -> None:
        self._model = model
        self._calls = calls_of_packed
        self.of_step: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, batch: Any) -> Any:
        self._calls.clear()
        with OpCounter() as counter:
            logits = self._model.forward(batch)
        counts = counter.ops + self._calls
        self.of_step.append(sum(n for op, n in counts.items() if op.split(".")[1] in PRODUCTS))
        return logits


@pytest.fixture
def calls_of_packed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Calls of numba's own products, of vectors and of AMX's tiles, which torch doesn't see."""
    numba_dense = pytest.importorskip("loraplex.kernels.linear.numba_dense")
    numba_dense_tiles = pytest.importorskip("loraplex.kernels.linear.numba_dense_tiles")
    calls: Counter[str] = Counter()
    for products in (numba_dense._multiply, numba_dense_tiles._multiply):

        def counted(*arguments: Any, run: Any = products.run) -> None:
            calls["numba.base_linear"] += 1
            run(*arguments)

        monkeypatch.setattr(products, "run", counted)
    # Repeated layers make their recorded calls without these functions; test_recorded_layers compares the two.
    monkeypatch.setattr("loraplex.kernels.numba_layers.MAX_ROWS", 0)
    return calls


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[Path]]]:
    """A base of each decoder with adapters on all linears, each with weights of its own."""
    made = {}
    for family, config in (("llama", FAMILIES["llama"]), ("granite", OTHERS["granite"])):
        root = tmp_path_factory.mktemp(family)
        base = save_tiny(root / "base", config)
        first = save_adapters(base, root, {"all": ADAPTERS["all"]})["all"]
        adapters = []
        for number in range(NUM_ADAPTERS):
            folder = root / f"a{number}"
            shutil.copytree(first, folder)
            tensors = load_file(folder / "adapter_model.safetensors")
            scaled = {name: tensor * (1 + number / 100) for name, tensor in tensors.items()}
            save_file(scaled, folder / "adapter_model.safetensors")
            adapters.append(folder)
        made[family] = base, adapters
    return made


@pytest.fixture
def engines() -> Iterator[list[LocalEngine]]:
    made: list[LocalEngine] = []
    yield made
    for engine in made:
        engine.close()


@pytest.mark.parametrize(
    ("family", "kernels", "dtype", "linears_of_layer"),
    [
        ("llama", "torch", "float32", 4),
        ("llama", "torch", "bfloat16", 4),
        ("llama", "numba", "bfloat16", 4),
        ("granite", "torch", "float32", 7),
    ],
)
def test_products_of_a_step_do_not_depend_on_the_number_of_adapters(
    checkpoints: dict[str, tuple[Path, list[Path]]],
    engines: list[LocalEngine],
    calls_of_packed: Counter[str],
    tmp_path: Path,
    family: str,
    kernels: str,
    dtype: str,
    linears_of_layer: int,
) -> None:
    base, folders = checkpoints[family]
    models: list[CountingModel] = []

    def wrap(model: Any) -> Any:
        models.append(CountingModel(model, calls_of_packed))
        return models[0]

    engine = LocalEngine(
        base, tmp_path, wrap_model=wrap, kernels=kernels, dtype=dtype, max_num_seqs=20, max_model_len=64,
        max_num_batched_tokens=64, kv_cache_memory=2 << 20, adapter_memory=8 << 20, adapter_cpu_memory=8 << 20,
        num_threads=1,
    )  # fmt: skip
    engines.append(engine)
    adapters_of_step: list[int] = []
    submit = engine.built.runner.submit

    def noting_submit(plan: Any) -> Any:
        adapters_of_step.append(len({item.slot for item in plan.scheduled if item.slot >= 0}))
        return submit(plan)

    engine.built.runner.submit = noting_submit  # type: ignore[method-assign]
    refs = [engine.publish(folder, name=folder.name) for folder in folders]
    rng = random.Random(1)
    for ref in refs:  # loads take as long as they take: from here on all are there
        engine.add(ref.name, [5], ref, max_tokens=1)
    engine.run()
    for num_adapters in (1, 4, NUM_ADAPTERS):
        models[0].of_step.clear()
        adapters_of_step.clear()
        for number in range(NUM_ADAPTERS + 2):
            prompt = [rng.randrange(3, VOCAB) for _ in range(5)]
            ref = refs[number % num_adapters] if number < NUM_ADAPTERS else None
            engine.add(f"{num_adapters}/{number}", prompt, ref, max_tokens=3)
        engine.run()
        assert max(adapters_of_step) == num_adapters, "the adapters did not share a step"
        assert set(models[0].of_step) == {linears_of_layer * LAYERS + 1}
