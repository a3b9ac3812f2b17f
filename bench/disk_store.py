"""Prefixes on the disk: how fast blocks are written and read by one thread, and how long a start takes.

    python -m bench.disk_store [--directory DIR] [--blocks 100000]

Blocks have the size of SmolLM2's in bfloat16. Figures are of the thread's own processor time, and of the clock; nothing
is synchronised, so files that were just written come from memory. A start finds `--blocks` small blocks of 500 owners.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from loraplex.engine.kv.disk_store import DiskStore
from loraplex.engine.types import BlockKey

BLOCK = 368_640
COUNT = 500
OWNERS = 500


def print_rate(what: str, done: Callable[[], bool]) -> None:
    """`done`: COUNT blocks."""
    begun, clock = time.thread_time(), time.perf_counter()
    assert done()
    taken = time.thread_time() - begun, time.perf_counter() - clock
    print(
        f"{what}: {COUNT * BLOCK / taken[0] / 1e9:.2f} GB/s, by the clock {COUNT * BLOCK / taken[1] / 1e9:.2f}"
    )


def print_rates(work: Path) -> None:
    payload = random.Random(3).randbytes(BLOCK)
    for name in ("sha256", "blake2b"):
        print_rate(name, lambda: all(hashlib.new(name, payload).digest() for _ in range(COUNT)))  # noqa: B023
    keys: list[BlockKey] = [(("t", "d"), number.to_bytes(32, "little")) for number in range(COUNT)]
    for secret in (None, b"secret"):
        store = DiskStore(
            work / f"{secret is None}", max_bytes=1 << 30, block_bytes=BLOCK, build=b"", secret=secret
        )
        how = "plain" if secret is None else "encrypted"
        print_rate(
            f"written, {how}", lambda store=store: all(store.write(key, memoryview(payload)) for key in keys)
        )
        print_rate(f"read, {how}", lambda store=store: all(store.read(key) == payload for key in keys))
        store.close()


def print_starts(work: Path, blocks: int) -> None:
    for turn in range(2):
        begun, clock = time.thread_time(), time.perf_counter()
        store = DiskStore(work, max_bytes=1 << 40, block_bytes=64, build=b"", secret=None)
        taken = time.thread_time() - begun, time.perf_counter() - clock
        print(
            f"a start that finds {store.counts.blocks} blocks: {taken[0]:.2f} s, by the clock {taken[1]:.2f}"
        )
        for number in range(0 if turn else blocks):
            key = (f"t{number % OWNERS}", "d"), number.to_bytes(32, "little")
            assert store.write(key, memoryview(bytes(64)))
        store.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--blocks", type=int, default=100_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.directory) as work:
        print_rates(Path(work) / "rates")
        print_starts(Path(work) / "starts", given.blocks)


if __name__ == "__main__":
    main()
