"""Makes tiny base checkpoints and adapters on disk with numpy alone, well-formed or broken on purpose.

The checkpoints are complete ones: transformers and PEFT load them too.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from loraplex.adapters.errors import AdapterRefused

ALL_SITES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
NUMPY_DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "I64": np.int64,
    "I8": np.int8,
}
_DTYPE_NAMES = {np.dtype(v): k for k, v in NUMPY_DTYPES.items()}


def encode_safetensors(
    tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None, align: int = 8
) -> bytes:
    """The bytes of a well-formed safetensors file."""
    header: dict[str, Any] = {}
    if metadata is not None:
        header["__metadata__"] = dict(metadata)
    chunks: list[bytes] = []
    offset = 0
    for name, array in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": _DTYPE_NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + len(raw)],
        }
        chunks.append(raw)
        offset += len(raw)
    return frame_header(json.dumps(header).encode(), align) + b"".join(chunks)


def frame_header(header: bytes, align: int = 1) -> bytes:
    """Any bytes as a safetensors header: its length, itself, padded with spaces."""
    header += b" " * (-len(header) % align)
    return struct.pack("<Q", len(header)) + header


def write_safetensors(
    path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None
) -> Path:
    path.write_bytes(encode_safetensors(tensors, metadata))
    return path


def site_module(layer: int, site: str) -> str:
    if site in ("lm_head", "embed_tokens"):
        return site if site == "lm_head" else f"model.{site}"
    block = "self_attn" if site in ATTENTION else "mlp"
    return f"model.layers.{layer}.{block}.{site}"


@dataclass(frozen=True)
class TinyBase:
    """The architecture of a tiny base; `out_in(site)` gives its linears' shapes."""

    model_type: str = "llama"
    layers: int = 2
    hidden: int = 32
    intermediate: int = 48
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    vocab: int = 64
    tied: bool = False

    def out_in(self, site: str) -> tuple[int, int]:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (q, self.hidden),
            "k_proj": (kv, self.hidden),
            "v_proj": (kv, self.hidden),
            "o_proj": (self.hidden, q),
            "gate_proj": (self.intermediate, self.hidden),
            "up_proj": (self.intermediate, self.hidden),
            "down_proj": (self.hidden, self.intermediate),
            "lm_head": (self.vocab, self.hidden),
            "embed_tokens": (self.hidden, self.vocab),
        }[site]

    def config(self, dtype: str = "BF16") -> dict[str, Any]:
        names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
        return {
            "architectures": [f"{names[self.model_type]}ForCausalLM"],
            "model_type": self.model_type,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "max_position_embeddings": 512,
            "tie_word_embeddings": self.tied,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "dtype": {"BF16": "bfloat16", "F32": "float32", "F16": "float16"}[dtype],
        }


def base_tensors(arch: TinyBase, *, dtype: str = "BF16", seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)

    def random(*shape: int, scale: float = 0.2) -> np.ndarray:
        return (rng.standard_normal(shape) * scale).astype(NUMPY_DTYPES[dtype])

    def ones(*shape: int) -> np.ndarray:
        return (1 + 0.1 * rng.standard_normal(shape)).astype(NUMPY_DTYPES[dtype])

    tensors = {"model.embed_tokens.weight": random(arch.vocab, arch.hidden, scale=1.0)}
    for layer in range(arch.layers):
        for site in ALL_SITES:
            tensors[f"{site_module(layer, site)}.weight"] = random(*arch.out_in(site))
            if arch.model_type == "qwen2" and site in ("q_proj", "k_proj", "v_proj"):
                tensors[f"{site_module(layer, site)}.bias"] = random(arch.out_in(site)[0])
        if arch.model_type == "qwen3":
            tensors[f"model.layers.{layer}.self_attn.q_norm.weight"] = ones(arch.head_dim)
            tensors[f"model.layers.{layer}.self_attn.k_norm.weight"] = ones(arch.head_dim)
        tensors[f"model.layers.{layer}.input_layernorm.weight"] = ones(arch.hidden)
        tensors[f"model.layers.{layer}.post_attention_layernorm.weight"] = ones(arch.hidden)
    tensors["model.norm.weight"] = ones(arch.hidden)
    if not arch.tied:
        tensors["lm_head.weight"] = random(arch.vocab, arch.hidden)
    return tensors


def write_base(
    directory: Path, arch: TinyBase | None = None, *, dtype: str = "BF16", seed: int = 0, shards: int = 1
) -> Path:
    """A whole checkpoint: config.json and one safetensors file, or `shards` of them with their index."""
    arch = arch or TinyBase()
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(arch.config(dtype)))
    tensors = base_tensors(arch, dtype=dtype, seed=seed)
    if shards == 1:
        write_safetensors(directory / "model.safetensors", tensors, {"format": "pt"})
        return directory
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file_name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for i, name in enumerate(tensors) if i % shards == shard}
        write_safetensors(directory / file_name, part, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file_name)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


@dataclass
class AdapterDraft:
    """An adapter before it is written: change `config` and `tensors` freely, then `write`."""

    config: dict[str, Any]
    tensors: dict[str, np.ndarray] = field(default_factory=dict)

    def write(self, directory: Path) -> AdapterFiles:
        directory.mkdir(parents=True, exist_ok=True)
        files = AdapterFiles(directory / "adapter_config.json", directory / "adapter_model.safetensors")
        files.config.write_text(json.dumps(self.config, indent=2, sort_keys=True))
        write_safetensors(files.tensors, self.tensors, {"format": "pt"})
        return files


@dataclass(frozen=True)
class AdapterFiles:
    config: Path
    tensors: Path


def peft_config(**fields: Any) -> dict[str, Any]:
    """An adapter_config.json as PEFT writes it."""
    return {
        "alora_invocation_tokens": None,
        "alpha_pattern": {},
        "arrow_config": None,
        "auto_mapping": None,
        "base_model_name_or_path": "tiny",
        "bias": "none",
        "corda_config": None,
        "ensure_weight_tying": False,
        "eva_config": None,
        "exclude_modules": None,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layer_replication": None,
        "layers_pattern": None,
        "layers_to_transform": None,
        "loftq_config": {},
        "lora_alpha": 8,
        "lora_bias": False,
        "lora_dropout": 0.05,
        "megatron_config": None,
        "megatron_core": "megatron.core",
        "modules_to_save": None,
        "peft_type": "LORA",
        "peft_version": "0.21.2",
        "qalora_group_size": 16,
        "r": 4,
        "rank_pattern": {},
        "revision": None,
        "target_modules": ["q_proj", "v_proj"],
        "target_parameters": None,
        "task_type": "CAUSAL_LM",
        "trainable_token_indices": None,
        "use_dora": False,
        "use_qalora": False,
        "use_rslora": False,
    } | fields


def draft_adapter(
    arch: TinyBase | None = None,
    *,
    rank: int = 4,
    targets: Sequence[str] = ("q_proj", "v_proj"),
    layers: Iterable[int] | None = None,
    dtype: str = "F32",
    seed: int = 1,
    ranks: Mapping[str, int] | None = None,
    infix: str = "",
    scale: float = 0.1,
    dora: bool = False,
    **config: Any,
) -> AdapterDraft:
    """Random A and B for `targets` in `layers` (all), with `dora` magnitudes too. `ranks` maps module paths to a rank
    of their own (also put into rank_pattern). `infix` is an adapter name inside the tensor names, as in
    ".lora_A.default.weight". Other keywords go into the config as they are."""
    arch = arch or TinyBase()
    rng = np.random.default_rng(seed)
    ranks = dict(ranks or {})
    chosen = list(range(arch.layers)) if layers is None else list(layers)
    infix = f".{infix}" if infix else ""
    draft = AdapterDraft(
        peft_config(
            r=rank,
            target_modules=list(targets),
            rank_pattern=ranks,
            layers_to_transform=None if layers is None else chosen,
            use_dora=dora,
        )
        | config
    )
    for layer in chosen:
        for site in targets:
            module = site_module(layer, site)
            if module == site and layer:
                continue  # the head, once
            r = ranks.get(module, rank)
            out_features, in_features = arch.out_in(site)
            prefix = f"base_model.model.{module}"
            a = rng.standard_normal((r, in_features)) * scale
            b = rng.standard_normal((out_features, r)) * scale
            draft.tensors[f"{prefix}.lora_A{infix}.weight"] = a.astype(NUMPY_DTYPES[dtype])
            draft.tensors[f"{prefix}.lora_B{infix}.weight"] = b.astype(NUMPY_DTYPES[dtype])
            if dora:
                magnitude = 1 + 0.2 * rng.standard_normal(out_features)
                draft.tensors[f"{prefix}.lora_magnitude_vector{infix}"] = magnitude.astype(
                    NUMPY_DTYPES[dtype]
                )
    return draft


def make_adapter(directory: Path, arch: TinyBase | None = None, **options: Any) -> AdapterFiles:
    """`draft_adapter`, written into `directory`."""
    return draft_adapter(arch, **options).write(directory)


_DELTA = "model.layers.0.linear_attn."
_DELTA_ROWS = {"in_proj_q": 8, "in_proj_k": 8, "in_proj_v": 16}


def write_delta_base(directory: Path) -> Path:
    """A base with the linears of a delta net in its first layer."""
    arch = TinyBase()
    tensors = base_tensors(arch)
    for name, rows in (("in_proj_qkv", sum(_DELTA_ROWS.values())), ("in_proj_z", 16)):
        tensors[f"{_DELTA}{name}.weight"] = tensors["lm_head.weight"][:rows].copy()
    write_base(directory, arch)
    write_safetensors(directory / "model.safetensors", tensors, {"format": "pt"})
    return directory


def draft_parts(rank: int = 4) -> AdapterDraft:
    """LoRA on the parts of its in_proj_qkv."""
    rng = np.random.default_rng(rank)
    draft = AdapterDraft(peft_config(r=rank, target_modules=[*_DELTA_ROWS]))
    for part, rows in _DELTA_ROWS.items():
        for matrix, shape in (("A", (rank, TinyBase().hidden)), ("B", (rows, rank))):
            name = f"base_model.model.{_DELTA}{part}.lora_{matrix}.weight"
            draft.tensors[name] = rng.standard_normal(shape).astype(np.float32)
    return draft


def attempt(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """The result of a call, or the AdapterRefused that it raised; no other exception is caught."""
    try:
        return call(*args, **options)
    except AdapterRefused as refusal:
        return refusal
