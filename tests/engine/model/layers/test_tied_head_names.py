"""LoRA of a tied head under the embedding's name, as tinker-cookbook writes it, answers as PEFT's LoRA on the head."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from loraplex.adapters.admission.base_model import load_base_spec
from loraplex.adapters.admission.inspection import inspect_adapter
from loraplex.adapters.errors import AdapterRefused
from loraplex.adapters.store.artifact_store import ArtifactStore
from loraplex.adapters.tied_head import name_tied_head
from support.adapters.peft_zoo import train
from support.engine.local_engine import LocalEngine
from support.models.checkpoints import FAMILIES, save_tiny

pytestmark = pytest.mark.usefixtures("one_torch_thread")

BEFORE, EMBEDDING = "base_model.model.", "model.embed_tokens"
Made = tuple[Path, Path, Any]


def as_tinker_names_it(folder: Path) -> None:
    """The head's LoRA of a file and a config of PEFT, under the embedding's name."""
    tensors = load_file(folder / "adapter_model.safetensors")
    renamed = {name.replace(f"{BEFORE}lm_head.", f"{BEFORE}{EMBEDDING}."): t for name, t in tensors.items()}
    save_file(renamed, folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    for field in ("rank_pattern", "alpha_pattern"):
        config[field] = {
            key.replace("lm_head", "embed_tokens"): value for key, value in config[field].items()
        }
    config["target_modules"] = ["embed_tokens", "q_proj"]
    (folder / "adapter_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module", params=["llama-tied", "qwen3"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A base, an adapter as tinker-cookbook writes it, and PEFT's model with the same values."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = save_tiny(tmp_path_factory.mktemp("base"), FAMILIES[request.param])
    chosen: dict[str, Any] = {
        "r": 4,
        "lora_alpha": 8,
        "rank_pattern": {"lm_head": 3},
        "alpha_pattern": {"lm_head": 9},
    }
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base),
        LoraConfig(task_type="CAUSAL_LM", target_modules=["lm_head", "q_proj"], **chosen),
    )
    train(model, 3, 0.5)
    model.create_or_update_model_card = lambda folder: None
    folder = tmp_path_factory.mktemp("adapter")
    model.save_pretrained(folder, save_embedding_layers=False)
    as_tinker_names_it(folder)
    return base, folder, model.eval()


def test_answers_are_those_of_lora_on_the_head(made: Made, tmp_path: Path) -> None:
    base, folder, model = made
    engine = LocalEngine(
        base, tmp_path / "work", dtype="float32", kernels="torch", num_threads=1, kv_cache_memory=8 << 20,
        adapter_memory=8 << 20, adapter_cpu_memory=8 << 20, max_num_batched_tokens=64, max_num_seqs=8,
    )  # fmt: skip
    prompt = [5, 9, 40, 77, 3, 21]
    engine.add("tuned", prompt, engine.publish(folder, name="tuned"), max_tokens=20)
    engine.add("base", prompt, max_tokens=20)
    engine.run()
    tokens = engine.tokens("tuned")
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([prompt + tokens[:-1]]), use_cache=False).logits[0]
    assert tokens == logits[len(prompt) - 1 :].argmax(-1).tolist()
    assert tokens != engine.tokens("base")
    engine.close()


def test_values_keep_their_bits_and_the_report_says_so(made: Made, tmp_path: Path) -> None:
    base, folder, _ = made
    spec = load_base_spec(base)
    with ArtifactStore(tmp_path / "store").begin_staging() as staging:
        shutil.copy(folder / "adapter_config.json", staging.config_path)
        shutil.copy(folder / "adapter_model.safetensors", staging.tensors_path)
        before = load_file(staging.tensors_path)
        found = name_tied_head(staging, spec)
        after = load_file(staging.tensors_path)
        adapter = inspect_adapter(staging.config_path, staging.tensors_path, spec, max_rank=64, earlier=found)
        assert name_tied_head(staging, spec) == []  # what has the head's name is left alone
    assert len(after) == len(before)
    for name, tensor in before.items():
        assert torch.equal(after[name.replace(EMBEDDING, "lm_head")], tensor)
    assert {site.scaling for site in adapter.sites if site.site == "lm_head"} == {3.0}
    assert adapter.report["checks"][0]["name"] == "tied_head"
    assert "was given the name lm_head" in adapter.report["checks"][0]["detail"]


def _both(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    heads = {
        name.replace(EMBEDDING, "lm_head"): t.clone() for name, t in tensors.items() if EMBEDDING in name
    }
    save_file(tensors | heads, path)


def _by_expression(folder: Path) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"target_modules": r".*(embed_tokens|q_proj)"}))


def _by_something_else(folder: Path) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"target_modules": [{"embed_tokens": 1}, []]}))


def _alpha_by_expression(folder: Path) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"alpha_pattern": {r"model\..*tokens": 9}}))


def _of_other_shape(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    name = f"{BEFORE}{EMBEDDING}.lora_B.weight"
    save_file(tensors | {name: tensors[name][:-1].clone()}, path)


@pytest.mark.parametrize(
    "change", [_both, _by_expression, _by_something_else, _alpha_by_expression, _of_other_shape]
)
def test_anything_else_of_the_embedding_stays_and_is_refused(
    change: Callable[[Path], None], made: Made, tmp_path: Path
) -> None:
    base, source, _ = made
    folder = shutil.copytree(source, tmp_path / "changed")
    change(folder)
    engine_spec = load_base_spec(base)
    with ArtifactStore(tmp_path / "store").begin_staging() as staging:
        shutil.copy(folder / "adapter_config.json", staging.config_path)
        shutil.copy(folder / "adapter_model.safetensors", staging.tensors_path)
        assert name_tied_head(staging, engine_spec) == []
        with pytest.raises(AdapterRefused):
            inspect_adapter(staging.config_path, staging.tensors_path, engine_spec, max_rank=64)


def test_a_head_of_its_own_is_not_meant(made: Made, tmp_path: Path) -> None:
    _, folder, _ = made
    untied = load_base_spec(save_tiny(tmp_path / "base", FAMILIES["llama"]))
    with ArtifactStore(tmp_path / "store").begin_staging() as staging:
        shutil.copy(folder / "adapter_config.json", staging.config_path)
        shutil.copy(folder / "adapter_model.safetensors", staging.tensors_path)
        assert name_tied_head(staging, untied) == []
