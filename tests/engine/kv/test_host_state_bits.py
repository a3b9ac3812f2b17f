"""States that come back from host memory in an engine with its real kernels: the same bits, in bounded memory."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.engine import device_parts
from loraplex.engine.execution.kv_cache import KVMemoryTooSmall
from loraplex.engine.kv import prefix_keys
from loraplex.engine.kv.cache import block_bytes
from loraplex.engine.kv.host_tier import most_of_tenant
from loraplex.engine.kv.states import slot_bytes, state_bytes
from support.adapters.tiny_adapters import ADAPTERS, save_adapters
from support.counted_copies import CountedCopies
from support.engine.local_engine import LocalEngine
from support.engine.same_bits import Asked, questions_of_owners
from support.models.checkpoints import FAMILIES, save_tiny
from support.models.loading import plan_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> CountedCopies:
    return CountedCopies(monkeypatch)


@pytest.fixture(
    scope="module",
    params=["qwen3_5-2", *(pytest.param(f, marks=pytest.mark.soak) for f in ("olmo_hybrid", "nemotron_h"))],
)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family = FAMILIES[request.param] | {"max_position_embeddings": 2048}
    return save_tiny(tmp_path_factory.mktemp(request.param) / "base", family)


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of two tenants."""
    chosen = {name: ADAPTERS[name] for name in ("all", "some")}
    return save_adapters(base, tmp_path_factory.mktemp("adapters"), chosen)


@pytest.fixture
def make_asked(base: Path, adapters: dict[str, Path], tmp_path: Path) -> Iterator[Callable[..., Asked]]:
    made: list[Asked] = []

    def make(
        kv_cache_dtype: str, device_blocks: int, num_snapshots: int, host_blocks: int, **more: Any
    ) -> Asked:
        """`kv_cache_dtype`: auto is float32 here."""
        caches = plan_model(base).shape.caches
        dtype = "bfloat16" if kv_cache_dtype == "bfloat16" else "float32"
        one = block_bytes(caches, torch.int8 if kv_cache_dtype == "int8" else getattr(torch, dtype))
        places, state = 4, state_bytes(caches)
        asked = Asked(
            base, tmp_path / str(len(made)), adapters, kernels="numba", dtype=dtype,
            kv_cache_dtype="int8" if kv_cache_dtype == "int8" else "auto", state_cache=num_snapshots * state,
            kv_cache_memory=device_blocks * one + places * slot_bytes(caches) + num_snapshots * state,
            kv_host_memory=host_blocks * one, adapter_memory=8 << 20, adapter_cpu_memory=8 << 20,
            max_num_seqs=places, num_threads=1, max_model_len=16 * min(device_blocks, 15), **more,
        )  # fmt: skip
        made.append(asked)
        return asked

    yield make
    for asked in made:
        asked.close()


@pytest.mark.parametrize(
    ("kv_cache_dtype", "lookahead"), [("auto", 0), ("auto", 1), ("int8", 1), ("bfloat16", 0)]
)
def test_restored_prefixes_have_the_same_bits(
    make_asked: Callable[..., Asked],
    copied: CountedCopies,
    kv_cache_dtype: str,
    lookahead: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_parts, "_MOST_RESTORED", 1)
    rng = random.Random(f"{kv_cache_dtype} {lookahead}")
    lone = make_asked(kv_cache_dtype, 400, 8, 0)
    expected = lone.each_alone(questions_of_owners(rng, 10))
    assert not copied.blocks
    crowd = make_asked(kv_cache_dtype, 24, 2, 4000, lookahead=lookahead)
    assert crowd.wrong_among_neighbours(expected, rng, 120) == []
    stats = crowd.engine.core.stats()
    assert stats.kv_host.states_restored > 10
    assert copied.blocks[False] == stats.kv_host.restored > 50
    assert copied.parts[False] % stats.kv_host.states_restored == 0
    assert stats.num_kv_host_blocks_used <= stats.num_kv_host_blocks == 4000


def test_an_adapter_left_out_of_the_key_would_show(
    make_asked: Callable[..., Asked], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(1)
    lone = make_asked("auto", 400, 8, 0)
    expected = lone.each_alone(questions_of_owners(rng, 10))
    monkeypatch.setattr(prefix_keys, "of_state", lambda key: ((key[0][0], None), bytes(32) + b"\xff"))
    crowd = make_asked("auto", 24, 2, 4000)
    assert crowd.wrong_among_neighbours(expected, rng, 100)


def test_memory_for_no_state_is_refused(base: Path, tmp_path: Path) -> None:
    caches = plan_model(base).shape.caches
    one = block_bytes(caches, torch.float32)
    with pytest.raises(
        KVMemoryTooSmall, match=r"holds no state of .* beside a block; for 8 of them raise it to"
    ) as refused:
        LocalEngine(base, tmp_path / "a", kernels="numba", dtype="float32", kv_host_memory=3 * one)
    enough = int(str(refused.value).rsplit(" ", 1)[1])
    engine = LocalEngine(base, tmp_path / "b", kernels="numba", dtype="float32", kv_host_memory=enough)
    num_slots = engine.core.stats().num_kv_host_blocks
    assert num_slots * one == enough
    of_tenant, state_slots = most_of_tenant(num_slots), -(-state_bytes(caches) // one)
    assert of_tenant == 8 * (state_slots + 1)  # eight states, with a block each
    engine.close()
