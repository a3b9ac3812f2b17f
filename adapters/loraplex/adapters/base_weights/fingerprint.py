"""The digest that says which base an adapter was checked for."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from loraplex.adapters.base_weights.tensors import Stored
from loraplex.adapters.errors import BaseModelInvalid
from loraplex.adapters.store.files import CHUNK_BYTES, open_regular, read_into, shown

_ARCHITECTURE_FIELDS = (
    "attention_bias",
    "attention_multiplier",
    "attn_logit_softcapping",
    "embedding_multiplier",
    "final_logit_softcapping",
    "head_dim",
    "hidden_act",
    "hidden_activation",
    "hidden_size",
    "intermediate_size",
    "layer_norm_eps",
    "layer_types",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_value_head_dim",
    "logits_scaling",
    "mlp_bias",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "query_pre_attn_scalar",
    "residual_multiplier",
    "rms_norm_eps",
    "rope_local_base_freq",
    "sliding_window",
    "sliding_window_pattern",
    "tie_word_embeddings",
    "use_sliding_window",
    "vocab_size",
)
"""The config fields that change what the weights compute. The others (names, token ids, versions of the tool
that wrote the file) differ between copies of one model and must not part an adapter from its base."""
_LATER_FIELDS = (
    (
        ("gemma4", "lfm2", "lfm3"),
        ("attention_k_eq_v", "norm_eps", "num_kv_shared_layers", "tie_embedding"),
    ),
    (
        ("gpt_oss", "qwen3_5_moe", "qwen3_next"),
        ("decoder_sparse_step", "mlp_only_layers", "norm_topk_prob", "num_experts_per_tok"),
    ),
    (("gpt_oss",), ("swiglu_alpha", "swiglu_limit")),
)
"""How the types begin whose fingerprints have further fields, and these. Other types that have them were served
before: theirs stay as they are. Sizes by layer (`per_layer_config`) are those of the weights."""


def base_fingerprint(
    model_dir: Path, config: Mapping[str, Any], tensors: Mapping[str, Stored], cache_dir: Path | None
) -> str:
    """A digest of the config and of every byte of the weights. With `cache_dir` it is kept there, by the files' paths,
    sizes and times of change. `config` is what `text_fields` gives. Raises BaseModelInvalid, OSError."""
    architecture = _architecture(config)
    cached = None
    if cache_dir is not None:
        cached = cache_dir / f"base-{_cache_key(model_dir, architecture, tensors)}.sha256"
        try:
            known = cached.read_text("ascii").strip()
        except (OSError, ValueError):
            known = ""
        if re.fullmatch(r"[0-9a-f]{64}", known):
            return known
    digest = _hash_weights(architecture, tensors)
    if cached is not None:
        with contextlib.suppress(OSError):  # a cache that cannot be written costs a second at each start
            cached.parent.mkdir(parents=True, exist_ok=True)
            scratch = cached.with_suffix(f".{os.getpid()}.tmp")
            scratch.write_text(digest + "\n", "ascii")
            scratch.replace(cached)
    return digest


def _architecture(config: Mapping[str, Any]) -> bytes:
    names: tuple[str, ...] = _ARCHITECTURE_FIELDS
    for types, later in _LATER_FIELDS:
        if str(config.get("model_type")).startswith(types):
            names += later
    fields = {name: config[name] for name in names if config.get(name) is not None}
    if config.get("use_sliding_window"):  # else it means nothing
        fields["max_window_layers"] = config.get("max_window_layers")
    if config.get("enable_moe_block"):  # Gemma 4's, as it means nothing either without
        fields["top_k_experts"] = config.get("top_k_experts")
    if config.get("model_type") == "granitemoehybrid" and config.get("num_local_experts"):
        fields["num_experts_per_tok"] = config.get("num_experts_per_tok")
    # Written as rope_theta + rope_scaling by older tools and as rope_parameters by newer ones.
    found = [config.get(name) or {} for name in ("rope_scaling", "rope_parameters")]
    if not all(isinstance(value, dict) for value in found):
        raise BaseModelInvalid(f"the config's rope_scaling or rope_parameters is no object: {shown(found)}")
    rope = {**found[0], **found[1]}
    rope.setdefault("rope_theta", config.get("rope_theta"))
    rope["rope_type"] = rope.get("rope_type", rope.pop("type", "default"))
    if config.get("quantization_config") is not None:  # it says what the codes stand for
        fields["quantization_config"] = config["quantization_config"]
    if config.get("layer_types") is None and config.get("full_attention_interval") is not None:
        fields["full_attention_interval"] = config["full_attention_interval"]
    fields["rope"] = {name: value for name, value in rope.items() if value is not None}
    return json.dumps(fields, sort_keys=True).encode()


def _cache_key(model_dir: Path, architecture: bytes, tensors: Mapping[str, Stored]) -> str:
    sha = hashlib.sha256(architecture)
    for path in sorted({entry.path for entry in tensors.values()}):
        stat = path.stat()
        sha.update(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    return sha.hexdigest()[:32]


def _hash_weights(architecture: bytes, tensors: Mapping[str, Stored]) -> str:
    """SHA-256 over the architecture and each tensor's name, dtype, shape and bytes, sorted by name: how the
    checkpoint is cut into files does not matter."""
    sha = hashlib.sha256(b"loraplex base 1\n" + architecture)
    buffer = np.empty(CHUNK_BYTES, np.uint8).data
    files = {path: open_regular(path) for path in {entry.path for entry in tensors.values()}}
    try:
        for name, entry in sorted(tensors.items()):
            tensor = entry.tensor
            sha.update(json.dumps([name, tensor.dtype, tensor.shape]).encode() + b"\n")
            files[entry.path].seek(tensor.start)
            left = tensor.end - tensor.start
            while left:
                got = read_into(files[entry.path], buffer[: min(left, CHUNK_BYTES)])
                if not got:
                    raise BaseModelInvalid(f"{entry.path} ends inside {name}")
                sha.update(buffer[:got])
                left -= got
    finally:
        for file in files.values():
            file.close()
    return sha.hexdigest()
