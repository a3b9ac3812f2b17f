"""Reports of hybrids on other servers that answered as the base, retold: an adapter acts, under each of its names, and
as transformers and PEFT compute it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from loraplex.engine.logprobs import join_scores
from support.adapters.peft_zoo import ALL_SITES, PeftReference
from support.adapters.tiny_adapters import DELTA, save_adapters
from support.engine.local_engine import LocalEngine
from support.models.tiny_multimodal import save_multimodal

pytestmark = pytest.mark.usefixtures("one_torch_thread")

GATES = ["in_proj_b", "in_proj_a"]
TARGETS = {"all": [*ALL_SITES, *(site for sites in DELTA.values() for site in sites)], "gates": GATES}
TEXT, WRAPPER = "base_model.model.model.layers.", "base_model.model.model.language_model.layers."
PROMPT = [3 + 7 * number % 450 for number in range(37)]
TOKENS = 16


@dataclass(frozen=True)
class Served:
    """Adapters that PEFT made on the text class, and an engine on the wrapper, as Qwen3.5 is published."""

    adapters: dict[str, Path]
    reference: PeftReference
    engine: LocalEngine

    def answer(self, folder: Path | None, key: str) -> tuple[list[int], torch.Tensor]:
        """Greedy tokens and their log probabilities."""
        adapter = None if folder is None else self.engine.publish(folder, name=key)
        self.engine.add(key, PROMPT, adapter, max_tokens=TOKENS, logprobs=0)
        self.engine.run()
        found = join_scores([e.scores for e in self.engine.events[key] if e.scores is not None]).output
        assert found is not None
        values = torch.frombuffer(bytearray(found.values), dtype=torch.float32).view(TOKENS, -1)[:, 0]
        return self.engine.tokens(key), values

    def check(self, name: str | None, tokens: list[int], values: torch.Tensor) -> None:
        """Fails unless PEFT with this adapter answers so."""
        want = self.reference.logits(name, PROMPT + tokens[:-1])[len(PROMPT) - 1 :]
        assert tokens == want.argmax(-1).tolist()
        assert (values - want.log_softmax(-1)[range(TOKENS), tokens]).abs().max() <= 1e-4 * want.abs().max()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("reported")
    base = save_multimodal("qwen3_5", root / "base")
    chosen = {name: {"r": 4, "lora_alpha": 8, "target_modules": sites} for name, sites in TARGETS.items()}
    adapters = save_adapters(base, root, chosen)
    engine = LocalEngine(
        base, root / "work", dtype="float32", kernels="numba", num_threads=1, max_model_len=128,
        kv_cache_memory=16 << 20, adapter_memory=8 << 20, adapter_cpu_memory=8 << 20,
    )  # fmt: skip
    yield Served(adapters, PeftReference(base, adapters, torch.float32), engine)
    engine.close()


@pytest.mark.parametrize("decoder", [TEXT, WRAPPER])
def test_names_of_the_text_class_and_of_the_wrapper_are_the_same_adapter(
    decoder: str, served: Served, tmp_path: Path
) -> None:
    """In vLLM names of the text class bound to no module, and the answers were the base's (vllm#49354, vllm#48019)."""
    folder = shutil.copytree(served.adapters["all"], tmp_path / "all")
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    assert all(name.startswith(TEXT) for name in tensors)
    save_file({name.replace(TEXT, decoder): tensor for name, tensor in tensors.items()}, path)
    tokens, values = served.answer(folder, f"all by {decoder}")
    served.check("all", tokens, values)
    assert tokens != served.answer(None, f"base beside {decoder}")[0]


def test_an_adapter_on_gates_alone_acts(served: Served) -> None:
    """SGLang dropped `in_proj_b` and `in_proj_a` with a warning (sglang#31522). A file that lacks them is refused:
    `test_what_other_servers_drop_or_misread_is_refused`."""
    names = load_file(served.adapters["gates"] / "adapter_model.safetensors")
    assert {name.split(".")[-3] for name in names} == set(GATES)
    tokens, values = served.answer(served.adapters["gates"], "gates")
    served.check("gates", tokens, values)
    base = served.answer(None, "base beside gates")
    served.check(None, *base)
    assert tokens != base[0] or (values - base[1]).abs().max() > 1e-3
