"""The measured error of another form of the base equals that of transformers and PEFT."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from loraplex.adapters.admission.base_model import BaseWeights
from loraplex.adapters.admission.trained_base import FULL_PRECISION, INT8_ROWS, NF4
from loraplex.adapters.base_weights.nf4 import quantise_nf4
from loraplex.adapters.errors import AdapterRefused, BaseModelInvalid
from loraplex.engine.base_error.comparison import NotMeasured, compare_answers, compare_logits, read_subject
from loraplex.engine.base_error.messages import BaseErrorFigures, BaseErrorTask
from loraplex.engine.base_error.prompts import MOST_TOKENS, PROMPTS, prompt_tokens
from loraplex.engine.model.base import ModelUnsupported
from support.adapters.peft_zoo import PeftReference
from support.adapters.tiny_adapters import ADAPTERS, BY_TOKEN, KINDS, save_adapters
from support.models.checkpoints import FAMILIES, OTHERS, VOCAB, save_tiny
from support.models.quantised import dequantised

pytestmark = pytest.mark.usefixtures("one_torch_thread")

PROMPT_IDS = [[(7 * place + 3 * number) % VOCAB for place in range(20 + number)] for number in range(3)]
CHOSEN = {name: (ADAPTERS | KINDS | BY_TOKEN)[name] for name in ("all", "dora")}
WIDE = {
    name: (ADAPTERS | KINDS | BY_TOKEN)[name] for name in ("dora-head", "rows-of-both", "embedding-and-head")
}


def task_of(base: Path, adapter: Path, trained_on: str = NF4, **changes: Any) -> BaseErrorTask:
    return BaseErrorTask(
        **{
            "model_dir": str(base),
            "quantise": "none",
            "trained_on": trained_on,
            "config_path": str(adapter / "adapter_config.json"),
            "tensors_path": str(adapter / "adapter_model.safetensors"),
            "digest": "0" * 64,
            "max_rank": 64,
            "prompts": PROMPT_IDS,
        }
        | changes
    )


def compare(task: BaseErrorTask, memory: int = 1 << 40) -> BaseErrorFigures:
    return compare_answers(read_subject(task), memory)


def with_linears(base: Path, out: Path, change: Callable[[np.ndarray], np.ndarray]) -> Path:
    """A copy whose layers' linears are changed."""
    out.mkdir()
    for path in base.glob("*.json"):
        (out / path.name).write_bytes(path.read_bytes())
    tensors = load_file(base / "model.safetensors")
    for name, weight in tensors.items():
        if name.endswith("_proj.weight"):
            tensors[name] = torch.from_numpy(change(weight.numpy()))
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


def int8_rows(weight: np.ndarray) -> np.ndarray:
    scale = np.abs(weight).max(1, keepdims=True) / np.float32(127)
    return np.rint(weight / scale) * scale


def figures(
    trained: PeftReference, served: PeftReference, name: str | None, prompts: list[list[int]] = PROMPT_IDS
) -> tuple[float, float]:
    """(KL, top-1) by transformers and PEFT."""
    p, q = (
        torch.cat([each.logits(name, prompt) for prompt in prompts]).double().log_softmax(-1)
        for each in (trained, served)
    )
    return float((p.exp() * (p - q)).sum(-1).mean()), float((p.argmax(-1) == q.argmax(-1)).double().mean())


@pytest.mark.parametrize(
    ("family", "trained_on", "quantise", "adapters"),
    [
        ("llama-biases", NF4, "none", CHOSEN),
        ("llama-tied", FULL_PRECISION, "int8", CHOSEN),
        ("llama", INT8_ROWS, "none", WIDE),
        pytest.param("phi3", NF4, "int8", CHOSEN, marks=pytest.mark.slow),
        pytest.param("gemma2", NF4, "none", CHOSEN, marks=pytest.mark.slow),
        pytest.param("gemma3", NF4, "none", CHOSEN, marks=pytest.mark.slow),
        pytest.param("qwen3", NF4, "none", CHOSEN, marks=pytest.mark.slow),
    ],
)
def test_figures_equal_those_of_peft(
    family: str, trained_on: str, quantise: str, adapters: dict[str, Any], tmp_path: Path
) -> None:
    base = save_tiny(tmp_path / "base", FAMILIES[family])
    made = save_adapters(base, tmp_path, adapters)
    changes = {NF4: quantise_nf4, INT8_ROWS: int8_rows}
    as_trained = base
    if trained_on in changes:
        as_trained = with_linears(base, tmp_path / "trained", changes[trained_on])
    as_served = dequantised(base, tmp_path / "served") if quantise == "int8" else base
    for name, folder in made.items():
        trained, served = (
            PeftReference(each, {name: folder}, torch.float32) for each in (as_trained, as_served)
        )
        found = compare(task_of(base, folder, trained_on, quantise=quantise))
        kl, top1 = figures(trained, served, name)
        assert found.kl == pytest.approx(kl, rel=1e-3)
        assert (found.top1, found.tokens, found.reason) == (pytest.approx(top1), 63, None)
        # The tolerance tells them apart: the base alone, other tokens, and of a large change the other direction.
        shifted = [prompt[1:] + prompt[:1] for prompt in PROMPT_IDS]
        others = [figures(trained, served, None), figures(trained, served, name, shifted)]
        if trained_on == NF4:
            others.append(figures(served, trained, name))
        assert all(abs(other - kl) > 3e-3 * kl for other, _ in others), (kl, others)


def test_an_activated_adapter_is_compared_from_its_invocation_on(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", FAMILIES["llama"])
    invocation = [5, 9]
    recipe = {**ADAPTERS["all"], "alora_invocation_tokens": invocation}
    (folder,) = save_adapters(base, tmp_path, {"activated": recipe}).values()
    other = with_linears(base, tmp_path / "trained", quantise_nf4)
    trained, served = (PeftReference(each, {"activated": folder}, torch.float32) for each in (other, base))
    found = compare(task_of(base, folder, NF4))
    prompts = [[*ids[: len(ids) // 2], *invocation, *ids[len(ids) // 2 :]] for ids in PROMPT_IDS]
    p, q = (
        torch.cat([each.logits("activated", ids)[(len(ids) - 2) // 2 :] for ids in prompts])
        .double()
        .log_softmax(-1)
        for each in (trained, served)
    )
    assert found.kl == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-3)
    assert (found.top1, found.tokens) == (
        pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean())),
        len(p),
    )


def test_no_more_than_a_linear_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = save_tiny(tmp_path / "base", FAMILIES["llama"] | {"num_hidden_layers": 8})
    (adapter,) = save_adapters(base, tmp_path, {"all": ADAPTERS["all"]}).values()
    read, alive, most = BaseWeights.rows, [], []

    def watched(self: BaseWeights, *site: Any) -> Any:
        for rows in read(self, *site):
            alive.append(weakref.ref(rows))
            gc.collect()
            most.append(sum(each() is not None for each in alive))
            yield rows

    monkeypatch.setattr(BaseWeights, "rows", watched)
    compare(task_of(base, adapter))
    assert len(most) >= 2 * 8 * 7
    assert max(most) <= 2


def test_more_memory_than_it_may_take_is_a_reason(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", FAMILIES["llama"])
    (adapter,) = save_adapters(base, tmp_path, {"all": ADAPTERS["all"]}).values()
    with pytest.raises(NotMeasured, match=r"it takes \d+ MiB of memory, and may take 16 MiB"):
        compare(task_of(base, adapter), 16 << 20)


def test_a_model_through_transformers_is_a_reason(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", OTHERS["olmo2"])
    (adapter,) = save_adapters(base, tmp_path, {"all": ADAPTERS["all"]}).values()
    with pytest.raises(NotMeasured, match="olmo2 runs through transformers"):
        compare(task_of(base, adapter))


def spoiled(adapter: Path, change: Callable[[torch.Tensor], torch.Tensor], tensor: str = "lora_B") -> Path:
    path = adapter / "adapter_model.safetensors"
    tensors = {k: change(v).contiguous() if tensor in k else v for k, v in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})
    return adapter


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda b: b * float("nan"), (NotMeasured, AdapterRefused), "finite"),
        (lambda b: b * 1e30, NotMeasured, "not finite"),
        (lambda b: b * 1e38 * 1e38, (NotMeasured, AdapterRefused), "finite"),
        (lambda b: b[:-1], AdapterRefused, "32 in the base, .* 31 in the adapter"),
    ],
    ids=["nan", "huge", "infinite", "shape"],
)
def test_a_hostile_adapter_is_a_reason(change: Any, error: Any, words: str, tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", FAMILIES["llama"])
    (adapter,) = save_adapters(base, tmp_path, {"all": ADAPTERS["all"]}).values()
    with pytest.raises(error, match=words):
        compare(task_of(base, spoiled(adapter, change)))


def test_a_base_that_is_not_finite_is_a_reason(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", FAMILIES["llama"])
    (adapter,) = save_adapters(base, tmp_path, {"all": ADAPTERS["all"]}).values()
    weights = load_file(base / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = float("inf")
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(BaseModelInvalid, match="up_proj of layer 1"):
        compare(task_of(base, adapter))


def test_a_token_beyond_the_vocabulary_is_a_reason(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", FAMILIES["llama"])
    (adapter,) = save_adapters(base, tmp_path, {"all": ADAPTERS["all"]}).values()
    with pytest.raises(ModelUnsupported, match="beyond the 131"):
        compare(task_of(base, adapter, prompts=[[1, VOCAB]]))


def test_the_figures_of_logits() -> None:
    """Worked by hand: p = (1/2, 1/2), q = (3/4, 1/4): ½·ln(2/3) + ½·ln 2."""
    trained = torch.tensor([[0.0, 0.0], [1.0, 3.0]])
    served = torch.tensor([[3.0, 1.0], [1.0, 3.0]]).log().where(torch.tensor([[True], [False]]), trained)
    found = compare_logits(trained, served)
    assert found == replace_figures(found, kl=pytest.approx(0.14384 / 2, abs=1e-5), tokens=2)
    assert compare_logits(trained, trained) == BaseErrorFigures(0.0, 1.0, 2)
    for bad in (float("nan"), float("inf"), -float("inf")):
        with pytest.raises(NotMeasured, match="not finite"):
            compare_logits(trained, torch.full_like(trained, bad))


def replace_figures(figures: BaseErrorFigures, **changes: Any) -> BaseErrorFigures:
    return BaseErrorFigures(**{"kl": figures.kl, "top1": figures.top1, "tokens": figures.tokens} | changes)


def test_prompts_are_several_kinds_of_text_and_few_tokens() -> None:
    assert json.loads(PROMPTS["json"])
    compile(PROMPTS["code"] + "    return means\n", "code", "exec")
    found = prompt_tokens(lambda text: list(text.encode()))
    assert len(found) == len(PROMPTS) == 4
    assert sum(map(len, found)) == MOST_TOKENS
    assert all(
        bytes(ids) == text.encode()[: len(ids)] for ids, text in zip(found, PROMPTS.values(), strict=True)
    )
    assert prompt_tokens(lambda text: [1, 2]) == [[1, 2]] * 4
