"""What reads uploads, under mutated inputs: only declared refusals, nothing hangs, memory and writes are bounded."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from loraplex.adapters.errors import AdapterRefused
from support.fuzz.fuzzing import Target, fuzz
from support.fuzz.targets import TARGETS


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("name", list(TARGETS))
def test_mutated_inputs(name: str, tmp_path: Path) -> None:
    fuzz(TARGETS[name](tmp_path), seed=1, inputs=250)


@pytest.mark.soak
@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("name", list(TARGETS))
def test_mutated_inputs_long(name: str, tmp_path: Path) -> None:
    began = time.monotonic()
    counts = []
    for seed in range(2):
        directory = tmp_path / str(seed)
        directory.mkdir()
        counts.append(fuzz(TARGETS[name](directory), seed=seed, seconds=15))
    print(f"\n{name}: {sum(counts)} inputs in {time.monotonic() - began:.0f} s, nothing found")


def raises(error: Exception) -> None:
    raise error


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    "planted",
    [
        lambda data: raises(KeyError("an exception nobody declared")) if b"a" not in data else None,
        lambda data: bytearray(64 << 20),
        lambda data: raises(AdapterRefused("bad_archive", "not caught")),
    ],
    ids=["an undeclared exception", "much memory", "a refusal that nobody took"],
)
def test_the_loop_finds_what_is_planted(planted: object) -> None:
    target = Target("planted", [b"a" * 32], planted, 1 << 20)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="planted, seed 3, input"):
        fuzz(target, seed=3, inputs=2000)


def test_the_loop_ends_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support.fuzz.fuzzing.CPU_S", 0.05)

    def endless(_: bytes) -> None:
        while True:
            pass

    with pytest.raises(AssertionError, match="Hang"):
        fuzz(Target("planted", [b"a"], endless, 1 << 20), seed=1, inputs=1)
