"""What a step takes beside what it must take: decoding of any rows and adapters, prompts, the host, a profile.

The floor of a step (docs/performance.md): every weight once, every K and V that a row sees, every adapter's tiles once,
at the bandwidth that a copy reaches; or the flops of the weights, where those take longer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from bench.gpu.decoding.profile import by_part
from bench.gpu.models import LLAMA_8B, TINY, make_config, random_adapter, random_decoder
from bench.gpu.rig import GREEDY, Rig, RigSize, Step
from bench.gpu.stopwatch import Stopwatch
from bench.gpu.timing import Ceilings
from loraplex.adapters.device.host_image import HostImage
from loraplex.engine.execution.executor import Executor
from loraplex.engine.execution.runner import ModelRunner
from loraplex.engine.model.fused import FusedDecoder
from loraplex.engine.sampling.sampler import make_sampler
from loraplex.engine.types import SamplingParams, ScheduledSequence, StepPlan
from loraplex.kernels.attention import BLOCK_SIZE

MIXED = SamplingParams(max_tokens=1 << 20, temperature=0.8, top_p=0.9, top_k=50, seed=7)


@dataclass(frozen=True)
class StepsShape:
    """What is measured on: the config's changes, the context of every decoding row, the rig's sizes, and whether
    sums have one order (`--batch-invariant`)."""

    changes: Mapping[str, Any]
    dtype: torch.dtype
    context: int
    size: RigSize
    batch_invariant: bool = False


FULL = StepsShape(
    {}, torch.bfloat16, 1024,
    RigSize(max_rows=2048, max_sequences=256, max_len=1040, sizes=(1, 16, 64, 256), arena_bytes=22 << 30, slots=256),
)  # fmt: skip
"""Room for 64 adapters of rank 64 or 256 of rank 16."""
FULL_256 = replace(FULL, size=replace(FULL.size, sizes=(256,), arena_bytes=88 << 30))
"""Room for 256 of rank 64: all but a few GB of an H200."""
SMALL = StepsShape(
    TINY | {"num_hidden_layers": 1}, torch.float32, 20,
    RigSize(max_rows=40, max_sequences=2, max_len=24, sizes=(2,), arena_bytes=1 << 20, slots=2, max_rank=16),
)  # fmt: skip


class StepBench:
    """A whole model in Llama-3.1-8B's shape with a full KV cache, made once for many cases."""

    def __init__(
        self,
        shape: StepsShape,
        device: torch.device,
        ceilings: Ceilings,
        *,
        model: FusedDecoder | None = None,
        **rig: Any,
    ) -> None:
        """`model` of another bench of the same shape, to share; `rig`: options of `Rig`."""
        self.shape = shape
        self.device = device
        self.ceilings = ceilings
        self.watch = Stopwatch(device)
        self.config = make_config({**LLAMA_8B, **shape.changes})
        invariant = shape.batch_invariant
        model = model or random_decoder(self.config, shape.dtype, device, batch_invariant=invariant)
        self.rig = Rig(model, shape.size, batch_invariant=invariant, **rig)
        if self.rig.kv.tensor.is_floating_point():
            self.rig.kv.tensor.normal_()
        self._images: dict[int, HostImage] = {}
        self._filled = (0, 0)

    def decode(self, rows: int, adapters: int, rank: int) -> dict[str, Any]:
        """Times of one recorded step: `base_ms` of the recording without adapters, `lora_ms` of the one with, in turns.
        `lora_to_base`: what is left of the base's speed."""
        runs = self.decoding_runs(rows, adapters, rank)
        with torch.inference_mode():
            times = self.watch.interleaved_ms(runs)
        base_floor = self.floor_ms(rows, 0, 0)
        found: dict[str, Any] = {
            "rows": rows,
            "adapters": adapters,
            "rank": rank,
            "base_ms": times[0],
            "base_floor_ms": base_floor,
            "base_times_floor": times[0] / base_floor,
            "bytes": self.bytes(rows, adapters, rank),
        }
        if adapters:
            floor = self.floor_ms(rows, adapters, rank)
            found |= {
                "lora_ms": times[1],
                "floor_ms": floor,
                "times_floor": times[1] / floor,
                "lora_to_base": times[0] / times[1],
                "floor_ratio": base_floor / floor,
            }
        return found

    def decoding_runs(self, rows: int, adapters: int, rank: int) -> list[Callable[[], torch.Tensor]]:
        """A recorded step without adapters, and where there are any, with them."""
        step = self._send(self._decoding(rows, adapters, rank))
        return [partial(step.run, with_adapters=found) for found in (False, True)[: 1 + bool(adapters)]]

    def prompt_runs(self, tokens: int, rank: int) -> list[Callable[[], torch.Tensor]]:
        """A prompt by itself, launched one by one, without an adapter, and where there is a rank, with one."""
        self._fill(1, rank)
        passes = [(self.rig.begin(self._prompt(tokens, -1)), False)]
        if rank:
            passes.append((self.rig.begin(self._prompt(tokens, 0)), True))
        return [partial(_send_and_run, step, with_adapters) for step, with_adapters in passes]

    def mixed_runs(self, rows: int, adapters: int, rank: int) -> list[Callable[[], torch.Tensor]]:
        """A step of `rows` - 1 decoding rows and `rows` + 1 tokens of a prompt, without adapters and with them: by a
        recording where there is one, else launched one by one."""
        *decodes, _ = self._decoding(rows, adapters, rank)
        chunk = [7 + at % 100 for at in range(rows + 1)]
        step = self.rig.begin([*decodes, self.rig.rows(rows - 1, 0, chunk, 0)])
        return [partial(_send_and_run, step, found) for found in (False, True)]

    def prompt(self, tokens: int, rank: int) -> dict[str, Any]:
        """A prompt by itself, with an adapter of this rank (0: none) and without, launched one by one: where the host
        is slower than the device, this is the host's time."""
        runs = self.prompt_runs(tokens, rank)
        with torch.inference_mode():
            times = self.watch.interleaved_ms(runs, rounds=7, times=1)
        floor = self.ceilings.floor_ms(self._weight_bytes, self._prompt_flops(tokens))
        found = {
            "tokens": tokens,
            "rank": rank,
            "base_ms": times[0],
            "floor_ms": floor,
            "base_times_floor": times[0] / floor,
        }
        if rank:
            found |= {"lora_ms": times[1], "lora_to_base": times[0] / times[1]}
        return found

    def host(self, rows: int, adapters: int, rank: int, sampling: SamplingParams) -> dict[str, Any]:
        """A step of the runner, its sampler included. `submit_us`: of the planning thread. `queue_us`: until the worker
        has queued everything. `alone_ms`: until its tokens are there, nothing else in flight. `pipelined_ms`: a step,
        where the next one is submitted before this one is collected; `device_ms`: the recorded pass alone."""
        steps = 20 if self.device.type == "cuda" else 1
        first = self._decoding(rows, adapters, rank, sampling)
        step = self._send(first)
        with torch.inference_mode():
            device_ms = self.watch.median_ms(lambda: step.run(with_adapters=bool(adapters)))
        runner = ModelRunner(
            self.rig.model,
            self.rig.kv,
            Executor(),
            eos_ids=frozenset(),
            lora=self.rig.arena,
            inputs=self.rig.source,
            sampler=make_sampler(
                self.rig.arena.kernels, vocab_size=self.rig.model.shape.vocab_size, max_rows=rows
            ),
        )
        later = [replace(item, pending_input=True, output_index=1) for item in first]
        submits, queues, alone = [], [], []
        for number in range(steps):
            self.watch.synchronize()
            begun = time.perf_counter()
            handle = runner.submit(StepPlan(number, tuple(first)))
            submits.append(time.perf_counter() - begun)
            handle.future.result()
            queues.append(time.perf_counter() - begun - submits[-1])
            runner.collect(handle)
            alone.append(time.perf_counter() - begun)
        handle = runner.submit(StepPlan(steps, tuple(first)))
        begun = time.perf_counter()
        for number in range(steps):
            following = runner.submit(StepPlan(steps + 1 + number, tuple(later)))
            runner.collect(handle)
            handle = following
        pipelined = (time.perf_counter() - begun) / steps
        runner.collect(handle)
        runner.close()
        return {
            "rows": rows,
            "adapters": adapters,
            "rank": rank,
            "sampling": "greedy" if sampling.temperature == 0 else "top-k and top-p",
            "submit_us": statistics.median(submits) * 1e6,
            "queue_us": statistics.median(queues) * 1e6,
            "alone_ms": statistics.median(alone) * 1e3,
            "pipelined_ms": pipelined * 1e3,
            "device_ms": device_ms,
        }

    def activation(self, rank: int) -> list[dict[str, Any]]:
        """An adapter on all sites from pinned host memory into the arena: adjacent pages, and pages that are never
        adjacent."""
        image = self._image(rank)
        stride = 2 if 2 * image.num_pages <= self.rig.num_pages else 1
        places = {"adjacent pages": 1, "scattered pages": stride}
        found = []
        for name, step in places.items():
            pages = tuple(range(0, step * image.num_pages, step))
            ms = self.watch.median_ms(partial(self.rig.arena.write, image, 0, pages), rounds=11)
            found.append(
                {
                    "case": f"rank {rank}, {name}",
                    "bytes": image.num_bytes,
                    "ms": ms,
                    "gb_per_s": image.num_bytes / ms / 1e6,
                }
            )
        self._filled = (0, 0)
        return found

    def profile(self, rows: int, adapters: int, rank: int) -> list[dict[str, Any]]:
        """Where the time of one recorded step goes, by part; on a GPU."""
        step = self._send(self._decoding(rows, adapters, rank))
        with torch.inference_mode():
            return by_part(
                lambda: step.run(with_adapters=bool(adapters)), {"rows": rows, "adapters": adapters}
            )

    def bytes(self, rows: int, adapters: int, rank: int) -> int:
        """What a decoding step must read."""
        shape = self.rig.model.shape
        position = sum(2 * kind.kv_heads * kind.head_dim for kind in shape.caches) * self.shape.dtype.itemsize
        width = sum(features for pair in self.rig.layout.features for features in pair)
        tiles = adapters * rank * width * shape.num_layers * self.shape.dtype.itemsize
        return self._weight_bytes + rows * self.shape.context * position + tiles

    def floor_ms(self, rows: int, adapters: int, rank: int) -> float:
        """Of a decoding step. The weights take the longer of their bytes and their flops; the rest is read beside."""
        weights = self.ceilings.floor_ms(self._weight_bytes, 2.0 * self._products * rows)
        return weights + self.ceilings.floor_ms(self.bytes(rows, adapters, rank) - self._weight_bytes)

    @property
    def _products(self) -> int:
        """Weights that a row is multiplied with."""
        config, spec = self.config, self.rig.model
        layer = sum(group.in_features * sum(group.out_features) for group in spec.site_groups)
        return layer * spec.num_layers + int(config.vocab_size) * int(config.hidden_size)

    @property
    def _weight_bytes(self) -> int:
        return self._products * self.shape.dtype.itemsize

    def _prompt_flops(self, tokens: int) -> float:
        """The head is asked for one row."""
        config = self.config
        layers = self._products - config.vocab_size * config.hidden_size
        width = config.num_hidden_layers * config.num_attention_heads * config.head_dim
        return 2.0 * layers * tokens + 4.0 * width * tokens * (tokens + 1) / 2

    def _decoding(
        self, rows: int, adapters: int, rank: int, sampling: SamplingParams = GREEDY
    ) -> list[ScheduledSequence]:
        """Rows dealt out evenly among the adapters."""
        self._fill(adapters, rank)
        start = self.shape.context - 1
        return [
            self.rig.rows(row, start, [row % 100 + 5], row % adapters if adapters else -1, sampling=sampling)
            for row in range(rows)
        ]

    def _prompt(self, tokens: int, slot: int) -> list[ScheduledSequence]:
        """In the places of the first sequences, whose blocks are adjacent."""
        places = -(-tokens // (self.rig.blocks_each * BLOCK_SIZE))
        blocks = tuple(range(places * self.rig.blocks_each))
        item = self.rig.rows(0, 0, [7 + at % 100 for at in range(tokens)], slot)
        return [replace(item, block_ids=blocks[: -(-tokens // BLOCK_SIZE)])]

    def _send(self, rows: Sequence[ScheduledSequence]) -> Step:
        step = self.rig.begin(rows)
        with torch.inference_mode():
            step.inputs.send()
        return step

    def _image(self, rank: int) -> HostImage:
        if rank not in self._images:
            self._images[rank] = random_adapter(self.rig.layout, rank, self.device, seed=rank).image
        return self._images[rank]

    def _fill(self, adapters: int, rank: int) -> None:
        """`adapters` adapters in slots of their own. Their numbers are the same; no cache can use that."""
        if not adapters or not rank or (self._filled[0] >= adapters and self._filled[1] == rank):
            return
        image = self._image(rank)
        page = 0
        for slot in range(adapters):
            page = self.rig.put(slot, image, page)
        self.rig.synchronize()
        self._filled = (adapters, rank)


def _send_and_run(step: Step, with_adapters: bool) -> torch.Tensor:
    step.inputs.send()
    return step.run(with_adapters=with_adapters)
