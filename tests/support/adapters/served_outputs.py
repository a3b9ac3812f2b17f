"""What a faultless engine gives for the probes of a drafted adapter, computed with numpy from the draft itself; for
routed experts, from what admission's reader makes of the files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from loraplex.adapters.numerics import INPUT_ROWS, SiteOutputs
from loraplex.adapters.numerics.probes import EXPERT_SUMS, probe_inputs, sketch
from loraplex.adapters.spec import BaseSpec, ExpertShape
from loraplex.adapters.store.tensors import read_tensor
from support.adapters.drafts import AdapterDraft
from support.models.expert_adapters import read

SERVED: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
Outputs = dict[tuple[int, str], np.ndarray]
Matrices = dict[tuple[int, str, int], tuple[NDArray[np.float32], NDArray[np.float32]]]
"""A [r, K] and B [N, r] with the scaling in it, by layer, site and expert."""


def served_rows(
    draft: AdapterDraft, base: BaseSpec, dtype: str, weights: dict[str, np.ndarray] | None = None
) -> Outputs:
    """The rows [PROBE_ROWS, N] of each site in the served dtype. `weights`: the base's tensors, for DoRA."""
    found: Outputs = {}
    served = SERVED[dtype]
    config = draft.config
    for key, shape in base.sites.items():
        tensors = {
            kind: array.astype(np.float32)
            for name, array in draft.tensors.items()
            for kind in ("lora_A", "lora_B", "magnitude")
            if name.startswith(f"base_model.model.{shape.module_path}.") and kind in name
        }
        if not tensors:
            continue
        a, b = tensors["lora_A"], tensors["lora_B"]
        alpha = config["alpha_pattern"].get(key[1], config["lora_alpha"])
        b = b * np.float32(alpha / (math.sqrt(len(a)) if config["use_rslora"] else len(a)))
        g, c = np.ones(len(b), np.float32), np.zeros(len(b), np.float32)
        if "magnitude" in tensors:
            assert weights is not None
            whole = weights[f"{shape.module_path}.weight"].astype(served).astype(np.float32) + b @ a
            g = tensors["magnitude"] / np.linalg.norm(whole, axis=1)
            bias = weights.get(f"{shape.module_path}.bias")
            if bias is not None:
                c = (1 - g) * bias.astype(served).astype(np.float32)
        a, b = (m.astype(served).astype(np.float32) for m in (a, b * g[:, None]))
        x = probe_inputs(key[0], shape.in_features)
        y = np.zeros((len(x), len(b)), np.float32)
        y[-1] = 1
        found[key] = (y * g + c + x @ a.T @ b.T).astype(served)
    return found


def site_outputs(rows: Outputs, dtype: str) -> SiteOutputs:
    finite = bytes(bool(np.isfinite(row.astype(np.float32)).all()) for row in rows.values())
    sums = [sketch(row.astype(np.float64)).astype("<f4").tobytes() for row in rows.values()]
    return SiteOutputs(dtype, tuple(rows), b"".join(sums), finite)


def expert_matrices(
    folder: Path, experts: dict[int, ExpertShape], *, in_turns: bool = False, max_rank: int = 128
) -> Matrices:
    """`in_turns`: the rows of gate and up are, and get into halves."""
    path = folder / "adapter_model.safetensors"
    found: Matrices = {}
    for weights in read(folder, experts, max_rank=max_rank).weights:
        count = experts[weights.layer].count
        a, b = read_tensor(path, weights.a), read_tensor(path, weights.b)
        for expert in range(count) if weights.expert < 0 else [weights.expert]:
            one, other = a, b
            if weights.expert < 0:
                one = a.reshape(count, weights.rank, -1)[expert]
                other = b.reshape(len(b), weights.rank, count)[:, :, expert]
            if weights.turned:
                one, other = other.T, one.T
            if in_turns and weights.site == "gate_up":
                other = np.concatenate((other[0::2], other[1::2]))
            found[weights.layer, weights.site, expert] = one, other * np.float32(weights.scaling)
    return found


def expert_outputs(matrices: Matrices, experts: dict[int, ExpertShape], dtype: str) -> SiteOutputs:
    served = SERVED[dtype]
    sites = sorted({(layer, site) for layer, site, _ in matrices})
    sums, finite = [], []
    for layer, site in sites:
        for expert in range(experts[layer].count):
            given = matrices.get((layer, site, expert))
            row = np.zeros(EXPERT_SUMS, np.float32)
            is_finite = True
            if given is not None:
                a, b = (matrix.astype(served).astype(np.float32) for matrix in given)
                x = probe_inputs(layer, a.shape[1])[expert % INPUT_ROWS : expert % INPUT_ROWS + 1]
                with np.errstate(all="ignore"):
                    out = (x @ a.T @ b.T).astype(served).astype(np.float32)
                row = sketch(out.astype(np.float64), EXPERT_SUMS)[0].astype(np.float32)
                is_finite = bool(np.isfinite(out).all())
            sums.append(row.astype("<f4").tobytes())
            finite.append(is_finite)
    return SiteOutputs(
        dtype,
        (),
        b"",
        b"",
        expert_sites=tuple((layer, site, experts[layer].count) for layer, site in sites),
        expert_sums=b"".join(sums),
        expert_finite=bytes(finite),
    )
