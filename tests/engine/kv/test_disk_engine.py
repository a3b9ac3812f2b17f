"""Prefixes outlive an engine on a real disk with the very bits, and an engine that is killed leaves nothing wrong."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import support
from loraplex.engine.build import build_engine
from loraplex.engine.config import EngineConfig
from loraplex.engine.execution.kv_cache import KVHostRefused
from loraplex.engine.kv.cache import block_bytes
from loraplex.engine.kv.disk_files import DiskFiles, DiskStoreError
from loraplex.engine.kv.layers import CacheKind
from support.adapters.tiny_adapters import ADAPTERS, save_adapters
from support.disk_child import make_engine, prompts
from support.engine.local_engine import LocalEngine
from support.engine.same_bits import Asked, Question
from support.models.checkpoints import VOCAB, save_tiny

pytestmark = pytest.mark.usefixtures("one_torch_thread")
LLAMA = {
    "model_type": "llama", "hidden_size": 96, "num_attention_heads": 6, "head_dim": 16,
    "max_position_embeddings": 2048,
}  # fmt: skip
MakeAsked = Callable[..., Asked]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("disk") / "base", LLAMA)


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return save_adapters(base, folder, {name: ADAPTERS[name] for name in ("all", "some")})


@pytest.fixture
def make_asked(base: Path, adapters: dict[str, Path], tmp_path: Path) -> Iterator[MakeAsked]:
    """An engine on a disk, `tmp_path` / "disk" unless another one is given. One that is made closes those before it."""
    numbers, made = itertools.count(), list[Asked]()

    def make(
        kv_cache_dtype: str = "auto", *, disk: Path | None = tmp_path / "disk", **settings: Any
    ) -> Asked:
        one = block_bytes((CacheKind(2, 16),) * 3, torch.int8 if kv_cache_dtype == "int8" else torch.float32)
        while made:
            made.pop().close()
        asked = Asked(
            base, tmp_path / str(next(numbers)), adapters,
            **{
                "kernels": "numba", "dtype": "float32", "kv_cache_dtype": kv_cache_dtype,
                "kv_cache_memory": 64 * one, "kv_host_memory": 64 * one, "adapter_memory": 8 << 20,
                "adapter_cpu_memory": 8 << 20, "max_num_seqs": 6, "num_threads": 1, "max_model_len": 240,
                "kv_disk_dir": None if disk is None else str(disk), "kv_disk_bytes": 1000 * one,
            } | settings,
        )  # fmt: skip
        made.append(asked)
        return asked

    yield make
    while made:
        made.pop().close()


def question(adapter: str | None, seed: int = 1, length: int = 130) -> Question:
    rng = random.Random(seed)
    return Question(tuple(rng.randrange(3, VOCAB) for _ in range(length)), adapter, {"max_tokens": 4})


def ask_twice(asked: Asked, *questions: Question) -> None:
    """So that their prompts are on the disk when the engine has ended."""
    for number, one in enumerate(questions):
        for again in "ab":
            asked.alone(f"{number}{again}", one)


def restored(asked: Asked) -> int:
    return asked.engine.core.stats().kv_disk.restored


@pytest.mark.parametrize("secret", [None, b"0123456789abcdef"], ids=["plain", "encrypted"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_prefixes_have_the_same_bits_after_a_restart(
    make_asked: MakeAsked, tmp_path: Path, kv_cache_dtype: str, lookahead: int, secret: bytes | None
) -> None:
    key_file = tmp_path / "key"
    if secret is not None:
        key_file.write_bytes(secret)
    settings = {"lookahead": lookahead, "kv_disk_key_file": None if secret is None else str(key_file)}
    asked = [question(adapter, seed) for seed, adapter in enumerate((None, "all", "some", None))]
    lone = make_asked(kv_cache_dtype, disk=None)
    expected = lone.each_alone(asked)
    ask_twice(make_asked(kv_cache_dtype, **settings), *asked)
    again = make_asked(kv_cache_dtype, **settings)
    for number, one in enumerate(asked):
        assert again.alone(str(number), one) == expected[one]
    assert restored(again) == 8 * len(asked)


def test_what_the_pool_forgets_is_on_the_disk_too(make_asked: MakeAsked) -> None:
    one = block_bytes((CacheKind(2, 16),) * 3, torch.float32)
    first = make_asked(kv_cache_memory=16 * one)
    asked = [question(None, seed) for seed in range(4)]
    for number, each in enumerate(asked):
        first.alone(str(number), each)
    again = make_asked()
    again.alone("first", asked[0])
    assert restored(again) == 8


def test_nobody_else_and_no_other_build_finds_them(make_asked: MakeAsked, base: Path, tmp_path: Path) -> None:
    ask_twice(make_asked(), question("all"))
    other = make_asked()
    for adapter in (None, "some"):  # another version, and another tenant's
        other.alone(str(adapter), question(adapter))
    assert restored(other) == 0
    int8 = make_asked("int8")
    int8.alone("int8", question("all"))
    assert restored(int8) == 0
    changed = save_tiny(tmp_path / "changed", LLAMA | {"intermediate_size": 160})
    on_base = make_asked()
    ask_twice(on_base, question(None))
    on_base.close()
    engine = make_engine(changed, tmp_path / "work", tmp_path / "disk", "auto")
    engine.add("other base", question(None).prompt, max_tokens=1)
    engine.run()
    assert engine.core.stats().kv_disk.restored == 0
    engine.close()


def test_what_was_erased_is_not_there_after_a_restart(make_asked: MakeAsked) -> None:
    first = make_asked()
    ask_twice(first, question("all"), question(None))
    first.engine.core.drop(first._refs["all"].digest)
    again = make_asked()
    assert {digest for _, digest in again.engine.core.prefix_owners()} == {None}
    again.alone("erased", question("all"))
    assert restored(again) == 0
    again.alone("kept", question(None))
    assert restored(again) == 8
    again.engine.core.forget_tenant("acme")
    assert not make_asked().engine.core.prefix_owners()


def test_a_damaged_file_is_computed(make_asked: MakeAsked, tmp_path: Path) -> None:
    first = make_asked()
    ask_twice(first, question(None))
    first.close()  # what waits is written
    files = [path for path in (tmp_path / "disk").rglob("*") if path.is_file() and path.stat().st_size > 1000]
    assert len(files) == 8
    for path in files:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    lone = make_asked(disk=None)
    expected = lone.alone("lone", question(None))
    again = make_asked()
    assert again.alone("again", question(None)) == expected
    stats = again.engine.core.stats()
    assert (stats.kv_disk.restored, stats.kv_disk.damaged) == (0, 1)  # none is read behind the first


def test_a_disk_needs_host_memory(base: Path, tmp_path: Path) -> None:
    with pytest.raises(KVHostRefused, match="set --kv-host-memory too"):
        LocalEngine(base, tmp_path, kernels="numba", kv_disk_dir=str(tmp_path), kv_disk_bytes=1 << 20)


def test_a_short_secret_is_refused(base: Path, tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"short")
    with pytest.raises(DiskStoreError, match="has 5 bytes; write 16 random ones or more"):
        LocalEngine(
            base, tmp_path, kernels="numba", kv_host_memory=1 << 20, kv_disk_dir=str(tmp_path / "disk"),
            kv_disk_bytes=1 << 20, kv_disk_key_file=str(tmp_path / "key"),
        )  # fmt: skip


@pytest.mark.parametrize("fault", ["mark", "lock"])
def test_an_engine_serves_without_a_disk_that_fails(
    make_asked: MakeAsked, tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    folder = tmp_path / "disk" / "0"
    folder.mkdir(parents=True)
    if fault == "mark":
        (folder / "mark").touch()  # by a power loss
    else:
        (folder / "lock").mkdir()
    engine = make_asked()
    assert len(engine.alone("one", question(None)).tokens) == 4
    assert engine.engine.core.stats().num_kv_disks_off == 1
    told = [
        line.message for line in caplog.records if line.levelname == "WARNING" and "--kv-disk" in line.message
    ]
    assert len(told) == 1
    assert f"{folder} cannot be used" in told[0]
    assert "until its next start the engine keeps no prefixes on a disk" in told[0]


def test_a_wrong_disk_is_told_before_the_model_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "key").write_bytes(b"0123456789abcdef")
    DiskFiles(tmp_path / "disk" / "0", None).close()
    config = EngineConfig(
        model_path=str(tmp_path / "none"), artifact_dir=str(tmp_path / "artifacts"), device="cpu",
        kv_host_memory=1 << 20, kv_disk_dir=str(tmp_path / "file"), kv_disk_bytes=1 << 20,
    )  # fmt: skip
    with pytest.raises(DiskStoreError, match="it is no directory"):
        build_engine(config, lambda: None)
    sealed = replace(config, kv_disk_dir=str(tmp_path / "disk"), kv_disk_key_file=str(tmp_path / "key"))
    with pytest.raises(DiskStoreError, match="its files are not encrypted"):
        build_engine(sealed, lambda: None)


def test_an_engine_takes_its_own_folder_or_one_that_is_free(make_asked: MakeAsked, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    make_asked(kv_disk_number=2)
    assert {path.name for path in disk.iterdir()} == {"2"}
    make_asked(disk=None)
    other = DiskFiles(disk / "2", None)
    ask_twice(make_asked(kv_disk_number=2), question(None))
    other.close()
    assert {path.name for path in disk.iterdir()} == {"0", "2"}
    again = make_asked()
    again.alone("again", question(None))
    assert restored(again) == 8


def killed(base: Path, tmp_path: Path, seed: int, rng: random.Random) -> list[list[Any]]:
    """Kill an engine after some answers. Returns those, [question, tokens, cached tokens]."""
    tests = str(Path(support.__path__[0]).parent)
    child = subprocess.Popen(
        [
            sys.executable, "-m", "support.disk_child", base, tmp_path / "work", tmp_path / "disk", "auto",
            str(seed),
        ],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": tests},
    )  # fmt: skip
    assert child.stdout is not None
    lines = list(itertools.islice(child.stdout, rng.randint(8, 60)))
    child.kill()
    child.communicate()
    return [json.loads(line) for line in lines]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "num_kills", [2, pytest.param(200, marks=[pytest.mark.soak, pytest.mark.timeout(0)])]
)
def test_a_killed_engine_leaves_nothing_wrong(base: Path, tmp_path: Path, num_kills: int) -> None:
    engine = make_engine(base, tmp_path / "lone", None, "auto")
    expected = []
    for number, prompt in enumerate(prompts(100)):
        engine.add(str(number), prompt, max_tokens=4)
        engine.run()
        expected.append(engine.tokens(str(number)))
    engine.close()
    rng, warm = random.Random(3), 0
    for seed in range(num_kills):
        answers = killed(base, tmp_path, seed, rng)
        assert len(answers) >= 8
        assert all(tokens == expected[which] for which, tokens, _ in answers)
        first = {which: num_cached for which, _, num_cached in reversed(answers)}
        warm += sum(seed > 0 and num_cached > 0 for num_cached in first.values())
    assert warm > 0
