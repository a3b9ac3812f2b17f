"""Models and adapters with random weights, made where they are used: no file, no download."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from loraplex.adapters.device.host_image import HostImage, build_image
from loraplex.adapters.device.host_slab import HostPages, HostSlab
from loraplex.adapters.device.layout import ArenaLayout
from loraplex.adapters.spec import AdapterSpec, SiteWeights, TensorSlice
from loraplex.engine.model.family import DecoderSpec, decoder_spec
from loraplex.engine.model.fused import DecoderReader, FusedDecoder, attention_needs
from loraplex.kernels.backend import resolve_kernels
from loraplex.kernels.ops import Ops

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
QWEN3_0_6B: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}  # fmt: skip
GEMMA2_2B: dict[str, Any] = {
    "model_type": "gemma2", "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216,
    "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "max_position_embeddings": 8192, "query_pre_attn_scalar": 256, "sliding_window": 4096,
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "tie_word_embeddings": True,
}  # fmt: skip
GEMMA3_1B: dict[str, Any] = {
    "model_type": "gemma3_text", "vocab_size": 262144, "hidden_size": 1152, "intermediate_size": 6912,
    "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
    "max_position_embeddings": 32768, "query_pre_attn_scalar": 256, "sliding_window": 512,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
    },
}  # fmt: skip
QWEN3_5_0_8B: dict[str, Any] = {
    "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 1024, "intermediate_size": 3584,
    "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
    "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
}  # fmt: skip
GRANITE_4_H_1B: dict[str, Any] = {
    "model_type": "granitemoehybrid", "vocab_size": 100352, "hidden_size": 1536, "intermediate_size": 4096,
    "shared_intermediate_size": 4096, "num_hidden_layers": 40, "num_attention_heads": 12, "num_key_value_heads": 4,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "num_local_experts": 0,
    "num_experts_per_tok": 0, "position_embedding_type": "nope", "mamba_n_heads": 48, "mamba_d_head": 64,
    "mamba_d_state": 128, "embedding_multiplier": 12.0, "logits_scaling": 6.0, "residual_multiplier": 0.22,
    "attention_multiplier": 0.0078125,
}  # fmt: skip
TINY: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
}  # fmt: skip
"""Sizes that replace those of a shape, for the interpreter."""

Pack = Callable[[Ops, torch.Tensor], Any]
"""From the kernels and a weight [N, K] to what their `linear` takes."""
Dense = dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor, float]]
"""(layer, site) → A [R, K], B [N, R], scaling."""


def make_config(options: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(**options)


def spec_of(config: Any) -> DecoderSpec:
    return decoder_spec(config, json.loads(config.to_json_string()))


class RandomTensors:
    """Weights by name, drawn on request: linears keep the size of what goes through them, the head's
    too where it is the embedding."""

    def __init__(self, device: torch.device, *, norm_offset: float, tied: bool, seed: int = 0) -> None:
        self._generator = torch.Generator(device).manual_seed(seed)
        self._center = 1.0 - norm_offset
        self._tied = tied

    def __contains__(self, name: str) -> bool:
        return name.startswith("model.layers.") or (name == "lm_head.weight" and not self._tied)

    def read_into(self, name: str, out: torch.Tensor) -> None:
        if "norm" in name:
            # That of a delta net has no offset.
            center = 1.0 if "linear_attn" in name else self._center
            out.normal_(center, 0.1, generator=self._generator)
        else:
            out.normal_(0.0, out.shape[-1] ** -0.5, generator=self._generator)


class StateTensors:
    """The weights of a model of transformers."""

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        self._state = state

    def __contains__(self, name: str) -> bool:
        return name in self._state

    def read_into(self, name: str, out: torch.Tensor) -> None:
        tensor = self._state[name]
        if tensor.shape != out.shape:
            raise ValueError(f"{name} has the shape {list(tensor.shape)}, not {list(out.shape)}")
        out.copy_(tensor)


def random_decoder(
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    *,
    batch_invariant: bool = False,
    attention: str = "auto",
    pack: Pack | None = None,
) -> FusedDecoder:
    """The engine's decoder of any size, in a second. `pack` as of `decoder_of`."""
    spec = spec_of(config)
    tensors = RandomTensors(device, norm_offset=spec.norm.offset, tied=spec.tied)
    return decoder_of(
        tensors, spec, dtype, device, batch_invariant=batch_invariant, attention=attention, pack=pack
    )


def decoder_of(
    tensors: Any,
    spec: DecoderSpec,
    dtype: torch.dtype,
    device: torch.device,
    *,
    batch_invariant: bool = False,
    attention: str = "auto",
    pack: Pack | None = None,
) -> FusedDecoder:
    """`pack` packs weights in place of `Ops.pack`."""
    kernels = resolve_kernels("triton", device, batch_invariant=batch_invariant)
    needs = attention_needs(spec)
    # A `Rig` keeps all positions: its layers are one group.
    needs = replace(
        needs, groups=(tuple(chain.from_iterable(needs.groups)),), previous=(needs.previous_of(None),)
    )
    chosen = kernels.choose_attention(attention, needs, dtype)
    ops = (
        kernels.ops
        if pack is None
        else replace(kernels.ops, pack=lambda weight, *_: pack(kernels.ops, weight))
    )
    return DecoderReader(tensors, spec, dtype, device, ops, chosen).decoder()


def random_reference(config: Any, dtype: torch.dtype, device: torch.device) -> tuple[Any, Any]:
    """transformers' model in `dtype`, and the same weights in float32, both with its eager attention."""
    from transformers import AutoModelForCausalLM

    made = []
    for kind in (dtype, torch.float32):
        with device:
            model = AutoModelForCausalLM.from_config(config, dtype=kind, attn_implementation="eager")
        made.append(model.eval().requires_grad_(False))
    offset = spec_of(config).norm.offset
    draw = RandomTensors(device, norm_offset=offset, tied=bool(config.tie_word_embeddings))
    for name, weight in made[0].named_parameters():
        draw.read_into(name, weight)
    made[1].load_state_dict(made[0].state_dict())
    return made[0], made[1]


@dataclass(frozen=True)
class Adapter:
    """As PEFT would have trained it: a laid-out image, and its matrices."""

    image: HostImage
    dense: Dense


def random_adapter(
    layout: ArenaLayout,
    rank: int,
    device: torch.device,
    *,
    seed: int = 0,
    sites: tuple[str, ...] | None = None,
) -> Adapter:
    """One of this rank on all linears, or on `sites`. It changes what it is added to by about half of its size."""
    name = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}[layout.dtype]
    generator = torch.Generator(device).manual_seed(seed)
    listed: list[SiteWeights] = []
    parts: list[torch.Tensor] = []
    dense: Dense = {}
    end = 0
    for layer in range(layout.num_layers):
        for group in (g for g in layout.groups if layer in g.layers_of(layout.num_layers)):
            for site, width in zip(group.sites, group.out_features, strict=True):
                if sites is not None and site not in sites:
                    continue
                slices = []
                for shape, std in (
                    ((rank, group.in_features), group.in_features**-0.5),
                    ((width, rank), 0.25 * rank**-0.5),
                ):
                    drawn = torch.randn(shape, generator=generator, device=device)
                    parts.append((drawn * std).to(layout.dtype))
                    start, end = end, end + parts[-1].nbytes
                    slices.append(TensorSlice(name, shape, start, end))
                # A power of two: nothing is rounded where it is folded in.
                dense[layer, site] = parts[-2], parts[-1], 2.0
                listed.append(SiteWeights(layer, site, rank, 2.0, *slices))
    spec = AdapterSpec(f"{seed:064x}", rank, tuple(listed), end, ())
    raw = torch.cat([part.reshape(-1).view(torch.uint8) for part in parts]).cpu().numpy()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "adapter"
        raw.tofile(path)
        image = build_image(spec, path, layout, memory=partial(_own_slab, layout, device))
    return Adapter(image, dense)


def _own_slab(layout: ArenaLayout, device: torch.device, num_pages: int) -> HostPages:
    """Memory of one adapter, as the engine's."""
    slab = HostSlab(num_pages * layout.page_bytes, layout.page_bytes, pinned=device.type == "cuda")
    return slab.take(num_pages)
