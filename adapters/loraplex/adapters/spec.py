"""A validated adapter and the base that it must fit: names, shapes and byte ranges."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from loraplex.adapters.pooled import HeadTask


@dataclass(frozen=True, slots=True)
class SiteShape:
    """One linear of the base. `module_path` is its name in the checkpoint without ".weight", such as
    "model.layers.3.self_attn.q_proj", or "lm_head", whose layer is 0. The embedding, whose layer is 0 too, is a linear
    from the vocabulary to the hidden states."""

    layer: int
    site: str
    in_features: int
    out_features: int
    module_path: str


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """The routed experts of a layer, in the module `module_path` ("model.layers.3.mlp.experts"). Each has three
    linears: gate and up from `hidden_size` to `inner_size`, down back."""

    layer: int
    module_path: str
    count: int
    hidden_size: int
    inner_size: int
    in_turns: bool = False
    """Whether the base's stacks are [experts, in, out], with the outputs of gate and up in turns, as in gpt-oss. B of
    an adapter's stack has the outputs in turns too."""


@dataclass(frozen=True, slots=True)
class BaseSpec:
    """The base model as admission sees it. `fingerprint` (64 hex characters) is a SHA-256 over its
    architecture and weights. `sites` is keyed by (layer, site). `tied_head`: the config ties the head to the
    embedding. `quantise`: "int8" where the engine serves its linears as codes (`base_weights.grouped`), else "none";
    the fingerprint is of the checkpoint in both cases. `stored`: the scheme of a checkpoint that is quantised itself
    (`base_weights.schemes`), else empty. `multimodal`: the model type (`admission.model_parts`) whose text part it
    is, else empty. `experts`: the routed experts of a mixture, by layer."""

    fingerprint: str
    model_type: str
    num_layers: int
    sites: Mapping[tuple[int, str], SiteShape]
    model_dir: str
    tied_head: bool = False
    quantise: str = "none"
    stored: str = ""
    multimodal: str = ""
    experts: Mapping[int, ExpertShape] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A tensor inside a safetensors file: dtype by its safetensors name ("BF16", "F16", "F32", …), shape, and
    absolute byte offsets [start, end) in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class SiteWeights:
    """The two matrices of one site: a is [rank, in_features], b is [out_features, rank]. `scaling` is
    alpha/rank (alpha/sqrt(rank) under rsLoRA) with the site's own alpha and rank. `magnitude` [out_features] is
    DoRA's, None for plain LoRA. On the embedding in_features is the vocabulary."""

    layer: int
    site: str
    rank: int
    scaling: float
    a: TensorSlice
    b: TensorSlice
    magnitude: TensorSlice | None = None


ExpertSite = Literal["gate", "up", "gate_up", "down"]
"""A linear of an expert. `gate_up`: gate and up as one, in the order of rows that the base has."""


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """LoRA on one site of one expert, or in a stack on that of all experts of a layer."""

    layer: int
    site: ExpertSite
    expert: int
    """-1: all, in a stack."""
    rank: int
    """The rank of one expert."""
    scaling: float
    a: TensorSlice
    """[rank, in_features]. In a stack [experts·rank, in_features], row e·rank + i is row i of expert e."""
    b: TensorSlice
    """[out_features, rank]. In a stack [out_features, rank·experts], column i·experts + e is column i of expert e."""
    turned: bool = False
    """Whether `a` and `b` of a stack are of the transposed weights: then expert e's A is the transpose of its part of
    `b`, and its B that of its part of `a`."""
    in_turns: bool = False
    """Whether an expert's outputs are those of gate and up in turns. They are served as halves, gate before up."""


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Rows of the embedding, of the head, or of both where they are tied, that an adapter replaces: `rows` [n, hidden
    size] are those of the token ids `ids` [n], in their order."""

    module_path: str
    ids: tuple[int, ...]
    rows: TensorSlice
    in_embedding: bool
    in_head: bool


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """A classifier's head: `weight` [labels, hidden size] and perhaps `bias` [labels], for one token of a prompt or for
    each."""

    task: HeadTask
    weight: TensorSlice
    bias: TensorSlice | None

    @property
    def num_labels(self) -> int:
        return self.weight.shape[0]

    @property
    def num_parameters(self) -> int:
        return math.prod(self.weight.shape) + (0 if self.bias is None else self.num_labels)


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """A validated adapter. `rank` is the largest of any site or expert, `num_bytes` the size of the upload's files.
    `invocation`: the token ids from whose last occurrence in a prompt on an activated LoRA acts; empty for one that
    acts on every position."""

    digest: str
    rank: int
    sites: tuple[SiteWeights, ...]
    num_bytes: int
    targets: tuple[str, ...]
    tokens: tuple[TokenRows, ...] = ()
    invocation: tuple[int, ...] = ()
    head: HeadWeights | None = None
    experts: tuple[ExpertWeights, ...] = ()
    report: dict[str, Any] = field(default_factory=dict)
