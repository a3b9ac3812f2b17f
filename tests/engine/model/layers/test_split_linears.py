"""LoRA on in_proj_q, in_proj_k and in_proj_v, as trainers save it that take a delta net's in_proj_qkv apart: joined at
upload, with the answers of a model whose linears are apart, or refused in words."""

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
from loraplex.adapters.admission.model_parts import DECODERS
from loraplex.adapters.errors import AdapterRefused
from loraplex.adapters.split_linears import PARTS, WHOLE, join_split_linears
from loraplex.adapters.store.artifact_store import ArtifactStore
from support.adapters.peft_zoo import ALL_SITES, train
from support.engine.local_engine import LocalEngine
from support.models.checkpoints import FAMILIES, save_tiny

pytestmark = pytest.mark.usefixtures("one_torch_thread")

SPLIT = [*ALL_SITES, *PARTS, "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]
CHOSEN: dict[str, dict[str, Any]] = {
    "plain": {"r": 3, "lora_alpha": 7},
    "rslora": {"r": 5, "lora_alpha": 4, "use_rslora": True},
    "dora": {"r": 4, "lora_alpha": 8, "use_dora": True},
    "ranks": {
        "r": 4, "lora_alpha": 8, "rank_pattern": {"in_proj_v": 8, "q_proj": 2},
        "alpha_pattern": {"linear_attn.in_proj_v": 16, "in_proj_z": 5},
    },
    "some": {"r": 2, "lora_alpha": 6, "target_modules": ["in_proj_v", "in_proj_q"], "layers_to_transform": [2]},
    "by-expression": {"r": 4, "lora_alpha": 8, "target_modules": r".*\.linear_attn\.in_proj_[qkvz]"},
}  # fmt: skip


class _Joined(torch.nn.Module):
    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = [layer]  # no module of this one

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([getattr(self.layer[0], part)(x) for part in PARTS], -1)


def split_model(base: Path) -> Any:
    """The model with a linear for each of queries, keys and values."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base)
    for layer in (module.linear_attn for module in model.model.layers if hasattr(module, "linear_attn")):
        weight = layer.in_proj_qkv.weight
        sizes = (layer.key_dim, layer.key_dim, layer.value_dim)
        for part, rows in zip(PARTS, weight.split(sizes), strict=True):
            linear = torch.nn.Linear(weight.shape[1], len(rows), bias=False)
            linear.weight.data.copy_(rows)
            setattr(layer, part, linear)
        layer.in_proj_qkv = _Joined(layer)
    return model.eval()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("base"), FAMILIES["qwen3_5-3"])


@pytest.fixture(scope="module")
def made(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Path], dict[str, Any]]:
    """Folders, and the models that PEFT saved them of."""
    from peft import LoraConfig, get_peft_model

    out = tmp_path_factory.mktemp("adapters")
    folders, models = {}, {}
    for number, (name, options) in enumerate(CHOSEN.items()):
        model = get_peft_model(
            split_model(base), LoraConfig(task_type="CAUSAL_LM", **{"target_modules": SPLIT} | options)
        )
        train(model, number, 0.3)
        model.create_or_update_model_card = lambda folder: None
        model.save_pretrained(out / name, save_embedding_layers=False)
        folders[name], models[name] = out / name, model.eval()
    return folders, models


def test_answers_are_those_of_a_model_with_the_linears_apart(
    base: Path, made: tuple[dict[str, Path], dict[str, Any]], tmp_path: Path
) -> None:
    folders, models = made
    engine = LocalEngine(
        base, tmp_path / "work", dtype="float32", kernels="torch", num_threads=1, kv_cache_memory=8 << 20,
        adapter_memory=8 << 20, adapter_cpu_memory=8 << 20, max_num_batched_tokens=64, max_num_seqs=8,
    )  # fmt: skip
    prompt = [5, 9, 40, 77, 3, 21]
    for name, folder in folders.items():
        engine.add(name, prompt, engine.publish(folder, name=name), max_tokens=20)
    engine.run()
    for name, model in models.items():
        tokens = engine.tokens(name)
        with torch.inference_mode():
            want = model(input_ids=torch.tensor([prompt + tokens[:-1]]), use_cache=False).logits[0]
        assert tokens == want[len(prompt) - 1 :].argmax(-1).tolist(), name
    engine.close()


def joined(base: Path, folder: Path, tmp_path: Path, max_rank: int = 64) -> tuple[Any, dict[str, Any], Any]:
    """The report's first check, the tensors and the spec."""
    with ArtifactStore(tmp_path / "store").begin_staging() as staging:
        shutil.copy(folder / "adapter_config.json", staging.config_path)
        shutil.copy(folder / "adapter_model.safetensors", staging.tensors_path)
        spec = load_base_spec(base)
        found = join_split_linears(staging, spec, max_rank)
        adapter = inspect_adapter(
            staging.config_path, staging.tensors_path, spec, max_rank=max_rank, earlier=found
        )
        return adapter.report["checks"][0], load_file(staging.tensors_path), adapter


@pytest.mark.parametrize("decoder", [name for name, _ in DECODERS])
def test_values_keep_their_bits_under_every_name_of_the_decoder(
    decoder: str, base: Path, made: tuple[dict[str, Path], dict[str, Any]], tmp_path: Path
) -> None:
    folder = shutil.copytree(made[0]["ranks"], tmp_path / "named")
    path, before = folder / "adapter_model.safetensors", "base_model.model."
    tensors = {
        name.replace(f"{before}model.", before + decoder): t.half() for name, t in load_file(path).items()
    }
    save_file(tensors, path)
    check, found, adapter = joined(base, folder, tmp_path)
    assert check["name"] == "split_linears"
    assert "in_proj_qkv, exactly: the rank is 16 there" in check["detail"]
    layer = f"{before}{decoder}layers.1.linear_attn."
    rows = rank = 0
    whole_a, whole_b = found[f"{layer}{WHOLE}.lora_A.weight"], found[f"{layer}{WHOLE}.lora_B.weight"]
    left = whole_b.clone()
    for part in PARTS:
        a, b = tensors[f"{layer}{part}.lora_A.weight"], tensors[f"{layer}{part}.lora_B.weight"]
        assert torch.equal(whole_a[rank : rank + len(a)], a)
        assert torch.equal(whole_b[rows : rows + len(b), rank : rank + len(a)], b)
        left[rows : rows + len(b), rank : rank + len(a)] = 0
        rows, rank = rows + len(b), rank + len(a)
    assert whole_b.shape == (rows, rank)
    assert not left.any()
    assert {site.scaling for site in adapter.sites if site.site == WHOLE} == {2.0}


def test_parts_with_one_a_keep_its_rank(
    base: Path, made: tuple[dict[str, Path], dict[str, Any]], tmp_path: Path
) -> None:
    folder = shutil.copytree(made[0]["plain"], tmp_path / "shared")
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    for name in tensors:
        if "in_proj_k.lora_A" in name or "in_proj_v.lora_A" in name:
            tensors[name] = tensors[name.replace("proj_k.", "proj_q.").replace("proj_v.", "proj_q.")].clone()
    save_file(tensors, path)
    check, found, adapter = joined(base, folder, tmp_path, max_rank=3)
    assert "(all parts of a linear have one A): the rank is 3" in check["detail"]
    layer = "base_model.model.model.layers.1.linear_attn."
    parts = [tensors[f"{layer}{part}.lora_B.weight"] for part in PARTS]
    assert torch.equal(found[f"{layer}{WHOLE}.lora_B.weight"], torch.cat(parts))
    assert torch.equal(found[f"{layer}{WHOLE}.lora_A.weight"], tensors[f"{layer}in_proj_v.lora_A.weight"])
    assert {site.scaling for site in adapter.sites if site.site == WHOLE} == {7 / 3}


Change = Callable[[dict[str, Any], dict[str, Any]], Any]


def _without(part: str, what: str = "") -> Change:
    def change(tensors: dict[str, Any], config: dict[str, Any]) -> None:
        for name in [name for name in tensors if f".1.linear_attn.{part}.{what[1:]}" in name]:
            del tensors[name]

    return change


def _set(**fields: Any) -> Change:
    return lambda tensors, config: config.update(fields)


def _edit(part: str, made: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda tensors, config: tensors.update(
        {name: made(t).clone() for name, t in tensors.items() if f".{part}." in name}
    )


def _whole_too(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    more = {name.replace("_q.", "_qkv."): t.clone() for name, t in tensors.items() if ".in_proj_q." in name}
    tensors.update(more)


def _not_named(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    config["target_modules"].remove("in_proj_k")


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("plain", _without("in_proj_k"), "the config names model.layers.1.linear_attn.in_proj_k, but no tensors came"),
        ("plain", _not_named, "tensors came for model.layers.1.linear_attn.in_proj_k, which the config does not name"),
        ("plain", _set(alpha_pattern={"in_proj_k": 3}), "in_proj_v have several scalings"),
        ("plain", _set(r=4), "in_proj_q has rank 3 in the tensors and 4 in the config"),
        ("plain", _edit("in_proj_k", torch.Tensor.half), "are of several dtypes: save them in one"),
        ("plain", _edit("in_proj_v", lambda t: t[:, :2]), "are not [rank, 32] and [96, rank]"),
        ("plain", _whole_too, "and for parts of it: model.layers.1.linear_attn.in_proj_q,"),
        ("ranks", _set(), "together are LoRA of rank 16 on in_proj_qkv; this server accepts at most 15"),
        ("dora", _without("in_proj_k", ".lora_magnitude_vector"), "DoRA on model.layers.1.linear_attn.in_proj_q,"),
    ],
)  # fmt: skip
def test_parts_that_make_no_linear_are_refused(
    name: str,
    change: Change,
    words: str,
    base: Path,
    made: tuple[dict[str, Path], dict[str, Any]],
    tmp_path: Path,
) -> None:
    folder = shutil.copytree(made[0][name], tmp_path / "changed")
    path, config_path = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    tensors, config = load_file(path), json.loads(config_path.read_text())
    change(tensors, config)
    save_file(tensors, path)
    config_path.write_text(json.dumps(config))
    with pytest.raises(AdapterRefused) as caught:
        joined(base, folder, tmp_path, max_rank=15)
    assert words in str(caught.value)
