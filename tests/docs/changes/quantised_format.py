"""`plain-int8`, a new format of quantised linears, from a checkpoint's files to a product."""

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file

from loraplex.adapters.admission.base_model import locate_tensors
from loraplex.adapters.base_weights.schemes import read_linears
from loraplex.adapters.base_weights.tensors import QuantisedTensors
from loraplex.kernels.backend import make_kernels

rng = np.random.default_rng(1)
codes, scales = rng.integers(-127, 128, (8, 64), np.int8), rng.random(8, np.float32)
with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    save_file({"q.weight": codes, "q.weight_scale": scales}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "plain-int8"}}))
    config = json.loads((folder / "config.json").read_text())
    linears = read_linears(config, QuantisedTensors(locate_tensors(folder)))
    assert linears is not None
    assert (linears.modules, linears.shape("q"), linears.are_codes) == ({"q"}, (8, 64), True)
    linears.examine("q")
    weight = linears.read("q")
kernels = make_kernels("torch", torch.device("cpu"))
x = torch.from_numpy(rng.normal(0, 1, (2, 64)).astype(np.float32))
packed = kernels.ops.pack(weight.map(torch.from_numpy), linears.scheme.form, torch.float32)
exact = x.double() @ torch.from_numpy(codes * scales[:, None].astype(np.float64)).T
torch.testing.assert_close(packed(x, None).double(), exact, rtol=1e-4, atol=1e-3)
