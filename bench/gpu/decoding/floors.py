"""The formula of docs/performance.md in numbers: the least time of a decoding step of Llama-3.1-8B in bfloat16.

    PYTHONPATH=tests:server:adapters:kernels python3 -m bench.gpu.decoding.floors

prints the tables of that page. Nothing is measured here: each GPU's figures are assumptions, and stated as such.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bench.gpu.lora import LLAMA_8B
from bench.gpu.models import LLAMA_8B as CONFIG
from loraplex.engine.config import MAX_RECORDED_ROWS
from loraplex.engine.execution.cuda_graphs import prompt_graph_sizes

LAYERS = int(CONFIG["num_hidden_layers"])
LAYER_LAUNCHES = 10
"""Of a layer of a recorded step: four linears, two norms, RoPE with the KV write, attention and its merge, and the
activation."""
OTHER_LAUNCHES = 14
"""Outside of the layers: embedding, first norm, head, and what torch launches around them."""
LORA_LAUNCHES = 8
"""More in a layer where there are adapters: shrink and expand of four groups."""
PROMPT_LAUNCHES = 1
"""More in a layer of a step with prompt chunks: attention for the long sequences."""
HOST_LAUNCH_S = 26e-6
"""Assumed, for a launch by itself: Triton's launchers and torch's operators are called from Python."""
CONTEXT = 1024
RANK = 16
_BYTES = 2
_HEAD = int(CONFIG["vocab_size"]) * int(CONFIG["hidden_size"])
_LINEARS = LAYERS * sum(group.in_features * sum(group.out_features) for group in LLAMA_8B)
PRODUCTS = _LINEARS + _HEAD
"""Weights that a row is multiplied with."""
POSITION_BYTES = LAYERS * 2 * int(CONFIG["num_key_value_heads"]) * int(CONFIG["head_dim"]) * _BYTES
RANK_BYTES = (
    LAYERS
    * sum(len(group.sites) * group.in_features + sum(group.out_features) for group in LLAMA_8B)
    * _BYTES
)


@dataclass(frozen=True)
class Gpu:
    """What is assumed: bytes/s of a copy within the device, flop/s of a large bfloat16 product, seconds of one more
    launch in a CUDA graph, and bytes of memory."""

    name: str
    bytes_per_s: float
    flops_per_s: float
    launch_s: float
    memory: float


H200 = Gpu("H200", 4.3e12, 790e12, 2e-6, 141e9)
GPUS = (H200, Gpu("A100 80 GB", 1.75e12, 250e12, 2e-6, 80e9), Gpu("L4", 0.26e12, 60e12, 2e-6, 24e9))
DECODES = 64
MIXED = (80, 150, 220, 290, 420, 500, 600, 700, 800, 1000)
"""Rows of steps with prompt chunks."""
STEPS = ((1, 1), (16, 8), (16, 16), (64, 8), (64, 64), (256, 64))
"""Rows and adapters."""


def launches(adapters: int) -> int:
    """Launches of a recorded step."""
    return OTHER_LAUNCHES + LAYERS * (LAYER_LAUNCHES + (LORA_LAUNCHES if adapters else 0))


def step_ms(gpu: Gpu, rows: int, adapters: int) -> float:
    """The formula; see `launches`."""
    weights = max(PRODUCTS * _BYTES / gpu.bytes_per_s, 2 * PRODUCTS * rows / gpu.flops_per_s)
    read = rows * CONTEXT * POSITION_BYTES + adapters * RANK * RANK_BYTES
    return 1e3 * (weights + read / gpu.bytes_per_s + launches(adapters) * gpu.launch_s)


def mixed_launches(adapters: int) -> int:
    """Launches of a step with prompt chunks."""
    return launches(adapters) + LAYERS * PROMPT_LAUNCHES


def mixed_ms(gpu: Gpu, rows: int, adapters: int) -> float:
    """What the device takes for a step of prompt chunks beside DECODES decoding rows, without launches. The head is
    for 256 rows at most."""
    products = 2 * (_LINEARS * rows + _HEAD * min(rows, 256))
    weights = max(PRODUCTS * _BYTES / gpu.bytes_per_s, products / gpu.flops_per_s)
    read = DECODES * CONTEXT * POSITION_BYTES + adapters * RANK * RANK_BYTES
    return 1e3 * (weights + read / gpu.bytes_per_s)


def one_by_one_ms(gpu: Gpu, rows: int, adapters: int) -> float:
    """The host launches ahead of the device: the slower of the two is the step's time."""
    return max(mixed_ms(gpu, rows, adapters), 1e3 * mixed_launches(adapters) * HOST_LAUNCH_S)


def recorded_ms(gpu: Gpu, rows: int, adapters: int) -> float:
    """Padded to the next recorded size."""
    return mixed_ms(gpu, padded(rows), adapters) + 1e3 * mixed_launches(adapters) * gpu.launch_s


def padded(rows: int) -> int:
    return next(size for size in prompt_graph_sizes(MAX_RECORDED_ROWS) if size >= rows)


def fits(gpu: Gpu, rows: int, adapters: int) -> bool:
    """Whether weights, KV and adapters leave a tenth of the memory."""
    weights = (PRODUCTS + _HEAD) * _BYTES
    return weights + rows * CONTEXT * POSITION_BYTES + adapters * RANK * RANK_BYTES <= 0.9 * gpu.memory


def floors_table() -> list[str]:
    """An H200 by its bytes and flops alone: the floors of the suite."""
    gpu = replace(H200, launch_s=0.0)
    lines = ["| rows | base ms | 8 adapters | 64 adapters | 256 adapters |", "|---|---|---|---|---|"]
    for rows in (1, 16, 64, 256):
        base = step_ms(gpu, rows, 0)
        more = [
            f" + {100 * (step_ms(gpu, rows, adapters) / base - 1):.1f} % " if adapters <= rows else " "
            for adapters in (8, 64, 256)
        ]
        lines.append(f"| {rows} | {base:.2f} |{'|'.join(more)}|")
    return lines


def launches_table() -> list[str]:
    """LoRA ÷ base at 64 rows of an H200, by what a launch costs."""
    lines = [
        "| µs a launch | launches | base ms | LoRA ÷ base, 8 adapters | 64 adapters |",
        "|---|---|---|---|---|",
    ]
    for microseconds in (2.0, 1.0, 0.0):
        gpu = replace(H200, launch_s=microseconds * 1e-6)
        base = step_ms(gpu, 64, 0)
        few, many = (base / step_ms(gpu, 64, adapters) for adapters in (8, 64))
        lines.append(f"| {microseconds:.0f} | {launches(1)} | {base:.2f} | {few:.2f} | {many:.2f} |")
    return lines


def prediction_table() -> list[str]:
    """Each GPU with the launches, where it has the memory."""
    lines = [
        "| GPU | TB/s | TFLOP/s | rows | adapters | base ms | with adapters ms | LoRA ÷ base |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for gpu in GPUS:
        ceilings = f"{gpu.name} | {gpu.bytes_per_s / 1e12:.2f} | {gpu.flops_per_s / 1e12:.0f}"
        for rows, adapters in STEPS:
            if fits(gpu, rows, adapters):
                base, lora = step_ms(gpu, rows, 0), step_ms(gpu, rows, adapters)
                lines.append(
                    f"| {ceilings} | {rows} | {adapters} | {base:.2f} | {lora:.2f} | {base / lora:.2f} |"
                )
    return lines


def prompts_table() -> list[str]:
    """Steps with prompt chunks, launched one by one and recorded."""
    lines = [
        "| GPU | rows | padded | base, one by one ms | recorded ms | gain | 8 adapters, one by one ms | recorded ms "
        "| gain |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for gpu in GPUS[:2]:
        for rows in MIXED:
            cells = []
            for adapters in (0, 8):
                apart, whole = one_by_one_ms(gpu, rows, adapters), recorded_ms(gpu, rows, adapters)
                cells.append(f"{apart:.1f} | {whole:.1f} | {apart / whole:.2f}")
            lines.append(f"| {gpu.name} | {rows} | {padded(rows)} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    tables = (floors_table, launches_table, prediction_table, prompts_table)
    print("\n\n".join("\n".join(table()) for table in tables))
