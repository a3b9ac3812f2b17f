"""A model without its weights: its sizes, as the server's own code for loading derives them from the config alone."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from loraplex.adapters.base_weights import gguf, schemes
from loraplex.adapters.base_weights.gguf import grouping, is_indexed, read_index
from loraplex.adapters.base_weights.grouped import group_of
from loraplex.adapters.base_weights.schemes import stored_floats, stored_sizes, stores_head
from loraplex.adapters.base_weights.tensors import QuantisationUnsupported
from loraplex.engine.model.base import ModelShape, ModelUnsupported
from loraplex.engine.model.code_products import bits_for_int8
from loraplex.engine.model.family import decoder_spec, is_fused
from loraplex.engine.model.fused import fused_decoder
from loraplex.engine.model.loading import model_shape, read_model_config, serving_dtype
from loraplex.engine.model.weights import ExaminedTensors, open_checkpoint
from loraplex.engine.model.wrapped import ATTENTION_NAME, TransformersDecoder, register_attention
from loraplex.kernels.backend import resolve_kernels
from loraplex.kernels.bundle import Kernels
from loraplex.kernels.linear.packed import every_part
from loraplex.kernels.lora.site_groups import SiteGroup
from loraplex.kernels.weight_form import FLOATS, block_of_4_bits, fits_tiles

_META = torch.device("meta")
_SCALE_BYTES = 4
_SHORT_SCALE_BYTES = 2
"""Scales beside codes that are multiplied as whole numbers: a checkpoint's, unless 16 bits do not hold one."""


@dataclass(frozen=True, slots=True)
class ModelOutline:
    """`weight_bytes` are all weights in memory; `step_bytes` those that a decoding step reads once: all but the
    embedding, where it reads a row for each token. `num_weights` and `step_weights` count the same. `hidden_size` and
    `inner_size` are the widths of a layer."""

    model_type: str
    shape: ModelShape
    site_groups: tuple[SiteGroup, ...]
    head_group: SiteGroup | None
    embedding_shape: tuple[int, int] | None
    dtype: torch.dtype
    weight_bytes: int
    step_bytes: int
    num_weights: int
    step_weights: int
    hidden_size: int
    inner_size: int

    @property
    def num_layers(self) -> int:
        return self.shape.num_layers


def outline_model(
    model_dir: Path, device: torch.device, dtype: str, *, max_model_len: int = 0, quantise: bool = False
) -> ModelOutline:
    """From config.json alone, for a server on `device`, which need not be here. `quantise`: linears and head are codes
    of 8 bits. Raises ModelUnsupported."""
    config, part = read_model_config(model_dir)
    # A GPU need not be here, so its own kernels are not asked for.
    kernels = resolve_kernels("auto" if device.type == "cpu" else "torch", device)
    chosen = serving_dtype(config, part, dtype, kernels)
    if is_fused(part.config.model_type):
        spec = decoder_spec(part.config, part.raw, max_model_len)
        groups = _Groups(model_dir, part.raw, device, quantise=quantise, dtype=dtype, kernels=kernels)
        source = _CountedTensors(has_head=not spec.tied, groups=groups)
        decoder = fused_decoder(source, spec, chosen, _META)
        count = spec.vocab_size * spec.hidden_size
        embed, head = (
            count * chosen.itemsize,
            source.bytes_of_linear("lm_head", (spec.vocab_size, spec.hidden_size), chosen),
        )
        # Where weights are packed, the head is a copy of the embeddings that it is tied to.
        copied = head if spec.tied and (groups.has_head or _packs(kernels, chosen)) else 0
        read_once = (
            source.num_bytes
            - embed
            + (copied if groups.has_head and spec.tied else embed if spec.tied else 0)
        )
        return ModelOutline(
            model_type=spec.model_type,
            shape=decoder.shape,
            site_groups=decoder.site_groups,
            head_group=decoder.head_group,
            embedding_shape=decoder.embedding_shape,
            dtype=chosen,
            weight_bytes=source.num_bytes + copied,
            step_bytes=read_once,
            num_weights=source.num_weights,
            step_weights=source.num_weights - (0 if spec.tied else count),
            hidden_size=spec.hidden_size,
            inner_size=spec.intermediate_size,
        )
    if quantise:
        raise ModelUnsupported(f"--quantise: {config.model_type} runs through transformers; plan without it")
    return _wrapped_outline(config, chosen)


def examine_tensors(model_dir: Path, max_model_len: int = 0) -> None:
    """Compare a checkpoint of the fused families with its config, without reading weights. Raises ModelUnsupported as
    `load_fused` does."""
    _, part = read_model_config(model_dir)
    if not is_fused(part.config.model_type):
        return
    spec = decoder_spec(part.config, part.raw, max_model_len)
    with open_checkpoint(model_dir) as checkpoint:
        examined = ExaminedTensors(checkpoint)
        fused_decoder(examined, spec, torch.float32, _META, codes=examined)
        checkpoint.refuse_leftover(spec.model_type, part.unread)


def _packs(kernels: Kernels, dtype: torch.dtype) -> bool:
    if kernels.device.type != "cpu":
        return False
    weight = torch.zeros(64, 64, dtype=dtype)
    packed = kernels.ops.pack(weight, FLOATS, dtype)
    return all(part is not weight for part in every_part(packed))


class _CountedTensors:
    """A checkpoint's tensors without values. Each weight is read once: the bytes are those of the model."""

    def __init__(self, *, has_head: bool, groups: _Groups) -> None:
        self.num_bytes = 0
        self.num_weights = 0
        self._has_head = has_head
        self._groups = groups

    def __contains__(self, name: str) -> bool:
        return name == "model.embed_tokens.weight" or (self._has_head and name == "lm_head.weight")

    def read_into(self, name: str, out: torch.Tensor) -> None:
        self.num_weights += out.numel()
        is_linear = out.dim() == 2 and "embed_tokens" not in name
        self.num_bytes += self.bytes_of_linear(name, tuple(out.shape), out.dtype) if is_linear else out.nbytes

    def bytes_of_linear(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Memory of a linear's weight [rows, inputs]."""
        rows, inputs = shape
        codes = self._groups.row_bytes(name, inputs)
        return rows * (inputs * dtype.itemsize if codes is None else codes)


class _Groups:
    """Groups of a linear's codes, by config.json, or by the index of a GGUF file: as the checkpoint stores them, or as
    `quantise` makes them. On a GPU 8-bit floats take their own bytes too, and codes of 4 bits half a byte, as with
    activations in 8 bits."""

    def __init__(
        self,
        model_dir: Path,
        raw: Mapping[str, Any],
        device: torch.device,
        *,
        quantise: bool,
        dtype: str,
        kernels: Kernels,
    ) -> None:
        """`dtype`: as it was asked for. Raises ModelUnsupported."""
        self._quantise = quantise
        self._halves = device.type == "cuda"
        try:
            self._stored = stored_sizes(raw)
            self._int8_bits = bits_for_int8(raw, dtype, kernels)
            self._beside = schemes.bytes_beside_4_bits(raw, integers=self._int8_bits > 0)
            self._stores_head = stores_head(raw)
            self._floats = stored_floats(raw) if device.type == "cuda" else None
            self._tensors = read_index(model_dir) if is_indexed(model_dir) else None
        except (QuantisationUnsupported, OSError) as error:
            raise ModelUnsupported(str(error)) from error

    @property
    def has_head(self) -> bool:
        """Whether the head is codes."""
        return self._quantise or self._stores_head or self._of_file("lm_head") is not None

    def _of_file(self, module: str) -> tuple[int, int] | None:
        if self._tensors is None:
            return None
        return grouping(self._tensors, self._in_file(module))

    def _in_file(self, module: str) -> str:
        assert self._tensors is not None
        is_tied = module == "lm_head" and f"{module}.weight" not in self._tensors
        return "model.embed_tokens" if is_tied else module

    def row_bytes(self, name: str, inputs: int) -> int | None:
        """Memory of one output's codes or 8-bit floats, scales and offsets; None where they are of the model's
        dtype."""
        group, numbers = group_of(inputs), 1
        beside: int | None = None
        module = name.removesuffix(".weight")
        if (found := self._of_file(module)) is not None:
            assert self._tensors is not None
            group, numbers = found
            beside = gguf.bytes_beside_4_bits(
                self._tensors, self._in_file(module), integers=self._int8_bits > 0
            )
        elif self._stored is not None and (self._stores_head or not name.startswith("lm_head")):
            group, numbers = self._stored
            group = inputs if group < 1 else group
            beside = self._beside
            if self._int8_bits == 8 and numbers == 1:
                return inputs + inputs // group * _SHORT_SCALE_BYTES
        elif not self._quantise:
            if self._floats is None or name.startswith("lm_head"):
                return None
            group = self._floats.group(inputs)
            if not fits_tiles(group, inputs):
                return None
        in_halves = self._halves and block_of_4_bits(inputs, group) is not None
        if beside is not None and (in_halves or self._int8_bits):
            return inputs // 2 + inputs // group * beside
        return inputs + inputs // group * numbers * _SCALE_BYTES


def _wrapped_outline(config: Any, dtype: torch.dtype) -> ModelOutline:
    from transformers import AutoModelForCausalLM

    register_attention()
    shape = model_shape(config)
    try:
        with _META:
            model = AutoModelForCausalLM.from_config(
                copy.deepcopy(config),
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                trust_remote_code=False,
            )
    except (KeyError, ValueError, RuntimeError, ImportError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelUnsupported(f"transformers cannot lay out this {config.model_type}: {reason}") from error
    decoder = TransformersDecoder(model.eval(), shape)
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    total = sum(tensor.nbytes for tensor in tensors.values())
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head is None or head.weight is embedding.weight
    text = config.get_text_config()
    return ModelOutline(
        model_type=config.model_type,
        shape=shape,
        site_groups=decoder.site_groups,
        head_group=decoder.head_group,
        embedding_shape=decoder.embedding_shape,
        dtype=dtype,
        weight_bytes=total,
        step_bytes=total - (0 if is_tied else embedding.weight.nbytes),
        num_weights=total // dtype.itemsize,
        step_weights=(total - (0 if is_tied else embedding.weight.nbytes)) // dtype.itemsize,
        hidden_size=text.hidden_size,
        inner_size=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
    )
