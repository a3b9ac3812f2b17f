"""Families with windows, softcaps and packed linears through the whole engine: a sharded checkpoint, adapters by PEFT,
prompts in chunks beside others' decodes, prefixes that are shared, and a pool so small that sequences start over."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
import torch

from loraplex.engine.kv_memory import block_bytes
from loraplex.engine.model.base import ModelShape, ModelUnsupported
from loraplex.engine.model.loading import TESTED, examine_model, load_model
from support.local_engine import LocalEngine
from support.models import FAMILIES, VOCAB, edit_config, save_tiny, save_tiny_gemma3_with_vision
from support.peft_zoo import PeftReference
from support.tiny_adapters import save_adapters

pytestmark = pytest.mark.usefixtures("one_torch_thread")

NUM_BLOCKS = 14
OUTPUTS = 24


@pytest.mark.parametrize(
    "family", ["mistral-window", "qwen2-window", "phi3", "gemma2", "gemma3", "gemma3-vision"]
)
def test_tokens_are_those_of_transformers_and_peft(family, tmp_path):
    options = FAMILIES[family.removesuffix("-vision")]
    save = save_tiny_gemma3_with_vision if family.endswith("-vision") else save_tiny
    base = save(tmp_path / "base", options, max_shard_size="20KB")
    assert len(list(base.glob("*.safetensors"))) > 1
    adapters = save_adapters(base, tmp_path)
    kv_heads, head_dim = options.get("num_key_value_heads", 2), options.get("head_dim", 8)
    shape = ModelShape(3, kv_heads, head_dim, VOCAB, 512)
    engine = LocalEngine(
        base,
        tmp_path / "work",
        dtype="float32",
        max_model_len=100,
        max_num_seqs=8,
        max_num_batched_tokens=40,
        kv_cache_memory=NUM_BLOCKS * block_bytes(shape, torch.float32),
        adapter_memory=4 << 20,
        adapter_cpu_memory=4 << 20,
        num_threads=1,
    )
    rng = random.Random(family)
    refs = {name: engine.publish(folder, name=name) for name, folder in adapters.items()}
    shared = [rng.randrange(3, VOCAB) for _ in range(35)]  # far beyond each family's window
    asked = []
    for number in range(12):
        name = [None, "all", "many-ranks"][number % 3]
        prompt = shared[: rng.choice([0, 16, 35])] + [
            rng.randrange(3, VOCAB) for _ in range(rng.choice([2, 9]))
        ]
        asked.append((name, prompt))
        engine.add(str(number), prompt, refs.get(name), max_tokens=OUTPUTS)
    engine.run()
    stats = engine.core.stats()
    answers = [engine.tokens(str(number)) for number in range(len(asked))]
    engine.close()
    assert stats.num_preemptions > 0
    assert stats.prefix_cache_hits > 0
    reference = PeftReference(base, adapters, torch.float32)
    for (name, prompt), answer in zip(asked, answers, strict=True):
        # Teacher-forced: each token is the likeliest after those before it.
        want = reference.logits(name, prompt + answer[:-1])[len(prompt) - 1 :].argmax(-1).tolist()
        assert answer == want, name


def with_text_config(**changes):
    """Change fields of the text part's config."""

    def change(path):
        text = json.loads((path / "config.json").read_text())["text_config"]
        edit_config(path, text_config=text | changes)

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: edit_config(path, quantization_config={"quant_method": "gptq"}), "quantised"),
        (with_text_config(quantization_config={"quant_method": "gptq"}), "quantised"),
        (with_text_config(tie_word_embeddings=False), "tie_word_embeddings"),
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
        ({"model_type": "llava"}, "llava is multimodal"),
        ({"model_type": "qwen2_vl"}, "qwen2_vl is multimodal"),
        ({"model_type": "t5"}, "t5 is an encoder"),
        ({"model_type": "phi3", "quantization_config": {"quant_method": "awq"}}, "quantised"),
        ({"model_type": "whisper"}, "encoder"),
        ({"model_type": "gemma2", "hidden_activation": "gelu"}, "hidden_activation"),
        ({"model_type": "gemma2", "query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        (
            {"model_type": "gemma2", "layer_types": ["chunked_attention"] * 26},
            "chunked_attention|layer_types",
        ),
        ({"model_type": "mistral", "sliding_window": -1}, "sliding_window"),
        ({"model_type": "phi3", "lm_head_bias": True}, "lm_head_bias"),
    ],
)
def test_what_is_not_served_is_refused_in_one_line_before_any_weight_is_read(config, words, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    for look in (examine_model, lambda path: load_model(path, "cpu")):
        with pytest.raises(ModelUnsupported, match=words) as error:
            look(tmp_path)
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 600


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "gemma2"}, "gemma2 on the fused decoder, up to 8192"),
        ({"model_type": "phi3"}, "phi3 on the fused"),
        ({"model_type": "starcoder2"}, "starcoder2 through transformers, tested"),
        ({"model_type": "cohere"}, "compared"),
    ],
)
def test_what_is_served_says_how(config, words, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert words in examine_model(tmp_path)


def test_every_family_is_documented():
    from loraplex.engine.model.family import is_fused

    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \|.*\|.*\|.*\|$", page.split("## Through")[0], re.MULTILINE)
    fused = set(listed) - {"model_type", "gemma3"}  # the last by its text part
    assert fused == {options["model_type"] for options in FAMILIES.values()}
    assert all(is_fused(name) for name in fused)
    tested = page.split("## Through transformers")[1].split(" are tested")[0]
    assert set(re.findall(r"`(\w+)`", tested)) == TESTED
