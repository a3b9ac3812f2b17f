"""A tiny model as a GGUF file, as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

REAL_WEIGHTS = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"
"""SHA-256 of the model.safetensors that transformers 5.23 and accelerate 1.15 made of the quickstart's file."""
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("Ġ t", "h e", "Ġt he", "i n", "Ġ a", "r e")
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>\n{% endfor %}"
LAYERS, HEADS, KV_HEADS = 2, 4, 2
OF_QUICKSTART = {
    "token_embd": "Q8_0", "output": "Q8_0", "attn_q": "Q4_1", "attn_k": "Q4_1", "attn_v": "F16", "attn_output": "Q8_0",
    "ffn_gate": "Q4_1", "ffn_up": "F32", "ffn_down": "Q8_0",
}  # fmt: skip
"""The value types of the quickstart's file, and plain ones."""
MIXES = {
    "Q4_K_M": dict.fromkeys(OF_QUICKSTART, "Q4_K") | dict.fromkeys(("output", "attn_v", "ffn_down"), "Q6_K"),
    "Q5_K": dict.fromkeys(OF_QUICKSTART, "Q5_K") | {"token_embd": "Q6_K"},
    "Q8_0": dict.fromkeys(OF_QUICKSTART, "Q8_0"),
    "Q4_0": dict.fromkeys(OF_QUICKSTART, "Q4_0")
    | {"token_embd": "F16", "output": "Q6_K", "ffn_down": "Q4_1"},
}
"""Types as llama.cpp's tool mixes them, by the mix's name."""
_SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Places of a block's float16 numbers, of kinds that the package gguf does not write."""


def blocks(rng: np.random.Generator, rows: int, columns: int, kind: str) -> np.ndarray:
    """[rows, bytes]: random codes and small scales."""
    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    made = rng.integers(0, 256, (rows * columns // values, size), dtype=np.uint8)
    for at in _SCALES[kind]:
        scale = rng.uniform(1, 3, (len(made), 1)) * (2e-5 if kind == "Q6_K" else 2e-4)
        made[:, at : at + 2] = scale.astype("<f2").view(np.uint8)
    return made.reshape(rows, -1)


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    tied: bool = True,
    kinds: Mapping[str, str] = OF_QUICKSTART,
    hidden: int = 64,
    inner: int = 96,
    split: str | None = "smollm",
    merges: Sequence[str] = MERGES,
    factors: Mapping[str, Sequence[float]] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Two layers with grouped-query attention. `kinds`: the value type of each linear; `split`: tokenizer.ggml.pre;
    `factors`: the tensors of a rope, by name; `metadata`: more keys, or other values (None: without the key)."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("Tiny 2L")
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(50_000.0)
    writer.add_rope_dimension_count(hidden // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens = [
        *CONTROL,
        *sorted(ByteLevel.alphabet()),
        *dict.fromkeys(merge.replace(" ", "") for merge in merges),
    ]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    if split is not None:
        writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    types = [gguf.TokenType.CONTROL if token in CONTROL else gguf.TokenType.NORMAL for token in tokens]
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(TEMPLATE)
    rng = np.random.default_rng(0)

    def add(name: str, rows: int, columns: int | None = None) -> None:
        kind = "F32" if columns is None else kinds[name.rpartition(".")[2]]
        if columns is not None and kind in _SCALES:
            values = blocks(rng, rows, columns, kind)
        else:
            shape = (rows,) if columns is None else (rows, columns)
            # Norms near 1 and small weights, so that logits have a clear order in float32.
            values = rng.standard_normal(shape, dtype=np.float32) * np.float32(0.3)
            values = gguf.quantize(values + np.float32(columns is None), gguf.GGMLQuantizationType[kind])
        writer.add_tensor(f"{name}.weight", values, raw_dtype=gguf.GGMLQuantizationType[kind])

    add("token_embd", len(tokens), hidden)
    if not tied:
        add("output", len(tokens), hidden)
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        add(block + "attn_norm", hidden)
        add(block + "attn_q", hidden, hidden)
        add(block + "attn_k", hidden // 2, hidden)
        add(block + "attn_v", hidden // 2, hidden)
        add(block + "attn_output", hidden, hidden)
        add(block + "ffn_norm", hidden)
        add(block + "ffn_gate", inner, hidden)
        add(block + "ffn_up", inner, hidden)
        add(block + "ffn_down", hidden, inner)
    add("output_norm", hidden)
    for name, values in (factors or {}).items():
        writer.add_tensor(name, np.array(values, np.float32))
    for key, value in (metadata or {}).items():
        writer.kv_data[0].pop(key, None)
        if value is not None:
            add_value(writer, key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add a key by the type of its value: a number without a fraction is a uint32."""
    if isinstance(value, list):
        writer.add_array(key, value)
        return
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    kinds[type(value)](key, value)


def convert_with_transformers(gguf: Path, target: Path, dtype: str = "bfloat16") -> None:
    """Write what transformers makes of a file into the directory `target`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where, name = str(gguf.parent), gguf.name
    AutoTokenizer.from_pretrained(where, gguf_file=name).save_pretrained(str(target))
    model = AutoModelForCausalLM.from_pretrained(
        where, gguf_file=name, dtype=getattr(torch, dtype), quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(str(target))
