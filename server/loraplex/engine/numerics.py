"""Causes of an answer's bits beside the request: whether a step's other rows do, and the numerical build.

The promise "same bits": a request's tokens depend on its fingerprint, its seed and itself, never on what is computed
beside it, how its prompt was cut, what the prefix cache held, or whether it was preempted (docs/determinism.md).
"""

from __future__ import annotations

import hashlib
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import torch

import loraplex.adapters
import loraplex.engine
import loraplex.kernels
from loraplex.engine.model.model_plan import ModelPlan
from loraplex.kernels.bundle import Kernels

_PACKAGES = (loraplex.kernels, loraplex.engine, loraplex.adapters)
_LIBRARIES = ("torch", "numpy", "numba", "llvmlite", "triton", "llguidance")
_VARIABLES = (
    "ATEN_CPU_CAPABILITY", "CUBLAS_WORKSPACE_CONFIG", "DNNL_MAX_CPU_ISA", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS",
    "NUMBA_CPU_FEATURES", "NUMBA_CPU_NAME", "NVIDIA_TF32_OVERRIDE", "ONEDNN_MAX_CPU_ISA",
)  # fmt: skip
"""Variables by which libraries choose other instructions."""


def numerical_build(plan: ModelPlan, four_bit_library: str = "") -> str:
    """A digest of what decides the bits of its answers, the weights and dtype aside: how they and activations are
    quantised and how keys and values are kept, the layers' plan (such as how a router chooses), sources, versions of
    libraries, processor or GPU, the kernels chosen, a library for 4-bit linears, and the RoPE frequencies that the
    served length chose (ADR 0011)."""
    kernels, settings, attention = plan.kernels, plan.settings, plan.attention.name
    decides = kernels.obstacle_to_same_bits(plan.dtype, False) is not None
    parts = [
        *(f"{package.__name__} {_digest(Path(package.__path__[0]))}" for package in _PACKAGES),
        *(f"{name} {_version(name)}" for name in _libraries(plan)),
        *(f"{name}={os.environ[name]}" for name in _VARIABLES if name in os.environ),
        f"{kernels.backend} {plan.decoder} {plan.shape.max_positions}",
        *(() if plan.spec is None else (f"layers {msgspec.json.encode(plan.spec).decode()}",)),
        f"attention {attention} {_version(attention)}",
        *(() if settings.quantise == "none" else (f"quantise {settings.quantise}",)),
        *(() if settings.kv_cache_dtype == "auto" else (f"KV {settings.kv_cache_dtype}",)),
        *((f"activations {plan.linears.activations}",) if plan.linears.activations else ()),
        *((f"4-bit linears {four_bit_library}",) if four_bit_library else ()),
        f"batch invariant {decides and kernels.batch_invariant}",
        *_processor(kernels),
    ]
    if plan.obstacle is not None:
        # Libraries may cut sums by the number of threads. Kernels that keep the promise do not.
        parts.append(f"threads {torch.get_num_threads()}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _libraries(plan: ModelPlan) -> tuple[str, ...]:
    return _LIBRARIES if plan.decoder == "fused" else (*_LIBRARIES, "transformers")


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "none"


def _digest(package: Path) -> str:
    """The digest of all *.py below a package."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _processor(kernels: Kernels) -> list[str]:
    device = kernels.device
    if device.type == "cuda":
        return [torch.cuda.get_device_name(device), f"cuda {torch.version.cuda}"]
    return [torch.backends.cpu.get_cpu_capability(), *kernels.processor()]
