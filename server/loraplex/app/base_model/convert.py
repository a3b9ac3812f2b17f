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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
from gguf import dequantize
from numpy.typing import NDArray

from loraplex.adapters.base_weights.gguf import as_halves
from loraplex.adapters.store.files import shown
from loraplex.app.base_model.gguf_families import FAMILIES, GgufFamily, ModelKeys
from loraplex.app.base_model.gguf_file import GgufFile, GgufTensor, GgufUnsupported, Metadata, run_limited
from loraplex.app.base_model.gguf_keys import obstacle
from loraplex.app.base_model.gguf_rope import FACTOR_TENSORS, RopeUnsupported, rope_parameters
from loraplex.app.base_model.gguf_tokenizer import build_tokenizer, token_ids, write_json, write_tokenizer

PIECE_VALUES = 1 << 20
_MOST_FACTORS = 4096


def convert(
    gguf: Path, target: Path, on_written: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """Write config, tokenizer, chat template and bfloat16 weights of `gguf` into the new directory `target`.

    `on_written` is called after each tensor with the bytes so far and those of all. The model must be of
    one of `FAMILIES`. Raises GgufUnsupported, OSError.
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
    """Raises GgufUnsupported for a broken file, and for an architecture that is none of `FAMILIES`; OSError."""
    reader = GgufFile(gguf)
    if (architecture := reader.metadata["general.architecture"]) not in FAMILIES:
        raise GgufUnsupported(
            f"{gguf.name} holds a model of architecture {shown(architecture)}, which is none of {', '.join(FAMILIES)}"
        )
    return reader, reader.metadata


def check_keys(metadata: Metadata, *, model: bool = True, tokenizer: bool = True) -> None:
    """Raises GgufUnsupported for a key that changes what is computed and is not read. `model`, `tokenizer`: that part
    is made of the metadata."""
    if found := obstacle(metadata, model=model, tokenizer=tokenizer):
        raise GgufUnsupported(found)


def model_config(reader: GgufFile, metadata: Metadata) -> dict[str, Any]:
    """The config.json of the model in bfloat16. Raises GgufUnsupported."""
    keys = ModelKeys(metadata)
    family, heads, context = FAMILIES[keys.architecture], keys["attention.head_count"], keys["context_length"]
    size, _ = head_sizes(keys, family)
    rope = file_rope(reader, metadata)
    tokens = len(metadata["tokenizer.ggml.tokens"])
    if (count := keys.get("vocab_size", tokens)) != tokens:
        raise GgufUnsupported(
            f"its metadata's {keys.key('vocab_size')} is {count}, and it has {tokens} tokens"
        )
    found = {
        "_model_name_or_path": metadata.get("general.name", ""),
        "dtype": "bfloat16",
        "head_dim": size,
        "hidden_size": keys["embedding_length"],
        "intermediate_size": keys["feed_forward_length"],
        "max_position_embeddings": context,
        "num_attention_heads": heads,
        "num_hidden_layers": keys["block_count"],
        "num_key_value_heads": keys.get("attention.head_count_kv", heads),
        "rms_norm_eps": keys["attention.layer_norm_rms_epsilon"],
        "rope_parameters": rope,
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        "vocab_size": tokens,
        **family.fields(keys, rope),
        **token_ids(metadata),
    }
    _check_scale(keys, found.get("query_pre_attn_scalar", size))
    return found


def file_rope(reader: GgufFile, metadata: Metadata) -> dict[str, Any]:
    """The `rope_parameters` of a file. Raises GgufUnsupported."""
    keys = ModelKeys(metadata)
    family = FAMILIES[keys.architecture]
    size, rotated = head_sizes(keys, family)
    try:
        found = rope_parameters(
            keys,
            _rope_factors(reader),
            rotated=rotated,
            context=keys["context_length"],
            by_factors=family.rotates_part,
        )
    except RopeUnsupported as error:
        raise GgufUnsupported(str(error)) from error
    return found | ({"partial_rotary_factor": rotated / size} if rotated != size else {})


def head_sizes(keys: ModelKeys, family: GgufFamily) -> tuple[int, int]:
    """The numbers of a head, and how many of them are rotated. Raises GgufUnsupported."""
    size: int = keys.get("attention.key_length", keys["embedding_length"] // keys["attention.head_count"])
    rotated: int = keys.get("rope.dimension_count", size)
    for name in ("attention.value_length", "rope.dimension_count"):
        if (other := keys.get(name, size)) != size and not (name.startswith("rope") and family.rotates_part):
            raise GgufUnsupported(
                f"its metadata's {keys.key(name)} is {other}, and a head has {size} numbers; served is {size}"
            )
    return size, rotated


def _check_scale(keys: ModelKeys, scaled_by: int) -> None:
    scale = keys.get("attention.scale", 0.0)
    if scale and abs(scale * scaled_by**0.5 - 1) > 1e-4:
        raise GgufUnsupported(
            f"its metadata's {keys.key('attention.scale')} is {scale}; served is {scaled_by**-0.5}"
        )


def _rope_factors(reader: GgufFile) -> dict[str, list[float]]:
    """The numbers of the tensors that change the rope, by name. Raises GgufUnsupported."""
    found = {}
    for tensor in reader.tensors:
        if tensor.name in FACTOR_TENSORS:
            if tensor.tensor_type.name != "F32" or math.prod(tensor.shape) > _MOST_FACTORS:
                raise GgufUnsupported(f"the tensor {tensor.name} is not at most {_MOST_FACTORS} F32 numbers")
            found[tensor.name] = [float(value) for value in tensor.data.reshape(-1)]
    return found


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor by the name that transformers gives it; `heads` where llama.cpp has interleaved its rows for RoPE;
    `shift` was added to its numbers."""

    name: str
    stored: GgufTensor
    heads: int | None
    shift: float = 0.0

    @property
    def shape(self) -> list[int]:
        return [int(size) for size in reversed(self.stored.shape)]

    def pieces(self) -> Iterator[NDArray[Any]]:
        """The rows in bfloat16, some at a time. Each row is quantised by itself, so rows may be moved before."""
        rows = self.stored.data
        if self.heads is not None:
            rows = as_halves(rows, self.heads)
        step = max(1, PIECE_VALUES // self.shape[-1]) if len(self.shape) > 1 else len(rows)
        for start in range(0, len(rows), step):
            values = dequantize(rows[start : start + step], self.stored.tensor_type)
            yield (np.ascontiguousarray(values) - np.float32(self.shift)).astype(ml_dtypes.bfloat16)


def model_weights(reader: GgufFile, metadata: Metadata) -> list[Weight]:
    """The tensors, sorted by name. Raises GgufUnsupported for one that the family does not have."""
    keys = ModelKeys(metadata)
    family, query = FAMILIES[keys.architecture], keys["attention.head_count"]
    heads = {"attn_q": query, "attn_k": keys.get("attention.head_count_kv", query)}
    found = []
    for tensor in reader.tensors:
        if tensor.name in FACTOR_TENSORS:
            continue  # the config's
        *place, kind, leaf = tensor.name.split(".")
        known = kind in family.names and (leaf == "weight" or (leaf == "bias" and kind in family.biases))
        if not known or (place and (place[0] != "blk" or len(place) != 2)):
            raise GgufUnsupported(f"the tensor {shown(tensor.name)} is not converted")
        layer = f"model.layers.{place[1]}." if place else ""
        found.append(
            Weight(
                f"{layer}{family.names[kind]}.{leaf}",
                tensor,
                heads.get(kind) if family.is_interleaved else None,
                family.norm_shift if kind.endswith("norm") else 0.0,
            )
        )
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


if __name__ == "__main__":
    _file, _target = map(Path, sys.argv[1:3])
    sys.exit(
        run_limited(
            _file, lambda: convert(_file, _target, lambda done, total: print(done, total, flush=True))
        )
    )
