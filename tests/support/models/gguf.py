"""A tiny model as a GGUF file, as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
    "token_embd": "Q8_0", "output": "Q8_0", "attn_q": "Q4_1", "attn_k": "Q4_1", "attn_v": "F16", "attn_qkv": "Q4_1",
    "attn_output": "Q8_0", "ffn_gate": "Q4_1", "ffn_up": "F32", "ffn_down": "Q8_0",
}  # fmt: skip
"""The value types of the quickstart's file, and plain ones."""
MIXES = {
    "Q4_K_M": dict.fromkeys(OF_QUICKSTART, "Q4_K") | dict.fromkeys(("output", "attn_v", "ffn_down"), "Q6_K"),
    "Q5_K": dict.fromkeys(OF_QUICKSTART, "Q5_K") | {"token_embd": "Q6_K"},
    "Q8_0": dict.fromkeys(OF_QUICKSTART, "Q8_0"),
    # What it takes in place of Q4_K where rows are no whole blocks of 256.
    "Q5_0": dict.fromkeys(OF_QUICKSTART, "Q5_0") | {"attn_v": "Q8_0", "ffn_down": "Q5_1"},
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


@dataclass(frozen=True)
class Written:
    """What the converter writes of an architecture beside what it writes of Llama. `norms` and `shift` as llama.cpp has
    them; `keys` behind the architecture's name."""

    layers: int = LAYERS
    head_dim: int = 0
    biases: bool = False
    packed: bool = False
    norms: tuple[str, ...] = ("attn_norm", "ffn_norm")
    head_norms: bool = False
    shift: float = 0.0
    vocabulary: str = "gpt2"
    keys: Mapping[str, Any] = field(default_factory=dict)


_OF_GEMMA = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
ARCHITECTURES: dict[str, Written] = {
    "llama": Written(),
    "qwen2": Written(biases=True),
    # transformers reads no head size of a Qwen3, no scale of a Gemma: theirs are the defaults.
    "qwen3": Written(head_dim=128, head_norms=True),
    "phi3": Written(
        packed=True, vocabulary="llama",
        keys={"attention.sliding_window": 512, "rope.scaling.original_context_length": 512},
    ),
    "gemma2": Written(
        head_dim=256, norms=_OF_GEMMA, shift=1.0, vocabulary="llama",
        keys={
            "attention.sliding_window": 24, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3": Written(
        layers=7, head_dim=256, norms=_OF_GEMMA, head_norms=True, shift=1.0, vocabulary="llama",
        keys={"attention.sliding_window": 24},
    ),
}  # fmt: skip


def sentencepiece_tokens() -> tuple[list[str], list[float], list[gguf.TokenType]]:
    """Tokens as SentencePiece orders them, scores and types: special ones, bytes, pieces of falling scores, letters."""
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "<|turn|>",
        "<think>",
        "\n\n",
    ]
    types = [gguf.TokenType.UNKNOWN, *[gguf.TokenType.CONTROL] * 2, *[gguf.TokenType.BYTE] * 256]
    types += [gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED, gguf.TokenType.USER_DEFINED]
    pieces = ["▁t", "he", "▁the", "in", "▁a", "re", "▁▁", "ea", "▁s", "ere", "▁there", "12"]
    letters = ["▁", *"thesinarum1234.,'xyz"]
    scores = [0.0] * len(tokens) + [-float(rank) for rank in range(len(pieces) + len(letters))]
    return (
        [*tokens, *pieces, *letters], scores, [*types, *[gguf.TokenType.NORMAL] * (len(pieces) + len(letters))]
    )  # fmt: skip


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    tied: bool = True,
    kinds: Mapping[str, str] = OF_QUICKSTART,
    hidden: int = 64,
    inner: int = 96,
    split: str | None = "smollm",
    vocabulary: str | None = None,
    merges: Sequence[str] = MERGES,
    factors: Mapping[str, Sequence[float]] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Layers with grouped-query attention. `kinds`: the value type of each linear; `split`: tokenizer.ggml.pre;
    `vocabulary`: tokenizer.ggml.model, if another than the architecture's; `factors`: the tensors of a rope, by name;
    `metadata`: more keys, or other values (None: without the key)."""
    writer = gguf.GGUFWriter(path, architecture)
    of = ARCHITECTURES.get(architecture, Written())
    vocabulary = vocabulary or of.vocabulary
    head_dim = of.head_dim or hidden // HEADS
    writer.add_name("Tiny 2L")
    writer.add_block_count(of.layers)
    writer.add_context_length(512)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(50_000.0)
    writer.add_rope_dimension_count(head_dim)
    if of.head_dim:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(vocabulary)
    if split is not None:
        writer.add_tokenizer_pre(split)
    if vocabulary == "gpt2":
        words = dict.fromkeys(merge.replace(" ", "") for merge in merges)
        tokens = [*CONTROL, *sorted(ByteLevel.alphabet()), *words]
        types = [gguf.TokenType.CONTROL if token in CONTROL else gguf.TokenType.NORMAL for token in tokens]
        writer.add_token_merges(merges)
    else:
        tokens, scores, types = sentencepiece_tokens()
        writer.add_token_scores(scores)
    writer.add_vocab_size(len(tokens))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(vocabulary != "gpt2")
    if vocabulary == "gpt2" or of.shift:
        writer.add_add_space_prefix(False)
    writer.add_chat_template(TEMPLATE)
    rng = np.random.default_rng(0)

    def add(name: str, rows: int, columns: int | None = None, leaf: str = "weight") -> None:
        kind = "F32" if columns is None else kinds[name.rpartition(".")[2]]
        if columns is not None and kind in _SCALES:
            values = blocks(rng, rows, columns, kind)
        else:
            shape = (rows,) if columns is None else (rows, columns)
            # Norms near 1 and small weights, so that logits have a clear order in float32.
            values = rng.standard_normal(shape, dtype=np.float32) * np.float32(0.3)
            # The numbers that are stored of a norm are near 1, whatever was added to them.
            shift = np.float32(columns is None and leaf == "weight")
            if shift and of.shift:
                # The model had them in 16 bits.
                values = values.astype(np.float16).astype(np.float32)
            values = gguf.quantize(values + shift, gguf.GGMLQuantizationType[kind])
        writer.add_tensor(f"{name}.{leaf}", values, raw_dtype=gguf.GGMLQuantizationType[kind])

    add("token_embd", len(tokens), hidden)
    if not tied:
        add("output", len(tokens), hidden)
    query, kv = HEADS * head_dim, KV_HEADS * head_dim
    for layer in range(of.layers):
        block = f"blk.{layer}."
        for norm in of.norms:
            add(block + norm, hidden)
        if of.packed:
            add(block + "attn_qkv", query + 2 * kv, hidden)
            add(block + "ffn_up", 2 * inner, hidden)
        else:
            for name, rows in (("attn_q", query), ("attn_k", kv), ("attn_v", kv)):
                add(block + name, rows, hidden)
                if of.biases:
                    add(block + name, rows, leaf="bias")
            add(block + "ffn_gate", inner, hidden)
            add(block + "ffn_up", inner, hidden)
        for norm in ("attn_q_norm", "attn_k_norm") if of.head_norms else ():
            add(block + norm, head_dim)
        add(block + "attn_output", hidden, query)
        add(block + "ffn_down", hidden, inner)
    add("output_norm", hidden)
    for name, values in (factors or {}).items():
        writer.add_tensor(name, np.array(values, np.float32))
    own = {f"{architecture}.{name}": value for name, value in of.keys.items()}
    for key, value in (own | dict(metadata or {})).items():
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
