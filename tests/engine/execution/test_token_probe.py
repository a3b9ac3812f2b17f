"""What adapters change by token, measured by a real engine: sound ones are equal to the reference, and planted faults
are refused by their numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from loraplex.adapters.numerics import TOLERANCE, NumbersVerdict
from support.adapters.loader_faults import (
    Plant,
    rows_of_the_head_ignored,
    scaling,
    token_ids_off_by_one,
    token_tiles_off_by_one,
)
from support.adapters.tiny_adapters import BY_TOKEN, save_adapters
from support.adapters.whole_reads import check_numbers
from support.engine.local_engine import LocalEngine
from support.models.checkpoints import FAMILIES, save_tiny

pytestmark = pytest.mark.usefixtures("one_torch_thread")

Models = dict[str, tuple[Path, dict[str, Path]]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    made = {}
    for family in ("llama-tied", "gemma2-no-caps"):
        root = tmp_path_factory.mktemp(family)
        base = save_tiny(root / "base", FAMILIES[family])
        made[family] = base, save_adapters(base, root, BY_TOKEN)
    return made


@pytest.fixture
def verdicts(models: Models, tmp_path: Path) -> Callable[..., dict[str, NumbersVerdict]]:
    def measure(family: str, names: list[str], kernels: str, dtype: str) -> dict[str, NumbersVerdict]:
        base, adapters = models[family]
        engine = LocalEngine(
            base,
            tmp_path,
            kernels=kernels,
            dtype=dtype,
            max_model_len=100,
            max_num_seqs=8,
            max_num_batched_tokens=40,
            kv_cache_memory=4 << 20,
            adapter_memory=16 << 20,
            adapter_cpu_memory=16 << 20,
            num_threads=1,
        )
        found = {}
        for name in names:
            folder = adapters[name]
            engine.measure(name, engine.publish(folder, name=name))
            engine.run()
            files = (folder / "adapter_config.json", folder / "adapter_model.safetensors")
            found[name] = check_numbers(*files, engine.base, engine.outputs(name))
        engine.close()
        return found

    return measure


@pytest.mark.parametrize(
    ("kernels", "dtype"),
    [
        ("numba", "bfloat16"),
        ("torch", "float16"),
        ("numba", "float32"),
    ],
)
@pytest.mark.parametrize("family", ["llama-tied", "gemma2-no-caps"])
def test_sound_adapters_are_equal_to_the_reference(
    family: str, kernels: str, dtype: str, verdicts: Callable[..., dict[str, NumbersVerdict]]
) -> None:
    for name, found in verdicts(family, list(BY_TOKEN), kernels, dtype).items():
        assert found.ok, f"{name}: {found.message}"
        assert found.report["max"] < TOLERANCE / 2, name
        limit = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
        assert found.report["relative"]["max"] < limit, name


FAULTS: dict[str, tuple[Plant, str, str]] = {
    "scaling of the embedding": (
        scaling(1.02, "embed_tokens"),
        "embedding-rslora-and-layers",
        "model.embed_tokens",
    ),
    "A a granule late": (token_tiles_off_by_one(0), "embedding", "model.embed_tokens"),
    "B a granule late": (token_tiles_off_by_one(1), "embedding-and-head", "model.embed_tokens"),
    "rows a granule late": (token_tiles_off_by_one(2), "rows-of-embedding", "model.embed_tokens"),
    "a row of another token": (token_ids_off_by_one(77), "rows", "model.embed_tokens"),
    "a row of another token of the embedding": (
        token_ids_off_by_one(100),
        "rows-of-embedding",
        "model.embed_tokens",
    ),
    "a column of another token": (token_ids_off_by_one(120), "rows-of-head", "lm_head"),
    "the head keeps the base's rows": (rows_of_the_head_ignored, "rows", "embed_tokens"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_the_loader_are_refused_by_their_numbers(
    fault: str, verdicts: Callable[..., dict[str, NumbersVerdict]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant, name, where = FAULTS[fault]
    plant(monkeypatch)
    (found,) = verdicts("llama-tied", [name], "numba", "bfloat16").values()
    assert found.report["verdict"] == "mismatch"
    assert found.report["max"] > 2 * TOLERANCE
    assert where in found.report["worst_module"]
