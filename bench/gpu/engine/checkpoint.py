"""A base model and adapters with random weights as files, as an operator would have them. Nothing is downloaded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench.gpu.models import RandomTensors, make_config

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LINEARS = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
_SHARD_BYTES = 4 << 30
_GROUP = 64
"""Inputs that share a scale under `--quantise int8`."""


def write_base(
    folder: Path, options: Mapping[str, Any], dtype: torch.dtype, device: torch.device, *, codes: bool
) -> None:
    """A checkpoint of `make_config(options)` in shards, drawn on `device`. `codes`: 8-bit codes in groups hold the
    linears exactly, so that an engine that makes codes of them serves what the checkpoint says."""
    with _Checkpoint(folder) as made:
        for name, drawn in _draw(options, dtype, device, folder):
            is_linear = drawn.dim() == 2 and "embed" not in name
            made.add(name, _exact_codes(drawn) if codes and is_linear else drawn)


def _draw(
    options: Mapping[str, Any], dtype: torch.dtype, device: torch.device, folder: Path
) -> Iterator[tuple[str, torch.Tensor]]:
    """The name and random numbers of each tensor of a model, whose config.json is in `folder` then."""
    from transformers import AutoModelForCausalLM

    config = make_config(
        {**options, "eos_token_id": 2, "bos_token_id": 1, "dtype": str(dtype).partition(".")[2]}
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    draw = RandomTensors(device, norm_offset=0.0, tied=bool(config.tie_word_embeddings))
    for name, weight in model.named_parameters():
        drawn = torch.empty(weight.shape, dtype=dtype, device=device)
        draw.read_into(name, drawn)
        yield name, drawn


class _Checkpoint:
    """Tensors as files of `_SHARD_BYTES` at most, in a new folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._shard: dict[str, torch.Tensor] = {}
        self._files: dict[str, str] = {}
        self._size = self._total = 0

    def __enter__(self) -> _Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        """Write the index of what was added."""
        self._write()
        index = {"metadata": {"total_size": self._total}, "weight_map": self._files}
        (self._folder / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if self._size + tensor.nbytes > _SHARD_BYTES:
            self._write()
        self._shard[name] = tensor.cpu()
        self._size += tensor.nbytes
        self._total += tensor.nbytes

    def _write(self) -> None:
        file = f"model-{len(set(self._files.values())):05d}.safetensors"
        save_file(self._shard, self._folder / file, metadata={"format": "pt"})
        self._files.update(dict.fromkeys(self._shard, file))
        self._shard, self._size = {}, 0


def _exact_codes(weight: torch.Tensor) -> torch.Tensor:
    """The weight [N, K] rounded to integers of -127 to 127 times a power of two for each group. The largest number of a
    group becomes 127 of them, so that its scale is found again."""
    group = min(_GROUP, weight.shape[1])
    groups = weight.float().view(-1, group)
    largest, at = groups.abs().max(-1, keepdim=True)
    scale = torch.exp2(torch.ceil(torch.log2(largest / 127)))
    codes = torch.round(groups / scale)
    codes.scatter_(1, at, 127 * groups.gather(1, at).sign())
    return (codes * scale).to(weight.dtype).view(weight.shape)


def write_adapter(
    folder: Path,
    options: Mapping[str, Any],
    rank: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    sites: Sequence[str] = LINEARS,
    seed: int = 0,
) -> None:
    """As PEFT saves one. It changes what it is added to by about half of its size."""
    generator = torch.Generator(device).manual_seed(seed)
    tensors = {}
    for layer in range(options["num_hidden_layers"]):
        for site in sites:
            parent = "self_attn" if site in ATTENTION else "mlp"
            for side, shape, std in _matrices(options, site, rank):
                drawn = torch.randn(shape, generator=generator, device=device) * std
                name = f"base_model.model.model.layers.{layer}.{parent}.{site}.lora_{side}.weight"
                tensors[name] = drawn.to(dtype).cpu()
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    _write_config(folder, rank, sites, 2.0 * rank)


def write_variant(folder: Path, original: Path, number: int) -> None:
    """The adapter `original` with another scaling: another version for the engine, whose tensors are on the disk
    once."""
    config = json.loads((original / "adapter_config.json").read_text("utf-8"))
    folder.mkdir(parents=True)
    (folder / "adapter_model.safetensors").symlink_to(original / "adapter_model.safetensors")
    _write_config(folder, config["r"], config["target_modules"], 2.0 * config["r"] * (1 + number / 1024))


def link(source: Path, target: Path) -> None:
    """Put the tensors of a variant into a store: those of all are on the disk once."""
    target.hardlink_to(source.resolve())


def adapter_bytes(options: Mapping[str, Any], rank: int, dtype: torch.dtype) -> int:
    """Of an adapter of this rank on all linears."""
    numbers = sum(
        rows * columns for site in LINEARS for _, (rows, columns), _ in _matrices(options, site, rank)
    )
    return int(options["num_hidden_layers"]) * numbers * dtype.itemsize


def _matrices(options: Mapping[str, Any], site: str, rank: int) -> list[tuple[str, tuple[int, int], float]]:
    """Side, shape and standard deviation of A and B."""
    hidden, inner, head = options["hidden_size"], options["intermediate_size"], options["head_dim"]
    queries, keys = options["num_attention_heads"] * head, options["num_key_value_heads"] * head
    inputs, outputs = {
        "q_proj": (hidden, queries),
        "k_proj": (hidden, keys),
        "v_proj": (hidden, keys),
        "o_proj": (queries, hidden),
        "gate_proj": (hidden, inner),
        "up_proj": (hidden, inner),
        "down_proj": (inner, hidden),
    }[site]
    return [("A", (rank, inputs), inputs**-0.5), ("B", (outputs, rank), 0.25 * rank**-0.5)]


def _write_config(folder: Path, rank: int, sites: Sequence[str], alpha: float) -> None:
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "random", "r": rank,
        "lora_alpha": alpha, "target_modules": list(sites), "bias": "none", "lora_dropout": 0.0,
        "inference_mode": True,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config), "utf-8")
