"""Fuzzing: targets, mutations, and a loop that runs where no coverage-guided fuzzer is installed.

A target takes bytes and raises where a promise breaks. `fuzz` mutates a corpus and bounds what each input may cost:
processor time (a hang is a failure, however busy the machine) and memory. `main` is for the `fuzz_*.py` scripts: under
atheris where it is installed, else with `fuzz`.
"""

from __future__ import annotations

import argparse
import random
import signal
import struct
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

CPU_S = 10.0
"""Processor time that one input may take; the largest take some milliseconds."""
NUMBERS = (0, 1, 7, 8, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, (1 << 63) - 1, (1 << 64) - 1)
WORDS = (
    b"../",
    b"/",
    b"\0",
    b"\\",
    b"adapter_config.json",
    b"adapter_model.safetensors",
    b"PK\x03\x04",
    b"PK\x01\x02",
    b"PK\x05\x06",
    b"PK\x06\x06",
    b"PK\x06\x07",
    b"ustar\x0000",
    b"\x1f\x8b\x08",
    b"__metadata__",
    b'"data_offsets":[0,18446744073709551615]',
    b'"shape":[9223372036854775807,9223372036854775807]',
    b"[[[[[[[[",
    b'{"a":',
    b"1e999999",
    b"NaN",
    b"\\ud800",
    b"\xff\xfe",
    b"17 path=../x\n",
    b"9999999999 size=",
)


class Hang(Exception):
    """An input took more processor time than any may."""


@dataclass(frozen=True)
class Target:
    """`run` raises for an input that breaks a promise; `memory` bounds what Python holds meanwhile, in bytes."""

    name: str
    corpus: Sequence[bytes]
    run: Callable[[bytes], object]
    memory: int
    max_bytes: int = 1 << 20


def mutate(data: bytes, corpus: Sequence[bytes], chance: random.Random, max_bytes: int) -> bytes:
    """`data` with one to eight changes, as AFL makes them: bits, bytes, numbers, words, blocks, splices."""
    out = bytearray(data)
    for _ in range(1 << chance.randrange(4)):
        at = chance.randrange(len(out) + 1)
        span = min(len(out) - at, 1 << chance.randrange(12))
        kind = chance.randrange(9)
        if kind == 0 and at < len(out):
            out[at] ^= 1 << chance.randrange(8)
        elif kind == 1 and at < len(out):
            out[at] = chance.randrange(256)
        elif kind == 2:
            size, order = chance.choice("BHIQ"), chance.choice("<>")
            number = chance.choice(NUMBERS) & ((1 << 8 * struct.calcsize(size)) - 1)
            packed = struct.pack(order + size, number)
            out[at : at + len(packed)] = packed
        elif kind == 3:
            word = chance.choice(WORDS)
            out[at : at + (len(word) if chance.random() < 0.5 else 0)] = word
        elif kind == 4:
            del out[at : at + span]
        elif kind == 5:
            out[at:at] = out[at : at + span] * chance.randrange(1, 4)
        elif kind == 6:
            out[at:at] = bytes([chance.choice((0, 32, 48, 255))]) * span
        elif kind == 7:
            other = chance.choice(corpus)
            out[at:] = other[chance.randrange(len(other) + 1) :]
        else:
            to = chance.randrange(len(out) + 1)
            out[to : to + span] = out[at : at + span]
    return bytes(out[:max_bytes])


def fuzz(target: Target, *, seed: int, inputs: int | None = None, seconds: float | None = None) -> int:
    """How many inputs passed. AssertionError names the first that did not, with its bytes in hex."""
    chance = random.Random(seed)
    end = None if seconds is None else time.monotonic() + seconds
    count = 0
    for data in _inputs(target, chance):
        if (inputs is not None and count >= inputs) or (end is not None and time.monotonic() > end):
            return count
        try:
            with _bounded(target.memory):
                target.run(data)
        except BaseException as error:
            shown = data[:2000].hex() + ("…" if len(data) > 2000 else "")
            raise AssertionError(
                f"{target.name}, seed {seed}, input {count}: {error!r} for {shown}"
            ) from error
        count += 1
    return count


def _inputs(target: Target, chance: random.Random) -> Iterator[bytes]:
    yield from target.corpus
    while True:
        yield mutate(chance.choice(target.corpus), target.corpus, chance, target.max_bytes)


@contextmanager
def _bounded(memory: int) -> Iterator[None]:
    def on_time(_: int, frame: FrameType | None) -> None:
        raise Hang(f"more than {CPU_S:g} s of processor time, in {frame}")

    before = signal.signal(signal.SIGPROF, on_time)
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    tracing = tracemalloc.is_tracing()
    if tracing:
        tracemalloc.reset_peak()
        held = tracemalloc.get_traced_memory()[0]
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    if tracing:
        peak = tracemalloc.get_traced_memory()[1] - held
        assert peak <= memory, f"{peak} bytes held, at most {memory} may be"


def main(make: Callable[[Path], Target], directory: Path) -> None:
    """`directory` takes the target's files. atheris gets the whole command line where it is installed."""
    target = make(directory)
    try:
        import atheris  # type: ignore[import-not-found]
    except ImportError:
        parser = argparse.ArgumentParser(description=f"Fuzz {target.name}; atheris is not installed.")
        parser.add_argument("--seconds", type=float, default=60.0)
        parser.add_argument("--seed", type=int, default=0)
        given = parser.parse_args()
        tracemalloc.start()
        count = fuzz(target, seed=given.seed, seconds=given.seconds)
        print(f"{target.name}: {count} inputs, nothing found")
        return
    seeds = directory / "corpus"
    seeds.mkdir(exist_ok=True)
    for number, data in enumerate(target.corpus):
        (seeds / str(number)).write_bytes(data)
    run: Any = target.run
    atheris.instrument_all()
    atheris.Setup([*sys.argv, str(seeds)], run)
    atheris.Fuzz()
