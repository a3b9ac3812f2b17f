"""Prefixes of models whose layers see windows, or short convolutions, come back from host memory and from a disk with
the very bits."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.engine import device_parts
from loraplex.engine.kv.cache import KVCache, block_bytes
from loraplex.engine.kv.host_blocks import HostBlocks
from loraplex.engine.kv.layers import CacheKind, layer_groups
from loraplex.engine.kv.prefix_keys import of_group
from loraplex.engine.types import BlockCopy, BlockKey
from support.adapters.tiny_adapters import ADAPTERS, save_adapters
from support.engine.same_bits import Asked, Question, questions_of_owners
from support.models.checkpoints import FAMILIES, VOCAB, save_tiny
from support.models.loading import plan_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")
MODELS = {
    "gemma3": FAMILIES["gemma3"] | {"sliding_window": 40},
    "gpt_oss": FAMILIES["gpt_oss"],
    "mistral-window": FAMILIES["mistral-window"] | {"sliding_window": 70},
    "lfm2": FAMILIES["lfm2"],
}
MakeAsked = Callable[..., Asked]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Path]]]:
    """Checkpoints, each with adapters of two tenants; made when they are first asked for."""
    folder = tmp_path_factory.mktemp("windows")

    class Made(dict[str, tuple[Path, dict[str, Path]]]):
        def __missing__(self, name: str) -> tuple[Path, dict[str, Path]]:
            base = save_tiny(folder / name, MODELS[name] | {"max_position_embeddings": 2048})
            chosen = {each: ADAPTERS[each] for each in ("all", "some")}
            self[name] = base, save_adapters(base, folder / f"{name}-adapters", chosen)
            return self[name]

    return Made()


@pytest.fixture
def make_asked(bases: dict[str, tuple[Path, dict[str, Path]]], tmp_path: Path) -> Iterator[MakeAsked]:
    """An engine. One on a disk closes those before it."""
    made: list[Asked] = []
    numbers = iter(range(9))

    def make(
        name: str,
        kv_cache_dtype: str,
        device_blocks: int,
        host_blocks: int,
        *,
        disk: bool = False,
        **more: Any,
    ) -> Asked:
        base, adapters = bases[name]
        dtype = "bfloat16" if kv_cache_dtype == "bfloat16" else "float32"
        kept = torch.int8 if kv_cache_dtype == "int8" else getattr(torch, dtype)
        one = block_bytes(plan_model(base).shape.caches, kept)
        while disk and made:
            made.pop().close()
        asked = Asked(
            base, tmp_path / str(next(numbers)), adapters, kernels="numba", dtype=dtype,
            kv_cache_dtype="int8" if kv_cache_dtype == "int8" else "auto",
            kv_cache_memory=device_blocks * one, kv_host_memory=host_blocks * one, adapter_memory=8 << 20,
            adapter_cpu_memory=8 << 20, max_num_seqs=6, num_threads=1, max_model_len=240,
            kv_disk_dir=str(tmp_path / "disk") if disk else None, kv_disk_bytes=8000 * one if disk else 0, **more,
        )  # fmt: skip
        made.append(asked)
        return asked

    yield make
    while made:
        made.pop().close()


@pytest.mark.parametrize(
    ("name", "kv_cache_dtype", "lookahead"),
    [
        ("gemma3", "auto", 0), ("gemma3", "auto", 1), ("gemma3", "int8", 1), ("gemma3", "bfloat16", 0),
        ("gpt_oss", "auto", 1), ("mistral-window", "auto", 0), ("lfm2", "auto", 0), ("lfm2", "bfloat16", 1),
    ],
)  # fmt: skip
def test_restored_prefixes_have_the_same_bits(
    make_asked: MakeAsked, name: str, kv_cache_dtype: str, lookahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_parts, "_MOST_RESTORED", 1)
    rng = random.Random(f"{name} {kv_cache_dtype} {lookahead}")
    lone = make_asked(name, kv_cache_dtype, 900, 0)
    expected = lone.each_alone(questions_of_owners(rng, 12))
    crowd = make_asked(name, kv_cache_dtype, 50, 3000, lookahead=lookahead)
    assert crowd.wrong_among_neighbours(expected, rng, 120) == []
    stats = crowd.engine.core.stats()
    assert stats.kv_host.restored > 50
    assert stats.prefix_cache_hits > 16 * 50


@pytest.mark.parametrize(
    ("name", "kv_cache_dtype"), [("gemma3", "auto"), ("gemma3", "int8"), ("lfm2", "auto")]
)
def test_prefixes_have_the_same_bits_after_a_restart(
    make_asked: MakeAsked, name: str, kv_cache_dtype: str
) -> None:
    rng = random.Random(7)
    asked = [
        Question(tuple(rng.randrange(3, VOCAB) for _ in range(130)), adapter, {"max_tokens": 4})
        for adapter in (None, "all", "some", None)
    ]
    first = make_asked(name, kv_cache_dtype, 400, 400, disk=True)
    expected = {}
    for number, one in enumerate(asked):
        expected[one] = first.alone(f"{number}a", one)
        first.alone(f"{number}b", one)  # what a second request finds goes to the disk
    second = make_asked(name, kv_cache_dtype, 400, 400, disk=True)
    for number, one in enumerate(asked):
        assert second.alone(str(number), one) == expected[one]
    assert second.engine.core.stats().prefix_cache_hits == 128 * len(asked)
    assert second.engine.core.stats().kv_disk.restored > 8 * len(asked)


def test_a_block_that_its_layers_do_not_fill_brings_nobody_elses_bytes_to_the_disk() -> None:
    """The second group has a layer where the first has two, and that is half as wide."""
    caches = (CacheKind(2, 16), CacheKind(2, 16), CacheKind(1, 16, window=20))
    kv = KVCache(caches, 4, torch.float32, torch.device("cpu"))
    assert [group.window for group in layer_groups(caches)] == [None, None, 20]
    kv.tensor.fill_(7)
    blocks, kept = HostBlocks(kv, 3, lambda: None), dict[BlockKey, bytes]()
    blocks.keep = lambda key, payload: kept.update({key: bytes(payload)})
    names = [of_group((("acme", None), bytes(32)), group) for group in (0, 2)]
    blocks.copy([BlockCopy(1, slot, to_host=True, key=name) for slot, name in enumerate(names)])
    size = len(kept[names[0]])
    assert kept[names[0]] == bytes(kv.tensor[: size // 4].view(torch.uint8).numpy())
    assert any(kept[names[1]][: size // 2])
    assert not any(kept[names[1]][size // 2 :])
