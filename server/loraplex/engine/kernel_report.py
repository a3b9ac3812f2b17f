"""Which kernels an engine would run here, in words: for `loraplex doctor`, in a process that may load torch."""

from __future__ import annotations

from typing import Literal

import torch

from loraplex.engine.devices import choose_kernels, choose_lookahead, obstacle_to_speculation
from loraplex.engine.execution.executor import set_threads
from loraplex.engine.sizing import REFERENCE_LAYERS, REFERENCE_WEIGHTS, most_recorded_rows
from loraplex.kernels.backend import best_backend, obstacle_to


def describe_kernels(choice: str, device: str, num_threads: int) -> str:
    """The kernels that `choice` selects on `device`, how they compute there, and what they record. Arguments as in
    EngineConfig. Raises DeviceUnavailable for what can't run here."""
    shown_threads = set_threads(num_threads)
    kernels = choose_kernels(device, choice)
    found = kernels.device
    if kernels.lora_pass is None:
        if found.type != "cuda":
            return "triton, interpreted: far too slow to serve with"
        major, minor = torch.cuda.get_device_capability(found)
        rows = most_recorded_rows(-1, (major, minor), REFERENCE_LAYERS, REFERENCE_WEIGHTS)
        recorded = "decoding steps"
        if rows:
            recorded += f" and those with prompt chunks of up to {rows} rows for a model of 8 billion weights"
        name = torch.cuda.get_device_name(found)
        return f"triton on {name}, compute capability {major}.{minor}; {recorded} are recorded"
    if kernels.compilation is not None:
        return f"{_describe_numba()}, {shown_threads}; {_describe_cache()}"
    if choice == "torch":
        return f"torch, as was asked for, {shown_threads}"
    better = best_backend(found)
    return f"torch, {shown_threads}; {better} would be faster, but {obstacle_to(better, found)}"


def describe_speculation(choice: Literal["auto", "off"], kernels: str, device: str) -> str:
    """Whether an engine drafts tokens, and why not. Arguments as in EngineConfig. Raises DeviceUnavailable."""
    chosen = choose_kernels(device, kernels)
    obstacle = obstacle_to_speculation(choice, choose_lookahead(-1, chosen.device), chosen)
    return f"off: {obstacle}" if obstacle else "on, by what steps cost when the server starts"


def _describe_numba() -> str:
    from loraplex.kernels.linear import numba_dense
    from loraplex.kernels.numba_runtime import amx
    from loraplex.kernels.numba_runtime.vectors import host_features, host_name

    products = "AVX512-BF16 products" if "avx512bf16" in host_features() else "portable vectors"
    if amx.is_permitted():
        products = f"AMX and {products}"
    linears = "its own linears" if numba_dense.is_for(torch.bfloat16) else "oneDNN's linears"
    return f"numba for {host_name()}, {products}, {linears} in bfloat16"


def _describe_cache() -> str:
    from loraplex.kernels.numba_runtime.cache import KERNELS

    if KERNELS.directory is None:
        return (
            "compiled at every start (10 to 20 s), since the cache cannot be written: set NUMBA_CACHE_DIR to a "
            "directory that can"
        )
    done = [name for name in ("bfloat16", "float16", "float32") if KERNELS.is_compiled(name)]
    state = f"compiled for {', '.join(done)}" if done else "to be compiled at the first start (10 to 20 s)"
    return f"{state}, kept in {KERNELS.directory}"
