"""What cannot be served is refused from the config, in words, by all who read it: the server, its engine, the doctor
and the plan. No config of transformers ends any of them otherwise."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from loraplex.adapters.admission.base_model import load_base_spec
from loraplex.adapters.errors import BaseModelInvalid, LoraplexError
from loraplex.app.doctor.torch_checks import Questions, _model, _plan, _told
from loraplex.engine.model.base import ModelUnsupported
from support.models.checkpoints import FAMILIES, OTHERS, edit_config, save_tiny
from support.models.loading import load_model, outline_model, plan_model
from support.models.tiny_families import save_family, small_config
from tools.families import MARKS, PAGE, default_configs, render, verdicts

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def ask_doctor(path: Path) -> None:
    questions = Questions(
        device="cpu", dtype="float32", quantise="none", kv_cache_dtype="auto", kernels="torch", attention="auto",
        threads=1, max_model_len=0, batch_invariant=False, speculation="off", model_dir=str(path),
    )  # fmt: skip
    told = _told(lambda: _model(_plan(questions)))
    if "wrong" in told:
        raise ModelUnsupported(told["wrong"])


READERS: tuple[Callable[[Path], Any], ...] = (
    load_base_spec,
    lambda path: load_model(path, "cpu"),
    plan_model,
    lambda path: outline_model(path, torch.device("cpu"), "auto"),
    ask_doctor,
)


def said_by_all(path: Path, readers: tuple[Callable[[Path], Any], ...] = READERS) -> str:
    said = set()
    for look in readers:
        with pytest.raises((BaseModelInvalid, ModelUnsupported)) as error:
            look(path)
        said.add(error.value.message)
    (message,) = said
    assert "\n" not in message
    assert len(message) < 600
    return message


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "nemotron_h", "layers_block_type": ["attention", "moe"]}, "experts.*layers_block_type: moe"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M*E"}, "experts.*hybrid_override_pattern: E"),
        ({"model_type": "lfm2_moe", "layer_types": ["conv", "full_attention"]}, "convolutions"),
        ({"model_type": "glm4_moe_lite", "kv_lora_rank": 512}, r"\(MLA\)"),
        ({"model_type": "deepseek_v32", "kv_lora_rank": 512, "index_topk": 2048}, r"\(MLA\)"),
        ({"model_type": "glm5_next_text", "index_topk": 2048}, "indexer"),
        ({"model_type": "deepseek_v4"}, r"\(MLA\)"),
        ({"model_type": "mimo_v2_flash"}, "values are narrower"),
        ({"model_type": "dbrx", "n_layers": 4}, "counts layers"),
        ({"model_type": "xglm", "num_layers": 4}, "own code"),
        ({"model_type": "xlm", "n_layers": 4, "emb_dim": 64}, "XLM is not served: it is an encoder"),
        ({"model_type": "kosmos-2", "text_config": {"layers": 2}, "vision_config": {}}, "kosmos-2 is multimodal"),
        ({"model_type": "blip", "vision_config": {}}, "blip is multimodal, and its text part is not served"),
        ({"model_type": "of_tomorrow", "layer_types": ["chunked_attention"]}, r"\(layer_types: chunked_attention\)"),
    ],
)  # fmt: skip
def test_a_property_is_named_by_all_before_weights_are_read(
    config: dict[str, Any], words: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))  # and no weights
    message = said_by_all(tmp_path)
    assert message.endswith(f"that are ({tmp_path})")
    assert "docs/models.md lists " in message
    assert re.search(words, message)


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        (FAMILIES["llama"], {"num_key_value_heads": 4}),
        (FAMILIES["llama"], {"hidden_act": "gelu"}),
        (FAMILIES["gemma3"], {"head_dim": 32}),
        (OTHERS["granite"], {"num_attention_heads": 2}),
        (OTHERS["granite"], {"num_key_value_heads": 4}),
        ({"model_type": "cohere"}, {"head_dim": 16}),
    ],
)
def test_fields_that_differ_by_layer_are_refused_in_words(
    options: dict[str, Any], sizes: dict[str, Any], tmp_path: Path
) -> None:
    """transformers raises a RuntimeError for a field that its `per_layer_config` sets, which is no AttributeError."""
    path = save_tiny(tmp_path, options)
    edit_config(path, per_layer_config={"1": sizes})
    message = said_by_all(path, READERS[1:])
    assert next(iter(sizes)) in message
    assert "Error:" not in message


@pytest.mark.parametrize(
    "field", ["rope_scaling", "rope_parameters", "text_config", "layer_types", "num_hidden_layers"]
)
@pytest.mark.parametrize("value", ["x", -3, ["x"], True])
def test_fields_of_another_type_are_told(field: str, value: Any, tmp_path: Path) -> None:
    path = save_tiny(tmp_path, FAMILIES["llama"])
    edit_config(path, **{field: value})
    words = [words_of(look, path) for look in (load_base_spec, plan_model)]
    assert any(words) or field in ("text_config", "layer_types")


def test_a_model_without_sites_is_refused_in_the_same_words(tmp_path: Path) -> None:
    path = save_tiny(
        tmp_path, {"model_type": "xmod", "languages": ["a"], "default_language": "a", "is_decoder": True}
    )
    assert "it has none of the linears that adapters change" in said_by_all(
        path, (READERS[0], READERS[3], READERS[4])
    )


@pytest.fixture
def unknown_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model type "llama_conv", which is Llama and a module that tells what it computes."""

    class Config(LlamaConfig):
        model_type = "llama_conv"

    class Model(LlamaForCausalLM):
        config_class = Config

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model.mixer = torch.nn.Conv1d(4, 4, 3)

    monkeypatch.setitem(CONFIG_MAPPING._extra_content, Config.model_type, Config)
    monkeypatch.setitem(MODEL_FOR_CAUSAL_LM_MAPPING._extra_content, Config, Model)


@pytest.mark.usefixtures("unknown_family")
def test_modules_tell_what_no_table_knows(tmp_path: Path) -> None:
    """Without a file of weights: nothing of them is read."""
    path = save_tiny(tmp_path, FAMILIES["llama"])
    edit_config(path, model_type="llama_conv", architectures=None)
    (path / "model.safetensors").unlink()
    message = said_by_all(path, (READERS[1], READERS[3], READERS[4]))
    assert message.startswith("llama_conv is not served: ")
    assert "convolutions" in message


def test_the_page_has_what_becomes_of_each_family() -> None:
    _, _, rest = PAGE.read_text("utf-8").partition(MARKS[0])
    page = rest.partition(MARKS[1])[0]
    if f"by transformers {version('transformers')} " not in page:
        pytest.skip("the page lists the families of another transformers")
    assert page == render(), "run python -m tools.families --write"


def changed(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Configs like it that no tool writes."""
    yield config | {"per_layer_config": {"0": {"head_dim": 8, "num_key_value_heads": 1}}}
    yield config | {"layer_types": "full_attention", "rope_parameters": 3, "kv_lora_rank": "512"}


def words_of(look: Callable[[Path], Any], path: Path) -> str:
    try:
        look(path)
    except LoraplexError as error:
        return error.message
    return ""


def test_no_config_of_transformers_ends_in_anything_but_words(tmp_path: Path) -> None:
    for family, config in default_configs():
        for made in changed(config):
            (tmp_path / "config.json").write_text(json.dumps(made))
            for look in (load_base_spec, plan_model):
                words = words_of(look, tmp_path)
                assert "\n" not in words, family
                assert len(words) < 700, family


@pytest.mark.soak
def test_what_the_page_lists_as_compared_at_the_start_passes(tmp_path: Path) -> None:
    """Each text decoder that runs through transformers, as a tiny random checkpoint."""
    failed, started = {}, 0
    for family, verdict in verdicts():
        if not verdict.startswith("through") or family not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            continue
        config = small_config(family)
        with torch.device("meta"):
            sizes = AutoModelForCausalLM.from_config(config).num_parameters()
        if sizes > 20_000_000:
            continue  # a wrapper, whose text part is not made small
        path = save_family(family, tmp_path / family)
        started += 1
        if words := words_of(load_base_spec, path) or words_of(lambda made: load_model(made, "cpu"), path):
            failed[family] = words
        shutil.rmtree(path)
    assert started > 55
    assert not failed
