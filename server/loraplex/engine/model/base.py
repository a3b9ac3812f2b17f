"""The interface of a decoder for the runner: a function from a flat batch and a KV cache to logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from loraplex.adapters.errors import LoraplexError
from loraplex.engine.kv.cache import KVCache
from loraplex.engine.kv.layers import CacheKind
from loraplex.kernels.attention.kernel import AttentionKernel
from loraplex.kernels.experts.lora_types import ExpertLoraPass, ExpertSiteGroup
from loraplex.kernels.lora.site_groups import SiteGroup
from loraplex.kernels.lora.types import LoraPass
from loraplex.kernels.recurrent.types import RecurrentRows


class ModelUnsupported(LoraplexError):
    """This checkpoint can't be served; the message says which property of it, and what to do."""

    code = "model_unsupported"


class TokenRows(Protocol):
    """Changes by token of the adapters of one step: see `loraplex.kernels.lora.token_rows`."""

    def replace_embeddings(self, token_ids: torch.Tensor, y: torch.Tensor) -> None:
        """y [T, C]: the base's embeddings of token_ids [T], not scaled yet, changed in place."""
        ...

    def add_embeddings(self, token_ids: torch.Tensor, y: torch.Tensor, scale: float) -> None:
        """y [T, C]: the scaled embeddings, changed in place. `scale`: what they were scaled by."""
        ...

    def replace_logits(self, x: torch.Tensor, logits: torch.Tensor) -> None:
        """x [S, C] is what the head reads, logits [S, V] what it gives without adapters, changed in place."""
        ...


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes that the KV cache and the sampler are made from. `caches`: what each layer keeps. `max_positions` is
    the longest sequence that the checkpoint's position embedding is made for."""

    caches: tuple[CacheKind, ...]
    vocab_size: int
    max_positions: int

    @property
    def num_layers(self) -> int:
        return len(self.caches)


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The rows of one step, T in all, flat: sequences one after another, each with its next positions.

    `token_ids`, `positions` [T] int64. `attention` knows where each sequence's KV lies: what the model's
    `AttentionKernel` laid out for each group of layers. `fresh_blocks` [n] int64 are those that the step begins.
    `logits_rows` [S] int64 are the rows whose logits are wanted. `take_hidden` is called with the hidden states behind
    the final norm, [P, C], of `hidden_rows` [P] int64. `logits_out` [S, V] float32 is where the logits go; None: into a
    new tensor. `lora` is None where no row has an adapter that changes a layer; `expert_lora`, where none has one that
    changes routed experts; `head_lora`, over the rows of `logits_rows`, where none has one that changes the head.
    `recurrent` is None where no layer keeps a state. `enter_layer` is called with the number of each layer before
    anything reads its adapters, which may still be arriving; None where all are there.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    attention: tuple[Any, ...]
    fresh_blocks: torch.Tensor
    logits_rows: torch.Tensor
    kv: KVCache
    lora: LoraPass | None = None
    head_lora: LoraPass | None = None
    hidden_rows: torch.Tensor | None = None
    take_hidden: Callable[[torch.Tensor], None] | None = None
    logits_out: torch.Tensor | None = None
    token_rows: TokenRows | None = None
    recurrent: RecurrentRows | None = None
    expert_lora: ExpertLoraPass | None = None
    enter_layer: Callable[[int], None] | None = None

    def attention_of(self, layer: int) -> Any:
        """The batch that the `AttentionKernel` laid out for the group of this layer."""
        return self.attention[self.kv.group_of[layer]]


@dataclass(frozen=True, slots=True)
class ExpertStarts:
    """`starts` [n, E + 1] int64 of the last step in each of n `layers` with a mixture: expert e had the places
    `starts[n, e]` … `starts[n, e + 1]` - 1. Each step overwrites them."""

    layers: tuple[int, ...]
    starts: torch.Tensor


class Model(Protocol):
    """A decoder with its weights on one device."""

    shape: ModelShape
    num_layers: int
    hidden_size: int | None
    """C of `ForwardBatch.take_hidden`; None where the model cannot give hidden states."""
    dtype: torch.dtype
    device: torch.device
    attention: AttentionKernel
    """The kernel that computes its attention. It lays out the batch of each step."""
    site_groups: tuple[SiteGroup, ...]
    """The linears of layers that adapters may change, as the forward pass calls `LoraPass.apply` for them."""
    expert_groups: tuple[ExpertSiteGroup, ...]
    """The linears of routed experts that adapters may change, as it calls `ExpertLoraPass.apply` for them."""
    head_group: SiteGroup | None
    """The linear behind the layers, of key HEAD, applied as of layer 0; None where adapters can't change it."""
    embedding_shape: tuple[int, int] | None
    """(vocabulary, hidden size) of the table before the layers; None where adapters can't change it."""
    expert_starts: ExpertStarts | None
    """Where its routers sent the rows of the last step; None where it has none, or does not tell."""
    num_weights: int
    """Weights of its linears and embeddings, whatever memory each takes."""

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights, as they are laid out."""
        ...

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """[S, V] float32: logits of `logits_rows`, `logits_out` itself where the batch has it. Writes the batch's K and
        V into the cache. Runs under inference mode."""
        ...
