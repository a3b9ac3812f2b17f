"""The text part of each multimodal type, with the adapters that PEFT makes on the whole model: every name that a file
may have for the language model, and tensors of parts that no text goes through, which are left out."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from loraplex.adapters.admission.base_model import load_base_spec
from loraplex.adapters.admission.model_parts import DECODERS, MULTIMODAL, parts_of
from loraplex.engine.model.base import ModelUnsupported
from loraplex.kernels.lora.site_groups import HEAD
from support.adapters.peft_zoo import ALL_SITES
from support.engine.local_engine import LocalEngine
from support.models.checkpoints import edit_config
from support.models.loading import plan_model
from support.models.tiny_families import save_family
from support.models.tiny_multimodal import load_plain, make_adapter, save_multimodal

pytestmark = [
    pytest.mark.usefixtures("one_torch_thread"),
    pytest.mark.filterwarnings("ignore:Found missing adapter keys"),
]

TOKENS = 20
RECIPES: dict[str, Any] = {"all-linear": "all-linear", "seven": ALL_SITES}
PROMPTS = [[(7 * n + 11 * length) % 470 + 3 for n in range(length)] for length in (9, 37)]
OFTEN = (
    "qwen2_5_vl", "mistral3:ministral3", "llava", "smolvlm", "gemma3", "paligemma", "qwen3_5", "cwm", "seed_oss",
)  # fmt: skip
"""Those of every run: one for each way in which names, ties, ropes and decoders differ."""
ALIASES = ("cwm", "internlm3", "iquestcoder", "ministral", "ministral3", "seed_oss")
"""Text models with the plan of another family."""
FAMILIES = dict.fromkeys((*OFTEN, *MULTIMODAL, *ALIASES, "internvl:qwen3", "llava:qwen2"))
NO_ADAPTERS = {
    ("fuyu", "seven"),
    *(
        (family, recipe)
        for family in ("qwen3_omni_moe", "qwen3_omni_moe_thinker", "glm4v_moe", "muse_glimmer")
        for recipe in RECIPES
    ),
}
"""PEFT finds no such modules or cannot adapt one of them, makes LoRA on experts, or on one of two linears of a name."""


def often(families: Any) -> list[Any]:
    return [pytest.param(f, marks=() if f in OFTEN else pytest.mark.soak) for f in families]


def save(family: str, out: Path) -> Path:
    model_type, _, text = family.partition(":")
    return save_family(family, out) if family in ALIASES else save_multimodal(model_type, out, text=text)


def old_names(name: str, decoder: str, own: str) -> str:
    """The name of a tensor in a file that calls the language model by `decoder`."""
    before, after = "base_model.model.", decoder.startswith("model.")
    path = name.removeprefix(before)
    if path.startswith(own):
        return before + decoder + path.removeprefix(own)
    return before + (path if after else path.removeprefix("model.").replace("tower.", "tower.vision_model."))


def check_equal(engine: LocalEngine, name: str, model: Any) -> None:
    """Teacher-forced: each token is the likeliest after those before it, with the log probability that it has."""
    for number, prompt in enumerate(PROMPTS):
        tokens = engine.tokens(f"{name}/{number}")
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([prompt + tokens]), use_cache=False).logits[0]
        rows = logits[len(prompt) - 1 : -1].float()
        assert tokens == rows.argmax(-1).tolist(), name
        scores = (event.scores for event in engine.events[f"{name}/{number}"])
        found = [np.frombuffer(part.output.values, "<f4") for part in scores if part is not None]
        want = rows.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert np.abs(np.concatenate(found) - want.numpy()).max() < 1e-3, name


@pytest.mark.parametrize("family", often(FAMILIES))
def test_base_and_adapters_equal_transformers_and_peft(family: str, tmp_path: Path) -> None:
    base = save(family, tmp_path / "base")
    models = {
        recipe: make_adapter(base, tmp_path / recipe, target_modules=targets)
        for recipe, targets in RECIPES.items()
        if (family, recipe) not in NO_ADAPTERS
    }
    parts = parts_of(family.partition(":")[0])
    own = f"model.{parts.decoder}."
    folders = {recipe: tmp_path / recipe for recipe in models}
    for number, (decoder, _) in enumerate(DECODERS if "seven" in models and parts.others else ()):
        folders[f"named-{number}"] = shutil.copytree(tmp_path / "seven", tmp_path / f"named-{number}")
        path = folders[f"named-{number}"] / "adapter_model.safetensors"
        tensors = {old_names(name, decoder, own): tensor for name, tensor in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})
    engine = LocalEngine(
        base, tmp_path / "work", dtype="float32", kernels="torch", num_threads=1, kv_cache_memory=8 << 20,
        adapter_memory=8 << 20, adapter_cpu_memory=8 << 20, max_num_batched_tokens=64, max_num_seqs=32,
    )  # fmt: skip
    try:
        refs = {name: engine.publish(folder, name=name) for name, folder in folders.items()}
        for name in ("base", *folders):
            for number, prompt in enumerate(PROMPTS):
                engine.add(f"{name}/{number}", prompt, refs.get(name), max_tokens=TOKENS, logprobs=0)
        engine.run()
        check_equal(engine, "base", load_plain(base))
        for name in folders:
            check_equal(engine, name, models.get(name) or models["seven"])
    finally:
        engine.close()


@pytest.mark.parametrize("kernels", ["torch", "numba"])
def test_ministral_3_scales_queries_by_position(kernels: str, tmp_path: Path) -> None:
    """Beyond the first length, which is 16,384 in its files; the rows of a step have several scales."""
    base = save("mistral3:ministral3", tmp_path / "base")
    text = json.loads((base / "config.json").read_text())["text_config"]
    scaled = text["rope_parameters"] | {"original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.7}
    edit_config(base, text_config=text | {"rope_parameters": scaled})
    model = make_adapter(base, tmp_path / "seven", target_modules=ALL_SITES)
    engine = LocalEngine(
        base, tmp_path / "work", dtype="float32", kernels=kernels, num_threads=1, kv_cache_memory=8 << 20,
        adapter_memory=8 << 20, adapter_cpu_memory=8 << 20, max_num_batched_tokens=24,
    )  # fmt: skip
    try:
        refs = {"base": None, "seven": engine.publish(tmp_path / "seven")}
        for name, ref in refs.items():
            for number, prompt in enumerate(PROMPTS):
                engine.add(f"{name}/{number}", prompt, ref, max_tokens=TOKENS, logprobs=0)
        engine.run()
        check_equal(engine, "base", load_plain(base))
        check_equal(engine, "seven", model)
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"llama_4_scaling_beta": None}, "llama_4_scaling_beta"),
        ({"llama_4_scaling_beta": [0.1]}, "llama_4_scaling_beta"),
        ({"other": 3}, "other"),
    ],
)
def test_a_scale_that_is_none_is_refused(said: dict[str, Any], words: str, tmp_path: Path) -> None:
    base = save("ministral3", tmp_path / "base")
    rope = json.loads((base / "config.json").read_text())["rope_parameters"]
    edit_config(base, rope_parameters=rope | said)
    with pytest.raises(ModelUnsupported, match=words):
        plan_model(base, kernels="torch")


@pytest.mark.parametrize("tied", [False, True])
def test_the_whole_model_says_whether_its_head_is_tied(tied: bool, tmp_path: Path) -> None:
    """As transformers takes it: not the text part, whose config.json may say otherwise, or nothing."""
    base = save_multimodal("mistral3", tmp_path, tie_word_embeddings=tied)
    text = json.loads((base / "config.json").read_text())["text_config"]
    for said in (None, False, True):
        edit_config(base, text_config=text | ({} if said is None else {"tie_word_embeddings": said}))
        assert plan_model(base, kernels="torch").spec.tied is tied
        assert load_base_spec(base).tied_head is tied


def test_a_head_that_a_default_ties_is_the_embedding(tmp_path: Path) -> None:
    """Of the whole, whose config.json leaves it out, whatever the text part says for itself."""
    base = save_multimodal("internvl", tmp_path)
    config = json.loads((base / "config.json").read_text())
    text = config["text_config"] | {"tie_word_embeddings": False}
    assert config.pop("tie_word_embeddings", True) is True
    (base / "config.json").write_text(json.dumps(config | {"text_config": text}))
    assert plan_model(base, kernels="torch").spec.tied is True
    spec = load_base_spec(base)
    assert spec.tied_head is True
    assert (0, HEAD) in spec.sites


def test_a_flat_config_of_older_files_is_the_same_model(tmp_path: Path) -> None:
    """Qwen2-VL's files on hubs have the text part's fields beside those of the whole, and a rope "mrope"."""
    base = save_multimodal("qwen2_vl", tmp_path)
    planned, spec = plan_model(base, kernels="torch").spec, load_base_spec(base)
    config = json.loads((base / "config.json").read_text())
    text = config.pop("text_config")
    rope = {"type": "mrope", "mrope_section": text.pop("rope_parameters")["mrope_section"]}
    flat = text | config | {"rope_scaling": rope, "rope_theta": 10000.0}
    (base / "config.json").write_text(json.dumps(flat))
    found = plan_model(base, kernels="torch").spec
    assert (found.layers, found.rope, found.tied) == (planned.layers, planned.rope, planned.tied)
    assert found.ignored == ()
    assert load_base_spec(base).sites == spec.sites


def test_a_text_part_may_leave_out_what_its_type_has_by_default(tmp_path: Path) -> None:
    base = save_multimodal("llava", tmp_path)
    before = load_base_spec(base)
    text = json.loads((base / "config.json").read_text())["text_config"]
    del text["num_hidden_layers"]
    edit_config(base, text_config=text)
    assert load_base_spec(base).num_layers == before.num_layers == 2


def test_every_type_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs/models.md").read_text()
    section = page.split("## Multimodal models")[1].split("## All families")[0]
    rows = re.findall(r"^\| (?:of a family|through).*? \| (.*) \|$", section, re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(MULTIMODAL)
