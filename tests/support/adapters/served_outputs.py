"""What a faultless engine gives for the probes of a drafted adapter, computed with numpy from the draft itself."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np

from loraplex.adapters.numerics import SiteOutputs
from loraplex.adapters.numerics.probes import probe_inputs, sketch
from loraplex.adapters.spec import BaseSpec
from support.adapters.drafts import AdapterDraft

SERVED: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
Outputs = dict[tuple[int, str], np.ndarray]


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
