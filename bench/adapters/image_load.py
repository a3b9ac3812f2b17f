"""The cost of an adapter of Llama-3.1-8B's shapes, laid out from its upload and read as a laid-out image.

    PYTHONPATH=.:tests python -m bench.adapters.image_load [--rank 16] [--rounds 12]

Milliseconds of the processor's time, the median and the least, in turns in one thread, the files in the page cache. The
upload is parsed and hashed as it is laid out; an inspection of it is left out.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench.gpu.lora import LLAMA_8B
from loraplex.adapters.device.host_image import HostImage, build_image
from loraplex.adapters.device.host_slab import HostSlab
from loraplex.adapters.device.image_files import ImageFiles
from loraplex.adapters.device.layout import ArenaLayout
from loraplex.adapters.spec import AdapterSpec, SiteWeights, TensorSlice

LAYERS = 32


def write_upload(path: Path, rank: int, dtype: torch.dtype) -> AdapterSpec:
    """Random tensors of all sites, as they lie in a file."""
    name = {torch.float32: "F32", torch.bfloat16: "BF16"}[dtype]
    generator = torch.Generator().manual_seed(0)
    sites, sha, end = [], hashlib.sha256(), 0
    with path.open("wb") as file:
        for layer in range(LAYERS):
            for group in LLAMA_8B:
                for site, width in zip(group.sites, group.out_features, strict=True):
                    slices = []
                    for shape in ((rank, group.in_features), (width, rank)):
                        drawn = torch.randn(shape, generator=generator).mul_(0.02).to(dtype)
                        raw = drawn.reshape(-1).view(torch.uint8).numpy().tobytes()
                        file.write(raw)
                        sha.update(raw)
                        slices.append(TensorSlice(name, shape, end, end + len(raw)))
                        end += len(raw)
                    sites.append(SiteWeights(layer, site, rank, 2.0, *slices))
    return AdapterSpec(sha.hexdigest(), rank, tuple(sites), end, ())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    layout = ArenaLayout(LLAMA_8B, LAYERS, torch.bfloat16, max_rank=64)
    for dtype in (torch.float32, torch.bfloat16):
        with tempfile.TemporaryDirectory() as folder:
            compare(Path(folder), layout, dtype, options)


def compare(folder: Path, layout: ArenaLayout, dtype: torch.dtype, options: argparse.Namespace) -> None:
    upload, kept = folder / "upload", ImageFiles(folder / "images", "bench", 1 << 40)
    spec = write_upload(upload, options.rank, dtype)
    slab = HostSlab(2 * build_image(spec, upload, layout).num_bytes, layout.page_bytes)
    pages = slab.take(slab.num_pages)
    pages.runs[0].fill_(1)  # the system has backed it all
    pages.release()

    def lay_out() -> HostImage:
        sha = hashlib.sha256()
        return build_image(spec, upload, layout, memory=slab.take, feed=sha.update)

    def read() -> HostImage | None:
        return kept.read_image(spec.digest, slab.take, lambda: True)

    image = lay_out()
    kept.write(image, lambda: True)
    print(f"{spec.num_bytes / 1e6:.0f} MB of {dtype}, an image of {image.num_bytes / 1e6:.0f} MB")
    image.release()
    ways: dict[str, Callable[[], HostImage | None]] = {"laid out": lay_out, "image read": read}
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(options.rounds):
        for way, load in ways.items():
            begin = time.process_time()
            found = load()
            taken[way].append((time.process_time() - begin) * 1e3)
            assert found is not None
            found.release()
    for way, times in taken.items():
        print(f"{way:12}{statistics.median(times):8.1f}{min(times):8.1f}")


if __name__ == "__main__":
    main()
