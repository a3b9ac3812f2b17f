"""How many tensor operations a step takes: what a family has that others lack must cost the others nothing."""

from __future__ import annotations

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from support.models.checkpoints import FAMILIES, PagedRun, save_tiny
from support.models.loading import load_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")


class Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def ops_a_layer(options, path, dtype: str) -> float:
    """Of a step that decodes two sequences and goes on with a third one's prompt."""
    counts = []
    for layers in (2, 4):
        kinds = {"layer_types": ["full_attention"] * layers} if "layer_types" in options else {}
        base = save_tiny(path / f"{dtype}-{layers}", options | kinds | {"num_hidden_layers": layers})
        run = PagedRun(
            load_model(base, "cpu", dtype, kernels="torch"), [list(range(20)), list(range(30)), [4] * 12]
        )
        run.step({0: 5, 1: 20, 2: 11})
        with Counter() as counter:
            run.step({0: 1, 1: 4, 2: 1})
        counts.append(counter.count)
    return (counts[1] - counts[0]) / 2


def test_a_layer_of_llama_and_its_like(tmp_path):
    """These were counted before Gemma and Phi were there."""
    llama = {
        dtype: ops_a_layer(FAMILIES["llama"], tmp_path / "llama", dtype) for dtype in ("float32", "bfloat16")
    }
    assert llama["float32"] <= 64
    assert llama["bfloat16"] <= 80
    for name in (
        "llama-3.1",
        "llama-dynamic-rope",
        "mistral",
        "mistral-window",
        "qwen2-yarn",
        "phi3",
        "phi3-partial",
    ):
        assert ops_a_layer(FAMILIES[name], tmp_path / name, "float32") == llama["float32"], name


def test_a_layer_of_gemma(tmp_path):
    """Two more norms, and with a softcap attention by hand instead of torch's own."""
    llama = ops_a_layer(FAMILIES["llama"], tmp_path / "llama", "float32")
    plain = ops_a_layer(FAMILIES["gemma2-no-caps"] | {"attention_bias": False}, tmp_path / "plain", "float32")
    capped = ops_a_layer(FAMILIES["gemma2"], tmp_path / "capped", "float32")
    assert plain - llama <= 10
    assert capped - plain <= 18
