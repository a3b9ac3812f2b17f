"""A tiny model as a GGUF file, as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

REAL_WEIGHTS = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"
"""SHA-256 of the model.safetensors that transformers 5.23 and accelerate 1.15 made of the quickstart's file."""
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("Ġ t", "h e", "Ġt he", "i n", "Ġ a", "r e")
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>\n{% endfor %}"
LAYERS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS = 2, 64, 96, 4, 2


def write_gguf(path: Path, *, architecture: str = "llama", tied: bool = True) -> Path:
    """Two layers with grouped-query attention, in the value types of the quickstart's file and plain ones."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("Tiny 2L")
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(50_000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens = [*CONTROL, *sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    kinds = [gguf.TokenType.CONTROL if token in CONTROL else gguf.TokenType.NORMAL for token in tokens]
    writer.add_token_types(kinds)
    writer.add_token_merges(MERGES)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(TEMPLATE)
    types = gguf.GGMLQuantizationType
    rng = np.random.default_rng(0)

    def add(name: str, rows: int, columns: int | None, kind: gguf.GGMLQuantizationType) -> None:
        shape = (rows,) if columns is None else (rows, columns)
        values = rng.standard_normal(shape, dtype=np.float32)
        writer.add_tensor(f"{name}.weight", gguf.quantize(values, kind), raw_dtype=kind)

    add("token_embd", len(tokens), HIDDEN, types.Q8_0)
    if not tied:
        add("output", len(tokens), HIDDEN, types.Q8_0)
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        add(block + "attn_norm", HIDDEN, None, types.F32)
        add(block + "attn_q", HIDDEN, HIDDEN, types.Q4_1)
        add(block + "attn_k", HIDDEN // 2, HIDDEN, types.Q4_1)
        add(block + "attn_v", HIDDEN // 2, HIDDEN, types.F16)
        add(block + "attn_output", HIDDEN, HIDDEN, types.Q8_0)
        add(block + "ffn_norm", HIDDEN, None, types.F32)
        add(block + "ffn_gate", INTERMEDIATE, HIDDEN, types.Q4_1)
        add(block + "ffn_up", INTERMEDIATE, HIDDEN, types.F32)
        add(block + "ffn_down", HIDDEN, INTERMEDIATE, types.Q8_0)
    add("output_norm", HIDDEN, None, types.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
