"""`python -m loraplex.app.base_model.convert GGUF DIR`: a GGUF file as a safetensors model directory, in bfloat16.

Each tensor that is written is a line `DONE TOTAL`, in bytes, on stdout. Needs neither torch nor transformers. Weights
are dequantised some rows at a time and written at once, so that the memory needed is that of the file's own reader.
What is written equals what transformers' GGUF loading and `save_pretrained` give, byte for byte, except versions and
defaults in the JSON files, and the tokenizer's split: transformers does not read it, so that a test compares with
llama.cpp's ids.
"""

from __future__ import annotations

import json
import math
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
from gguf import TokenType, dequantize
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Split

from loraplex.adapters.store.files import shown
from loraplex.app.base_model.gguf_file import GgufFile, GgufTensor, GgufUnsupported, Metadata, run_limited
from loraplex.app.base_model.gguf_keys import ARCHITECTURE, obstacle
from loraplex.app.base_model.gguf_rope import FACTOR_TENSORS, RopeUnsupported, rope_parameters

PIECE_VALUES = 1 << 20
_MOST_FACTORS = 4096
_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""GPT-2's expression, as `ByteLevel` has it."""
SPLITS: dict[str, Sequence[PreTokenizer]] = {
    "gpt-2": [ByteLevel(add_prefix_space=False)],
    "smollm": [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)],
    "default": [
        Split(Regex(r"[\p{P}\$\+<=>\^~\|]+"), "isolated"),
        Split(Regex(_WORDS), "isolated"),
        Split(Regex(r"\p{N}+"), "isolated"),
        Split(Regex("[0-9][0-9][0-9]"), "isolated"),
        ByteLevel(add_prefix_space=False, use_regex=False),
    ],
}
"""The parts that split a text, by llama.cpp's names (`tokenizer.ggml.pre`)."""

_ENDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
"""The tokens that end an answer in llama.cpp, by their names in the keys."""
_SAMPLING = "general.sampling."
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(
    gguf: Path, target: Path, on_written: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """Write config, tokenizer, chat template and bfloat16 weights of `gguf` into the new directory `target`.

    `on_written` is called after each tensor with the bytes so far and those of all. The model must be of Llama's
    architecture with a byte-level BPE tokenizer. Raises GgufUnsupported, OSError.
    """
    reader, metadata = open_gguf(gguf)
    check_keys(metadata)
    tokenizer = build_tokenizer(metadata)
    config = model_config(reader, metadata)
    target.mkdir(parents=True)
    write_json(target / "config.json", config)
    write_tokenizer(metadata, tokenizer, target)
    with open(target / "model.safetensors", "wb") as out:
        _write_weights(reader, metadata, out, on_written)


def open_gguf(gguf: Path) -> tuple[GgufFile, Metadata]:
    """Raises GgufUnsupported for a broken file, and for another architecture than Llama's; OSError."""
    reader = GgufFile(gguf)
    if (architecture := reader.metadata["general.architecture"]) != ARCHITECTURE:
        raise GgufUnsupported(
            f"{gguf.name} holds a model of architecture {shown(architecture)}, not '{ARCHITECTURE}'"
        )
    return reader, reader.metadata


def check_keys(metadata: Metadata, *, model: bool = True, tokenizer: bool = True) -> None:
    """Raises GgufUnsupported for a key that changes what is computed and is not read. `model`, `tokenizer`: that part
    is made of the metadata."""
    if found := obstacle(metadata, model=model, tokenizer=tokenizer):
        raise GgufUnsupported(found)


def write_tokenizer(metadata: Metadata, tokenizer: Tokenizer, target: Path) -> None:
    """Write what belongs to texts into the directory `target`: tokenizer, chat template, ids that end an answer."""
    write_json(target / "generation_config.json", _token_ids(metadata) | _sampling(metadata))
    tokenizer.save(str(target / "tokenizer.json"))
    write_json(target / "tokenizer_config.json", _tokenizer_config(metadata))
    if len(templates := _templates(metadata)) == 1:
        (target / "chat_template.jinja").write_text(next(iter(templates.values())), "utf-8")


def _token_ids(metadata: Metadata) -> dict[str, int]:
    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    found = {
        f"{ours}_token_id": metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        for ours, theirs in names.items()
    }
    return {name: token_id for name, token_id in found.items() if token_id is not None}


def _sampling(metadata: Metadata) -> dict[str, Any]:
    """The options of sampling that a file asks for, by transformers' names."""
    names = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
    options = {key.removeprefix(_SAMPLING): metadata[key] for key in metadata if key.startswith(_SAMPLING)}
    return {names.get(name, name): value for name, value in options.items()}


def model_config(reader: GgufFile, metadata: Metadata) -> dict[str, Any]:
    """The config.json of the model in bfloat16. Raises GgufUnsupported."""
    heads = metadata["llama.attention.head_count"]
    hidden, context = metadata["llama.embedding_length"], metadata["llama.context_length"]
    head_dim = head_size(metadata)
    tokens = len(metadata["tokenizer.ggml.tokens"])
    if (size := metadata.get("llama.vocab_size", tokens)) != tokens:
        raise GgufUnsupported(f"its metadata's llama.vocab_size is {size}, and it has {tokens} tokens")
    return {
        "_model_name_or_path": metadata.get("general.name", ""),
        "dtype": "bfloat16",
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "max_position_embeddings": context,
        "num_attention_heads": heads,
        "num_hidden_layers": metadata["llama.block_count"],
        "num_key_value_heads": metadata.get("llama.attention.head_count_kv", heads),
        "rms_norm_eps": metadata["llama.attention.layer_norm_rms_epsilon"],
        "rope_parameters": file_rope(reader, metadata),
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        "vocab_size": tokens,
        **_family(metadata, context),
        **_token_ids(metadata),
    }


def file_rope(reader: GgufFile, metadata: Metadata) -> dict[str, Any]:
    """The `rope_parameters` of a file. Raises GgufUnsupported."""
    rotated, context = head_size(metadata), metadata["llama.context_length"]
    try:
        return rope_parameters(metadata, _rope_factors(reader), rotated=rotated, context=context)
    except RopeUnsupported as error:
        raise GgufUnsupported(str(error)) from error


def head_size(metadata: Metadata) -> int:
    """The numbers of a head, which is rotated whole. Raises GgufUnsupported."""
    default = metadata["llama.embedding_length"] // metadata["llama.attention.head_count"]
    size: int = metadata.get("llama.attention.key_length", default)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (other := metadata.get(f"llama.{key}", size)) != size:
            raise GgufUnsupported(
                f"its metadata's llama.{key} is {other}, and a head has {size} numbers; served is {size}"
            )
    scale = metadata.get("llama.attention.scale", 0.0)
    if scale and abs(scale * size**0.5 - 1) > 1e-4:
        raise GgufUnsupported(f"its metadata's llama.attention.scale is {scale}; served is {size**-0.5}")
    return size


def _family(metadata: Metadata, context: int) -> dict[str, Any]:
    """Llama, or Mistral where positions see a window: llama.cpp has one architecture for both."""
    window = metadata.get("llama.attention.sliding_window", 0)
    if window and window < context:
        return {
            "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window
        }  # fmt: skip
    biases = {"attention_bias": False, "mlp_bias": False}
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **biases}


def _rope_factors(reader: GgufFile) -> dict[str, list[float]]:
    """The numbers of the tensors that change the rope, by name. Raises GgufUnsupported."""
    found = {}
    for tensor in reader.tensors:
        if tensor.name in FACTOR_TENSORS:
            if tensor.tensor_type.name != "F32" or math.prod(tensor.shape) > _MOST_FACTORS:
                raise GgufUnsupported(f"the tensor {tensor.name} is not at most {_MOST_FACTORS} F32 numbers")
            found[tensor.name] = [float(value) for value in tensor.data.reshape(-1)]
    return found


def build_tokenizer(metadata: Metadata) -> Tokenizer:
    """The byte-level BPE tokenizer that the file describes. Raises GgufUnsupported for another kind."""
    kind, split = metadata["tokenizer.ggml.model"], metadata.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or split not in SPLITS:
        raise GgufUnsupported(
            f"the tokenizer {shown(kind)} with the split {shown(split)} is not converted: 'gpt2' with "
            f"{', '.join(SPLITS)} is"
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata["tokenizer.ggml.token_type"]
    if unknown := set(types) - {
        TokenType.NORMAL,
        TokenType.UNUSED,
        TokenType.CONTROL,
        TokenType.USER_DEFINED,
    }:
        kinds = ", ".join(map(str, sorted(unknown)))
        raise GgufUnsupported(
            f"its tokenizer.ggml.token_type has {kinds}: tokens of these types are not converted"
        )
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    no_affixes = {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, **no_affixes))
    parts = SPLITS[split]
    tokenizer.pre_tokenizer = parts[0] if len(parts) == 1 else pre_tokenizers.Sequence(list(parts))
    tokenizer.decoder = decoders.ByteLevel()
    begins = []
    if metadata.get("tokenizer.ggml.add_bos_token"):
        bos = metadata["tokenizer.ggml.bos_token_id"]
        begins = [(_token(tokens, "bos", bos), bos)]
    first = [token for token, _ in begins]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*first, "$A:0"], pair=[*first, "$A:0", *first, "$B:1"], special_tokens=begins
    )
    ends = {number for name in _ENDS if (number := _token_id(metadata, name)) is not None}
    added = [
        AddedToken(token, normalized=False, special=kind == TokenType.CONTROL or number in ends)
        for number, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (TokenType.CONTROL, TokenType.USER_DEFINED) or number in ends
    ]
    tokenizer.add_tokens(added)
    return tokenizer


def _token_id(metadata: Metadata, name: str) -> int | None:
    number: int | None = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return number


def _token(tokens: list[str], name: str, number: int) -> str:
    """The token that the metadata name by its id. Raises GgufUnsupported."""
    if not 0 <= number < len(tokens):
        raise GgufUnsupported(
            f"its metadata's tokenizer.ggml.{name}_token_id is {number}, and it has {len(tokens)} tokens"
        )
    return tokens[number]


def _tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    short = {"unknown": "unk", "padding": "pad", "seperator": "sep"}
    named = {
        f"{short.get(name, name)}_token": _token(tokens, name, number)
        for name in ("bos", *_ENDS, "unknown", "padding", "seperator", "cls", "mask")
        if (number := _token_id(metadata, name)) is not None
    }
    found = {**named, "clean_up_tokenization_spaces": False, "tokenizer_class": "PreTrainedTokenizerFast"}
    templates = _templates(metadata)
    if len(templates) > 1:
        found["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    return found


def _templates(metadata: Metadata) -> dict[str, str]:
    """The chat templates by name."""
    prefix = "tokenizer.chat_template."
    named = {key.removeprefix(prefix): metadata[key] for key in metadata if key.startswith(prefix)}
    default = metadata.get("tokenizer.chat_template")
    return ({"default": default} if default else {}) | named


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor by the name that transformers gives it; `heads` where llama.cpp has interleaved its rows for RoPE."""

    name: str
    stored: GgufTensor
    heads: int | None

    @property
    def shape(self) -> list[int]:
        return [int(size) for size in reversed(self.stored.shape)]

    def pieces(self) -> Iterator[NDArray[Any]]:
        """The rows in bfloat16, some at a time. Each row is quantised by itself, so rows may be moved before."""
        rows = self.stored.data
        if self.heads is not None:
            # llama.cpp rotates neighbouring pairs, transformers the two halves of a head.
            paired = rows.reshape(self.heads, rows.shape[0] // self.heads // 2, 2, *rows.shape[1:])
            rows = paired.swapaxes(1, 2).reshape(rows.shape)
        step = max(1, PIECE_VALUES // self.shape[-1]) if len(self.shape) > 1 else len(rows)
        for start in range(0, len(rows), step):
            values = dequantize(rows[start : start + step], self.stored.tensor_type)
            yield np.ascontiguousarray(values).astype(ml_dtypes.bfloat16)


def model_weights(reader: GgufFile, metadata: Metadata) -> list[Weight]:
    """The tensors, sorted by name. Raises GgufUnsupported for one that no Llama has."""
    query = metadata["llama.attention.head_count"]
    heads = {"attn_q": query, "attn_k": metadata.get("llama.attention.head_count_kv", query)}
    found = []
    for tensor in reader.tensors:
        if tensor.name in FACTOR_TENSORS:
            continue  # the config's
        *place, kind, leaf = tensor.name.split(".")
        if kind not in _NAMES or leaf != "weight" or (place and (place[0] != "blk" or len(place) != 2)):
            raise GgufUnsupported(f"the tensor {shown(tensor.name)} is not converted")
        layer = f"model.layers.{place[1]}." if place else ""
        found.append(Weight(f"{layer}{_NAMES[kind]}.weight", tensor, heads.get(kind)))
    return sorted(found, key=lambda weight: weight.name)


def _write_weights(
    reader: GgufFile, metadata: Metadata, out: BinaryIO, on_written: Callable[[int, int], None]
) -> None:
    weights = model_weights(reader, metadata)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for weight in weights:
        start, end = end, end + int(np.prod(weight.shape)) * 2
        header[weight.name] = {"dtype": "BF16", "shape": weight.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the data to eight bytes
    out.write(struct.pack("<Q", len(text)) + text)
    for weight in weights:
        for piece in weight.pieces():
            out.write(piece.view(np.uint8).data)
        on_written(header[weight.name]["data_offsets"][1], end)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write an object as transformers does."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    _file, _target = map(Path, sys.argv[1:3])
    sys.exit(
        run_limited(
            _file, lambda: convert(_file, _target, lambda done, total: print(done, total, flush=True))
        )
    )
