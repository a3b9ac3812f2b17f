"""--kv-cache-dtype int8 in whole engines: what it changes, and which models and kernels it is refused for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.engine.model.base import ModelUnsupported
from support.adapters.tiny_adapters import ADAPTERS, save_adapters
from support.engine.local_engine import LocalEngine
from support.models.checkpoints import FAMILIES, OTHERS, PagedRun, save_tiny
from support.models.loading import load_model, plan_model

CPU = torch.device("cpu")
PROMPTS = [[7, 3, 9, 1, 4, 4, 2, 8] * 5, [5, 1], list(range(3, 40))]

pytestmark = pytest.mark.usefixtures("one_torch_thread", "quick_interpreter")


@pytest.mark.parametrize(
    ("family", "quantise"),
    [("llama-biases", False), ("gemma2", False), ("granite", False), ("gemma4", True)],
)
def test_answers_are_near_those_without_codes(family: str, quantise: bool, tmp_path: Path) -> None:
    """On the fused decoder, and through transformers. `quantise`: linears in 8 bits too."""
    base = save_tiny(tmp_path / "base", (FAMILIES | OTHERS)[family])
    found = []
    for kv_dtype in (torch.float32, torch.int8):
        codes = quantise and kv_dtype is torch.int8
        model = load_model(base, CPU, "float32", kernels="torch", quantise=codes, kv_codes=codes)
        run = PagedRun(model, PROMPTS, kv_dtype=kv_dtype)
        run.step({0: 13, 2: 20})
        run.step({2: 17, 1: 2, 0: 1})
        run.step({0: 26})
        found.append(torch.cat([run.result(i) for i in range(len(PROMPTS))]).log_softmax(-1))
    exact, codes = found
    assert not torch.equal(exact, codes)
    assert float((exact.exp() * (exact - codes)).sum(-1).mean()) < 1e-3


def test_an_engine_says_how_it_keeps_keys_and_values(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", FAMILIES["llama-biases"])
    settings: dict[str, Any] = {"kernels": "torch", "num_threads": 1, "kv_cache_memory": 1 << 20}
    settings |= {"adapter_memory": 4 << 20, "adapter_cpu_memory": 4 << 20, "max_model_len": 64}
    infos, answers = [], []
    for asked in ("auto", "int8"):
        engine = LocalEngine(base, tmp_path / asked, dtype="float32", kv_cache_dtype=asked, **settings)
        engine.add("a", PROMPTS[0], max_tokens=5)
        engine.run()
        answers.append(engine.tokens("a"))
        infos.append(engine.built.info)
        engine.close()
    plain, codes = infos
    assert (plain.kv_cache_dtype, codes.kv_cache_dtype) == ("float32", "int8")
    assert plain.numerics != codes.numerics
    assert codes.memory is not None
    assert codes.kv_bytes == codes.memory.kv <= 1 << 20
    assert codes.kv_bytes / codes.num_kv_blocks < 0.35 * plain.kv_bytes / plain.num_kv_blocks
    assert [len(tokens) for tokens in answers] == [5, 5]


@pytest.mark.soak
def test_triton_gives_the_answers_of_the_reference(tmp_path: Path) -> None:
    """With an adapter and without, in chunks and step by step."""
    base = save_tiny(tmp_path / "base", FAMILIES["llama-biases"])
    adapters = save_adapters(base, tmp_path, {"all": ADAPTERS["all"]})
    settings: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "kv_cache_memory": 1 << 20}
    settings |= {"adapter_memory": 4 << 20, "adapter_cpu_memory": 4 << 20, "max_model_len": 64}
    answers = []
    for kernels in ("torch", "triton"):
        engine = LocalEngine(
            base,
            tmp_path / kernels,
            kernels=kernels,
            kv_cache_dtype="int8",
            max_num_batched_tokens=16,
            max_num_seqs=4,
            **settings,
        )
        adapter = engine.publish(adapters["all"])
        for number, prompt in enumerate(PROMPTS):
            engine.add(f"base {number}", prompt, max_tokens=6)
            engine.add(f"adapter {number}", prompt, adapter, max_tokens=6)
        engine.run()
        answers.append({name: engine.tokens(name) for name in sorted(engine.events)})
        engine.close()
    assert answers[0] == answers[1]


@pytest.mark.parametrize("asks", ["start", "doctor"])
def test_attention_that_reads_floats_alone_is_refused(asks: str, tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", FAMILIES["llama-biases"] | {"head_dim": 16})
    expected = r"^--kv-cache-dtype int8: --attention torch reads .* choose --attention auto, or"
    with pytest.raises(ModelUnsupported, match=expected) as caught:
        if asks == "start":
            load_model(base, CPU, "float32", kernels="triton", attention="torch", kv_codes=True)
        else:
            plan_model(base, CPU, "float32", kernels="triton", attention="torch", kv_codes=True)
    assert "\n" not in caught.value.message
    for kernels in ("triton", "torch", "numba"):
        found = plan_model(base, CPU, "float32", kernels=kernels, kv_codes=True).explain()
        assert f", attention {kernels} (" in found
        assert ", KV in int8, " in found
