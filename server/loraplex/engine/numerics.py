"""What decides the bits of an answer beside the request: whether a step's other rows do, and the numerical build.

The promise "same bits": a request's tokens depend on its fingerprint, its seed and itself, never on what is computed
beside it, how its prompt was cut, what the prefix cache held, or whether it was preempted (docs/determinism.md).
"""

from __future__ import annotations

import hashlib
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import loraplex.adapters
import loraplex.engine
import loraplex.kernels
from loraplex.engine.model.base import Model
from loraplex.engine.model.fused import FusedDecoder
from loraplex.kernels.backend import Backend

_PACKAGES = (loraplex.kernels, loraplex.engine, loraplex.adapters)
_LIBRARIES = ("torch", "numpy", "numba", "llvmlite", "triton", "llguidance")
_VARIABLES = (
    "ATEN_CPU_CAPABILITY", "CUBLAS_WORKSPACE_CONFIG", "DNNL_MAX_CPU_ISA", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS",
    "NUMBA_CPU_FEATURES", "NUMBA_CPU_NAME", "NVIDIA_TF32_OVERRIDE", "ONEDNN_MAX_CPU_ISA",
)  # fmt: skip
"""Variables by which libraries choose other instructions."""


def obstacle_to_same_bits(backend: Backend, dtype: torch.dtype, *, batch_invariant: bool) -> str | None:
    """Why these kernels cannot promise the same bits of a model in this dtype; None where they can. `batch_invariant`
    as in EngineConfig."""
    if backend == "torch":
        return "torch's kernels choose the order of their sums by the other rows of a step"
    if backend == "triton" and not batch_invariant:
        return "--batch-invariant is off"
    if backend == "numba":
        from loraplex.kernels.layers import numba_dense  # numba takes a second to import

        if not numba_dense.is_for(dtype, batch_invariant=batch_invariant):
            name = str(dtype).removeprefix("torch.")
            return f"oneDNN multiplies in {name} on this processor, by the number of rows"
    return None


def numerical_build(model: Model, backend: Backend, *, batch_invariant: bool) -> str:
    """A digest of what decides the bits of its answers, the weights and dtype aside: sources, versions of libraries,
    processor or GPU, the kernels chosen, and the RoPE frequencies that the served length chose (ADR 0013)."""
    parts = [
        *(f"{package.__name__} {_digest(Path(package.__path__[0]))}" for package in _PACKAGES),
        *(f"{name} {_version(name)}" for name in _libraries(model)),
        *(f"{name}={os.environ[name]}" for name in _VARIABLES if name in os.environ),
        f"{backend} {type(model).__name__} {model.shape.max_positions}",
        f"attention {model.attention.name} {_version(model.attention.name)}",
        f"batch invariant {_decides(backend, model.dtype) and batch_invariant}",
        *_processor(model.device, backend),
    ]
    obstacle = obstacle_to_same_bits(backend, model.dtype, batch_invariant=batch_invariant)
    if obstacle is not None or not isinstance(model, FusedDecoder):
        # Libraries may cut sums by the number of threads. Kernels that keep the promise do not.
        parts.append(f"threads {torch.get_num_threads()}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _decides(backend: Backend, dtype: torch.dtype) -> bool:
    """Whether `batch_invariant` changes what is computed."""
    return obstacle_to_same_bits(backend, dtype, batch_invariant=False) is not None


def _libraries(model: Model) -> tuple[str, ...]:
    return _LIBRARIES if isinstance(model, FusedDecoder) else (*_LIBRARIES, "transformers")


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "none"


def _digest(package: Path) -> str:
    """Of all *.py below it."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _processor(device: torch.device, backend: Backend) -> list[str]:
    if device.type == "cuda":
        return [torch.cuda.get_device_name(device), f"cuda {torch.version.cuda}"]
    found = [torch.backends.cpu.get_cpu_capability()]
    if backend == "numba":
        from loraplex.kernels.numba_runtime import amx
        from loraplex.kernels.numba_runtime.vectors import host_features, host_name

        found += [host_name(), *sorted(host_features()), f"tiles {amx.is_permitted()}"]
    return found
