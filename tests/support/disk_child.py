"""An engine on a disk, to be killed at any time: `python -m support.disk_child BASE WORK DISK KV SEED`.

It asks questions without end, and writes each answer as a line of JSON: the question's number, the tokens and the
cached ones of the prompt.
"""

from __future__ import annotations

import json
import random
import sys
from itertools import count
from pathlib import Path

from loraplex.engine.kv.cache import block_bytes
from loraplex.engine.kv.layers import CacheKind
from support.engine.local_engine import LocalEngine

PROMPTS = 6


def prompts(vocab: int) -> list[tuple[int, ...]]:
    rng = random.Random(7)
    return [tuple(rng.randrange(3, vocab) for _ in range(130)) for _ in range(PROMPTS)]


def make_engine(base: Path, work: Path, disk: Path | None, kv_cache_dtype: str) -> LocalEngine:
    import torch

    one = block_bytes((CacheKind(2, 16),) * 3, torch.int8 if kv_cache_dtype == "int8" else torch.float32)
    on_disk = {} if disk is None else {"kv_disk_dir": str(disk), "kv_disk_bytes": 400 * one}
    return LocalEngine(
        base, work, kernels="numba", dtype="float32", kv_cache_dtype=kv_cache_dtype, kv_cache_memory=16 * one,
        kv_host_memory=20 * one, adapter_memory=8 << 20, adapter_cpu_memory=8 << 20, max_num_seqs=4,
        num_threads=1, max_model_len=240, **on_disk,
    )  # fmt: skip


def main() -> None:
    base, work, disk, kv_cache_dtype, seed = sys.argv[1:]
    rng, asked = random.Random(seed), prompts(100)
    engine = make_engine(Path(base), Path(work), Path(disk), kv_cache_dtype)
    for number in count():
        which = rng.randrange(PROMPTS)
        engine.add(str(number), asked[which], max_tokens=4)
        engine.run()
        usage = engine.events[str(number)][-1].usage
        assert usage is not None
        print(json.dumps([which, engine.tokens(str(number)), usage.cached_tokens]), flush=True)


if __name__ == "__main__":
    main()
