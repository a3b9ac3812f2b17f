"""Gates of a delta net stay floats, whether a file has them as codes or not; linears beside them are codes."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from loraplex.engine.logprobs import join_scores
from support.adapters.peft_zoo import PeftReference
from support.adapters.tiny_adapters import ADAPTERS, save_adapters
from support.engine.local_engine import LocalEngine
from support.models.checkpoints import FAMILIES, save_tiny
from support.models.loading import outline_model
from support.models.quantised_formats import write_quantised

pytestmark = pytest.mark.usefixtures("one_torch_thread")

MOSTLY_DELTA_NETS = FAMILIES["qwen3_5-2"] | {
    "layer_types": ["linear_attention"] * 3 + ["full_attention"], "num_hidden_layers": 4, "hidden_size": 64,
    "intermediate_size": 96, "vocab_size": 160, "linear_num_key_heads": 8, "linear_num_value_heads": 16,
}  # fmt: skip
GATES = ("in_proj_a", "in_proj_b")
KEPT = {*GATES, "conv1d", "A_log", "dt_bias", "embed_tokens", "lm_head"}
"""Their numbers stay in the model's dtype, as those of a delta net's own norm; other norms are in float32."""
CPU = torch.device("cpu")
PROMPT, TOKENS = [3 + 7 * number % 150 for number in range(41)], 8


def is_kept(key: str) -> bool:
    return not KEPT.isdisjoint(key.split(".")) or ".linear_attn.norm." in key


@pytest.mark.parametrize(
    "name", ["gptq int4, zeros", pytest.param("compressed int8, a scale a row", marks=pytest.mark.slow)]
)
def test_gates_that_a_tool_has_quantised_are_served_as_what_their_codes_stand_for(
    name: str, tmp_path: Path
) -> None:
    """Tools that quantise every linear store `in_proj_a` and `in_proj_b` as codes too."""
    base = save_tiny(tmp_path / "base", MOSTLY_DELTA_NETS)
    made, dense = write_quantised(base, tmp_path / "all", name, gates=GATES)
    adapters = save_adapters(dense, tmp_path, {"all": ADAPTERS["all"]})
    reference = PeftReference(dense, adapters, torch.float32)
    narrow, wide = (outline_model(made, CPU, dtype).weight_bytes for dtype in ("bfloat16", "float32"))
    kept = sum(t.numel() for key, t in load_file(dense / "model.safetensors").items() if is_kept(key))
    assert wide - narrow == 2 * kept
    assert narrow < 0.7 * outline_model(dense, CPU, "bfloat16").weight_bytes
    sizes = {"kv_cache_memory": 16 << 20, "adapter_memory": 8 << 20, "adapter_cpu_memory": 8 << 20}
    given: dict[str, Any] = {"dtype": "float32", "kernels": "numba", "num_threads": 1, **sizes}
    with closing(LocalEngine(made, tmp_path / "work", **given)) as engine:
        memory = engine.built.info.memory
        assert memory is not None
        assert abs(memory.weights - wide) < 0.05 * wide
        refs = {"all": engine.publish(adapters["all"])}
        for key in (None, "all"):
            engine.add(f"{key}", PROMPT, refs.get(key or ""), max_tokens=TOKENS, logprobs=0)
        engine.run()
        for key in (None, "all"):
            tokens = engine.tokens(f"{key}")
            want = reference.logits(key, PROMPT + tokens[:-1])[len(PROMPT) - 1 :]
            assert tokens == want.argmax(-1).tolist()
            found = join_scores([e.scores for e in engine.events[f"{key}"] if e.scores is not None]).output
            assert found is not None
            values = torch.frombuffer(bytearray(found.values), dtype=torch.float32).view(TOKENS, -1)[:, 0]
            assert (values - want.log_softmax(-1)[range(TOKENS), tokens]).abs().max() < 1e-4, key
