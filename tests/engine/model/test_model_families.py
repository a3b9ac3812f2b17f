"""Families with windows, softcaps and packed linears through the whole engine: a sharded checkpoint, adapters by PEFT,
prompts in chunks beside others' decodes, prefixes that are shared, and a pool so small that sequences start over."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from loraplex.adapters.admission.base_model import load_base_spec
from loraplex.adapters.errors import BaseModelInvalid
from loraplex.engine.model.base import ModelUnsupported
from loraplex.engine.model.model_plan import TESTED
from loraplex.engine.model.wrapped import TransformersDecoder
from support.adapters.tiny_adapters import ADAPTERS, save_adapters, with_gates
from support.engine.mixed_questions import ask_mixed, check_answers, cramped_engine
from support.models.checkpoints import (
    FAMILIES,
    edit_config,
    reference_logits,
    save_tiny,
    save_tiny_gemma3_with_vision,
    save_tiny_with_vision,
)
from support.models.loading import load_model, outline_model, plan_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")

OUTPUTS = 40
OLMO3 = {
    "model_type": "olmo3", "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip
"""Through transformers, after the probe."""


SEEING = {"gemma3-vision": "gemma3", "gemma4-e2b-vision": "gemma4", "gemma4-unified-vision": "gemma4_unified"}


@pytest.mark.parametrize(
    "family",
    [
        "mistral-window",
        "qwen2-window",
        "phi3",
        "gemma2",
        "gemma3",
        "gemma4",
        "lfm2",
        "lfm3",
        *SEEING,
    ],
)
def test_tokens_are_those_of_transformers_and_peft(family, tmp_path):
    options = FAMILIES[family.removesuffix("-vision")]
    if family in SEEING:
        base = save_tiny_with_vision(tmp_path / "base", SEEING[family], options, max_shard_size="20KB")
    else:
        base = save_tiny(tmp_path / "base", options, max_shard_size="20KB")
    assert len(list(base.glob("*.safetensors"))) > 1
    adapters = save_adapters(base, tmp_path, with_gates(ADAPTERS, options))
    of_family = {"lfm2": 8, "lfm3": 13}
    num_blocks = of_family.get(family, 10 if family.startswith("gemma4") else 12)
    engine = cramped_engine(base, tmp_path / "work", max_num_seqs=8, num_blocks=num_blocks)
    answered = ask_mixed(
        engine, adapters, seed=f"{family} 5", requests=12, tokens=OUTPUTS, loaded=True, finds=True
    )
    stats = engine.core.stats()
    engine.close()
    # Where all layers see a window, sequences take no more memory as they grow.
    assert stats.num_preemptions > 0 or family in ("mistral-window", "phi3")
    assert stats.prefix_cache_hits > 0
    check_answers(answered, base, adapters)


def test_a_model_through_transformers_gives_a_windows_blocks_back(tmp_path):
    base = save_tiny(tmp_path / "base", OLMO3)
    engine = cramped_engine(base, tmp_path / "work")
    prompt = [3 + number * 7 % 120 for number in range(60)]
    held = []
    for name in "ab":
        engine.add(name, prompt, max_tokens=40)
        while engine.core.has_work:
            engine.step()
            held.append(engine.core.stats().num_kv_blocks_used)
        # 7 blocks of the layer that sees all 99 positions, and two each of those that see 9.
        assert held[-2] == 7 + 2 * 2
    tokens, hits = engine.tokens("a"), engine.core.stats().prefix_cache_hits
    again = engine.tokens("b")
    engine.close()
    assert hits == 48
    expected = reference_logits(base, [prompt + tokens[:-1]])[0][len(prompt) - 1 :].argmax(-1)
    assert tokens == again == expected.tolist()


def test_a_window_that_only_the_config_has_gives_nothing_back(tmp_path):
    decoder = load_model(save_tiny(tmp_path, OLMO3), "cpu", "float32")
    assert [kind.window for kind in decoder.shape.caches] == [9, None, 9]
    decoder.eager_model.model.layers[2].self_attn.sliding_window = None
    again = TransformersDecoder(decoder.eager_model, decoder.shape)
    assert [kind.window for kind in again.shape.caches] == [None] * 3


def with_text_config(**changes):
    """Change fields of the text part's config."""

    def change(path):
        text = json.loads((path / "config.json").read_text())["text_config"]
        edit_config(path, text_config=text | changes)

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: edit_config(path, quantization_config={"quant_method": "hqq"}), "quantised by 'hqq'"),
        (with_text_config(quantization_config={"quant_method": "hqq"}), "quantised by 'hqq'"),
        (with_text_config(attn_logit_softcapping=50.0), "attn_logit_softcapping"),
        (with_text_config(use_bidirectional_attention=True), "use_bidirectional_attention"),
        (with_text_config(num_hidden_layers=2, layer_types=["full_attention"] * 2), r"layers\.2"),
    ],
)
def test_a_text_part_that_means_something_else_is_refused(change, words, tmp_path):
    path = save_tiny_gemma3_with_vision(tmp_path, FAMILIES["gemma3"])
    load_model(path, "cpu")
    change(path)
    with pytest.raises(ModelUnsupported, match=words):
        load_model(path, "cpu")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "phi4_multimodal"}, "phi4_multimodal is multimodal"),
        ({"model_type": "mllama"}, "mllama is multimodal"),
        ({"model_type": "blip-2"}, "blip-2 is multimodal"),
        ({"model_type": "t5"}, "T5 is not served: it is an encoder"),
        ({"model_type": "prophetnet"}, "prophetnet is an encoder"),
        ({"model_type": "phi3", "quantization_config": {"quant_method": "hqq"}}, "quantised by 'hqq'"),
        ({"model_type": "whisper"}, "encoder"),
        ({"model_type": "gemma2", "hidden_activation": "gelu"}, "hidden_activation"),
        ({"model_type": "gemma2", "query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        (
            {"model_type": "gemma2", "layer_types": ["chunked_attention"] * 26},
            "chunked_attention|layer_types",
        ),
        ({"model_type": "mistral", "sliding_window": -1}, "sliding_window"),
        ({"model_type": "phi3", "lm_head_bias": True}, "lm_head_bias"),
        ({"model_type": "gemma4_text", "use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"model_type": "gemma4_text", "vocab_size_per_layer_input": 9}, "fewer than the 262144 tokens"),
        ({"model_type": "gemma4_text", "num_kv_shared_layers": 29}, "num_kv_shared_layers is 29"),
        ({"model_type": "gemma4_text", "per_layer_config": {"1": {"head_dim": 4}}}, "not homogeneous"),
        ({"model_type": "gemma4_text", "per_layer_config": {"1": {"rms_norm_eps": 4.0}}}, "rms_norm_eps"),
        ({"model_type": "gemma4_text", "per_layer_config": {"1": {"skip": ["mlp"]}}}, "not homogeneous"),
    ],
)
def test_unsupported_model_is_refused_in_one_line_before_any_weight_is_read(config, words, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    for look in (plan_model, lambda path: load_model(path, "cpu")):
        with pytest.raises(ModelUnsupported, match=words) as error:
            look(tmp_path)
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 600


def test_both_forms_of_gemma4s_config_are_one_plan(tmp_path):
    """As it is published, and as transformers writes it since it has per_layer_config."""
    base = save_tiny(tmp_path, FAMILIES["gemma4"])
    assert "per_layer_config" in json.loads((base / "config.json").read_text())
    written = plan_model(base).spec
    edit_config(base, per_layer_config=None, global_head_dim=16, num_global_key_value_heads=1)
    assert plan_model(base).spec == written
    assert [kind.mixer.cache.head_dim for kind in written.layers] == [8, 8, 16]
    edit_config(base, global_head_dim=24)
    assert plan_model(base).spec != written


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "mimo_v2_flash", "num_hidden_layers": 24},
        {"architectures": ["GPT2LMHeadModel"], "n_layer": 12},
        {"model_type": "bert", "num_hidden_layers": 12},
        {"model_type": "t5", "num_layers": 6},
        {"hidden_size": 64},
    ],
)
def test_all_who_read_a_config_refuse_it_in_the_same_words(config, tmp_path):
    """What serves, its engine, the doctor and the plan."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    said = set()
    for look in (
        load_base_spec,
        lambda path: load_model(path, "cpu"),
        plan_model,
        lambda path: outline_model(path, torch.device("cpu"), "auto"),
    ):
        with pytest.raises((BaseModelInvalid, ModelUnsupported)) as error:
            look(tmp_path)
        said.add(error.value.message)
    assert len(said) == 1, said


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "gemma2"}, "gemma2 on the fused decoder, up to 8192"),
        ({"model_type": "phi3"}, "phi3 on the fused"),
        ({"model_type": "starcoder2"}, "starcoder2 through transformers, tested"),
        ({"model_type": "cohere"}, "compared"),
    ],
)
def test_served_models_name_their_decoder(config, words, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert words in plan_model(tmp_path).explain()


def test_every_family_is_documented():
    from loraplex.engine.model.families.table import is_fused

    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \|.*\|.*\|.*\|$", page.split("## Through")[0], re.MULTILINE)
    fused = set(listed) - {"model_type", "gemma3", "gemma4", "gemma4_unified"}  # these by their text parts
    assert fused == {options["model_type"] for options in FAMILIES.values()}
    assert all(is_fused(name) for name in fused)
    tested = page.split("## Through transformers")[1].split(" are tested")[0]
    assert set(re.findall(r"`(\w+)`", tested)) == TESTED
