"""What the first use of a cold adapter costs a processor, from its stored files to the arena.

    PYTHONPATH=tests python -m bench.adapters.adapter_load MODEL [--rank 16] [--count 16] [--stored F32]
        [--dtype bfloat16]

MODEL is the directory of SmolLM2-135M-Instruct. `--count` adapters of `--rank` on all seven sites, `--stored` in F32 as
PEFT saves them or in BF16, go through the engine's transport one after another: `load` (disk to host memory, by a
loader's thread) and `copy` (host memory to pages that nobody has used yet). Then each is loaded `again`, which writes
its image to the disk, and from that `image`. Figures are in milliseconds of the processor's time, the median and the
least, which holds on a busy machine too.

Then the parts by themselves, in this thread. `hash` is the least that a load can take: all stored bytes are read and
hashed. A load takes less than its parts together by what it does in one go, and what it remembers.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from loraplex.adapters.admission.base_model import load_base_spec
from loraplex.adapters.admission.inspection import inspect_adapter
from loraplex.adapters.cache.residency import Ticket
from loraplex.adapters.device.arena import AdapterArena
from loraplex.adapters.device.host_image import build_image
from loraplex.adapters.device.host_slab import HostSlab
from loraplex.adapters.device.image_files import ImageFiles
from loraplex.adapters.device.layout import ArenaLayout
from loraplex.adapters.device.transport import ThreadedTransport
from loraplex.adapters.ref import AdapterRef
from loraplex.adapters.spec import AdapterSpec
from loraplex.adapters.store.artifact_store import ArtifactStore
from loraplex.adapters.store.files import digest_upload
from loraplex.kernels.backend import resolve_kernels
from loraplex.kernels.lora.site_groups import SiteGroup
from support.adapters.drafts import ALL_SITES
from support.servers.live_server import write_real_adapter

LAYERS, HIDDEN, KEY_VALUE, INNER = 30, 576, 192, 1536
GROUPS = (
    SiteGroup("qkv", ("q_proj", "k_proj", "v_proj"), HIDDEN, (HIDDEN, KEY_VALUE, KEY_VALUE)),
    SiteGroup("o", ("o_proj",), HIDDEN, (HIDDEN,)),
    SiteGroup("gate_up", ("gate_proj", "up_proj"), HIDDEN, (INNER, INNER)),
    SiteGroup("down", ("down_proj",), INNER, (HIDDEN,)),
)
T = TypeVar("T")


class Stopwatch:
    """Milliseconds of the processor's time, by part."""

    def __init__(self) -> None:
        self._taken: dict[str, list[float]] = defaultdict(list)

    def time(self, part: str, work: Callable[[], T]) -> T:
        begin = time.process_time()
        result = work()
        self._taken[part].append((time.process_time() - begin) * 1e3)
        return result

    def print(self) -> None:
        for part, taken in self._taken.items():
            print(f"{part:10} {statistics.median(taken):8.2f} {min(taken):8.2f}")


def publish(store: ArtifactStore, folder: Path, options: argparse.Namespace, seed: int) -> str:
    write_real_adapter(
        folder, rank=options.rank, lora_alpha=2 * options.rank, targets=ALL_SITES, dtype=options.stored, seed=seed
    )  # fmt: skip
    with store.begin_staging() as staging:
        (folder / staging.config_path.name).rename(staging.config_path)
        (folder / staging.tensors_path.name).rename(staging.tensors_path)
        digest = digest_upload(staging.config_path, staging.tensors_path)
        store.commit(staging, digest)
    return digest


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--stored", default="F32")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder), options)


def run(root: Path, options: argparse.Namespace) -> None:
    base, store = load_base_spec(options.model), ArtifactStore(root / "store")
    digests = [publish(store, root / f"a{seed}", options, seed) for seed in range(options.count)]
    layout = ArenaLayout(GROUPS, LAYERS, getattr(torch, options.dtype), max_rank=max(64, options.rank))

    def inspect(digest: str) -> tuple[AdapterSpec, Path]:
        config, tensors = sorted(store.path(digest).iterdir())
        spec = inspect_adapter(
            config, tensors, base, max_rank=max(64, options.rank), deep=False, digest=digest
        )
        return spec, tensors

    per_adapter = build_image(*inspect(digests[0]), layout).num_pages
    num_pages = 2 * per_adapter * options.count
    arena = AdapterArena(layout, num_pages, 2 * options.count, resolve_kernels("auto", torch.device("cpu")))
    pages = iter([tuple(range(n, n + per_adapter)) for n in range(0, num_pages, per_adapter)])
    woken = threading.Semaphore(0)
    host = HostSlab(2 * per_adapter * options.count * layout.page_bytes, layout.page_bytes)
    kept = ImageFiles(root / "images", "bench", 1 << 40)
    transport = ThreadedTransport(store, base, arena, host, wake=woken.release, images=kept)

    def wait(ticket: Ticket[T]) -> T:
        woken.acquire()
        return ticket.value

    clock, images = Stopwatch(), []
    for slot, digest in enumerate(digests):
        ref = AdapterRef("acme", "a", 1, digest, options.rank)
        image = clock.time("load", lambda ref=ref: wait(transport.load(ref)))
        clock.time("copy", lambda image=image, slot=slot: wait(transport.copy(image, slot, next(pages))))
        images.append(image)
    for part in ("again", "image"):
        for digest in digests:
            ref = AdapterRef("acme", "a", 1, digest, options.rank)
            images.append(clock.time(part, lambda ref=ref: wait(transport.load(ref))))
        assert transport.image_writer is not None
        assert transport.image_writer.wait_idle(60)
        while len(images) > len(digests):
            images.pop().release()
    transport.close()
    print(f"{'':10} {'median':>8} {'least':>8}")
    clock.print()

    parts = Stopwatch()
    for slot, digest in enumerate(digests):
        parts.time("hash", lambda digest=digest: store.verify(digest))
        spec, tensors = parts.time("inspect", lambda digest=digest: inspect(digest))
        image = parts.time("lay out", lambda spec=spec, tensors=tensors: build_image(spec, tensors, layout))
        images.append(image)
        where = (image, options.count + slot, next(pages))
        parts.time("write", lambda where=where: arena.write(*where))
    print()
    parts.print()


if __name__ == "__main__":
    main()
