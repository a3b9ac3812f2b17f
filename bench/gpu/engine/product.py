"""The parts of `bench.gpu.engine` in their order."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.gpu.engine.answers import compare
from bench.gpu.engine.checkpoint import adapter_bytes, link, write_adapter, write_base, write_variant
from bench.gpu.engine.scenes import Load, Row, Starving, ask, churn, out_of_memory, preemption
from bench.gpu.models import LLAMA_8B, TINY
from loraplex.adapters.ref import AdapterRef
from support.engine.local_engine import LocalEngine
from support.engine.repeater import Repeater

_ADMITTING_THREADS = 8


@dataclass(frozen=True)
class ProductShape:
    """The model, the engine's settings, and what is asked of it. `slots` adapters of `rank` on all linears fit the
    device, half of `num_adapters` fit host memory; `small_kv`: bytes of a KV cache that is too small
    for `preempted`."""

    options: Mapping[str, Any]
    dtype: torch.dtype
    num_adapters: int
    slots: int
    rank: int
    lengths: tuple[int, ...]
    output: int
    churn: Load
    starved: Load
    preempted: Load
    small_kv: int
    settings: Mapping[str, Any] = field(default_factory=dict)

    def changed(self, *, codes: bool, layers: int | None) -> ProductShape:
        """This shape with the linears as 8-bit codes and with that number of layers, where given."""
        options = dict(self.options) if layers is None else {**self.options, "num_hidden_layers": layers}
        settings = {**self.settings, "quantise": "int8"} if codes else self.settings
        return replace(self, options=options, settings=settings)


FULL = ProductShape(
    LLAMA_8B, torch.bfloat16, num_adapters=200, slots=64, rank=16, lengths=(5, 130, 300, 517), output=32,
    churn=Load(640, 96, 64, 64), starved=Load(8, 700, 16, 8), preempted=Load(16, 200, 120, 16),
    small_kv=(16 * 15) << 21,
    settings={"device": "cuda", "max_model_len": 2048, "max_num_seqs": 64, "kv_cache_memory": 16 << 30},
)  # fmt: skip
"""A block of 16 positions takes 2 MiB; `preempted` needs 20 for each of its 16 sequences."""
SMALL = ProductShape(
    LLAMA_8B | TINY | {"num_hidden_layers": 1}, torch.float32, num_adapters=12, slots=4, rank=8, lengths=(3, 18, 5),
    output=3, churn=Load(8, 5, 2, 2), starved=Load(2, 12, 3, 2), preempted=Load(2, 30, 12, 2),
    small_kv=5 * 16 * 2 * 2 * 16 * 4,
    settings={
        "kernels": "triton", "num_threads": 1, "lookahead": 1, "max_model_len": 48, "max_num_seqs": 4,
        "max_num_batched_tokens": 24, "kv_cache_memory": 24 * 16 * 2 * 2 * 16 * 4, "adapter_memory": 1 << 20,
        "adapter_cpu_memory": 2 << 20,
    },
)  # fmt: skip


def run_product(shape: ProductShape, device: torch.device, folder: Path) -> Iterator[Row]:
    """A row for each thing that was found, with "part", "seconds" and "ok". A part that fails is a row with a note,
    and those that need nothing of it go on."""
    product = _Product(shape, device, folder)
    for part in (product.write, product.start, product.answer):
        yield from _told(part)
    product.close()  # transformers' models need its memory
    yield from _told(product.compare)
    for part in (product.start, product.churn, product.starve):
        yield from _told(part)
    product.close()
    yield from _told(product.preempt)
    product.close()


class _Product:
    def __init__(self, shape: ProductShape, device: torch.device, folder: Path) -> None:
        self._shape, self._device, self._folder = shape, device, folder
        self._base = folder / "base"
        self._compared = [folder / "adapters/all", folder / "adapters/some"]
        self._engine: LocalEngine | None = None
        self._starving: Starving | None = None
        self._refs: list[AdapterRef] = []
        self._answers: list[Any] = []
        self._engines = 0

    def write(self) -> list[Row]:
        """The checkpoint and the adapters, as files."""
        shape = self._shape
        codes = shape.settings.get("quantise") == "int8"
        write_base(self._base, shape.options, shape.dtype, self._device, codes=codes)
        every, some = self._compared
        write_adapter(every, shape.options, shape.rank, shape.dtype, self._device)
        write_adapter(
            some, shape.options, 8, shape.dtype, self._device, sites=("q_proj", "v_proj", "down_proj"), seed=1
        )
        for number in range(shape.num_adapters):
            write_variant(self._folder / f"adapters/{number}", every, number)
        return [{"case": "checkpoint and adapters on the disk", "ok": True}]

    def start(self) -> list[Row]:
        """An engine as a server starts one."""
        self._open()
        info = self._engine_now.built.info
        return [
            {
                "case": "engine",
                "decoder": info.decoder,
                "quantise": info.quantise,
                "kv_blocks": info.num_kv_blocks,
                "allocated_gib": torch.cuda.memory_allocated() / (1 << 30)
                if torch.cuda.is_available()
                else 0.0,
                "ok": info.decoder == "fused",
            }
        ]

    def answer(self) -> list[Row]:
        """Base rows and two adapters in one batch; what came is compared when the engine has gone."""
        engine = self._engine_now
        every, some = self._compared
        refs = {folder: engine.publish(folder) for folder in self._compared}
        folders = (None, every, some)
        asked = [
            (folder, length)
            for number, length in enumerate(self._shape.lengths)
            for folder in (folders[number % 3], folders[(number + 1) % 3])
        ]
        self._answers = ask(engine, refs, asked, self._shape.output)
        return [{"case": "answers with log probabilities", "requests": len(asked), "ok": True}]

    def churn(self) -> list[Row]:
        """More adapters than the device holds."""
        engine, shape = self._engine_now, self._shape
        folders = [self._folder / f"adapters/{number}" for number in range(shape.num_adapters)]
        with ThreadPoolExecutor(_ADMITTING_THREADS) as pool:
            # Linked: the numbers of all are on the disk once.
            publish = partial(engine.publish, put=link)
            self._refs = list(pool.map(publish, folders))
        return churn(engine, self._refs, shape.slots // 2, shape.churn)

    def starve(self) -> list[Row]:
        """A step that finds no memory."""
        return [out_of_memory(self._engine_now, self._refs[0], self._shape.starved, self._starving)]

    def compare(self) -> list[Row]:
        """The answers beside transformers and PEFT."""
        return compare(self._base, self._answers, self._shape.dtype, self._device)

    def preempt(self) -> list[Row]:
        """Another engine, whose KV cache is too small."""
        self._open(kv_cache_memory=self._shape.small_kv, max_model_len=self._small_len)
        ref = self._engine_now.publish(self._compared[0])
        return [preemption(self._engine_now, ref, self._shape.preempted)]

    def close(self) -> None:
        """Give the device's memory back."""
        if self._engine is not None:
            self._engine.close()
        self._engine = None
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _starve(self, model: Any) -> Starving:
        self._starving = Starving(model)
        return self._starving

    @property
    def _engine_now(self) -> LocalEngine:
        if self._engine is None:
            raise RuntimeError("there is no engine")
        return self._engine

    @property
    def _small_len(self) -> int:
        """Positions that one sequence of `preempted` needs, in whole blocks."""
        load = self._shape.preempted
        return -(-(load.prompt + load.output) // 16) * 16

    def _open(self, **settings: Any) -> None:
        shape = self._shape
        one = adapter_bytes(shape.options, shape.rank, shape.dtype)
        cuda = self._device.type == "cuda"
        self._engines += 1
        self._engine = LocalEngine(
            self._base,
            self._folder / f"engine {self._engines}",
            wrap_model=None if cuda else self._starve,
            recorder=None if cuda else Repeater(),
            **{
                "dtype": str(shape.dtype).removeprefix("torch."),
                "adapter_memory": shape.slots * one * 21 // 20,
                "adapter_cpu_memory": shape.num_adapters * one // 2,
                **shape.settings,
                **settings,
            },
        )


def _told(part: Callable[[], list[Row]]) -> list[Row]:
    begun = time.monotonic()
    try:
        rows = part()
    except Exception as error:  # of any kind: the parts behind it may find something too
        traceback.print_exc()
        rows = [{"case": "failed", "note": f"{type(error).__name__}: {error}"[:500], "ok": False}]
    seconds = round(time.monotonic() - begun, 2)
    return [{"part": part.__name__, **row, "seconds": seconds} for row in rows]
