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
from loraplex.kernels.lora.site_groups import SiteGroup
from loraplex.kernels.lora.types import LoraPass


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


class LoraReaders(Protocol):
    """The adapters of one step, computed by what reads them: in place of `LoraPass.apply` and the operation behind it.
    y is what the base's linear returned for x."""

    def rotary(
        self,
        layer: int,
        group: str,
        x: torch.Tensor,
        y: torch.Tensor,
        num_heads: int,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: torch.Tensor,
        slots: torch.Tensor,
        *,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
    ) -> bool:
        """`Ops.rotate_and_write` of the updated y [T, (Hq + 2·Hkv)·D], whose queries are changed in place. slots [T]
        are those of the batch's attention. False where it is not computed so."""
        ...

    def gated(
        self, layer: int, group: str, x: torch.Tensor, y: torch.Tensor, *, gelu: bool
    ) -> torch.Tensor | None:
        """[T, I]: `Ops.silu_and_mul` of the updated y [T, 2·I], or `Ops.gelu_tanh_and_mul`. None where it is not
        computed so."""
        ...

    def norm(
        self,
        layer: int,
        group: str,
        x: torch.Tensor,
        y: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        residual: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """[T, C]: `Ops.add_rms_norm` of the updated y [T, C] and `residual`, or `Ops.rms_norm` without one. None where
        it is not computed so."""
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
    `AttentionKernel` laid out. `fresh_blocks` [n] int64 are those that the step begins. `logits_rows` [S] int64 are the
    rows whose logits are wanted. `take_hidden` is called with the hidden states behind the final norm, [P, C], of
    `hidden_rows` [P] int64. `logits_out` [S, V] float32 is where the logits go; None: into a new tensor. `lora` is None
    where no row has an adapter that changes a layer; `head_lora`, over the rows of `logits_rows`, where none has one
    that changes the head. `begin_lora` (layer, group, x) is called with each x that `lora.apply` will get, before the
    base's product of it. A model need not call it. `lora_readers` computes
    some of `lora` in the operations that read it, for a model that asks it.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    attention: Any
    fresh_blocks: torch.Tensor
    logits_rows: torch.Tensor
    kv: KVCache
    lora: LoraPass | None = None
    head_lora: LoraPass | None = None
    hidden_rows: torch.Tensor | None = None
    take_hidden: Callable[[torch.Tensor], None] | None = None
    logits_out: torch.Tensor | None = None
    begin_lora: Callable[[int, str, torch.Tensor], None] | None = None
    lora_readers: LoraReaders | None = None
    token_rows: TokenRows | None = None


class Model(Protocol):
    """A decoder with its weights on one device. `site_groups` are the linears of a layer that adapters may change,
    as the forward pass calls `LoraPass.apply` for them: the same in all layers. `head_group`, whose key is HEAD, is the
    linear behind them, applied as of layer 0; `embedding_shape` is (vocabulary, hidden size) of the table before them.
    Both are None where adapters can't change them."""

    @property
    def shape(self) -> ModelShape: ...

    @property
    def site_groups(self) -> tuple[SiteGroup, ...]: ...

    @property
    def head_group(self) -> SiteGroup | None: ...

    @property
    def embedding_shape(self) -> tuple[int, int] | None: ...

    @property
    def attention(self) -> AttentionKernel:
        """The kernel that computes its attention. It lays out the batch of each step."""
        ...

    @property
    def attention_reason(self) -> str:
        """Why that one, in words."""
        ...

    @property
    def num_layers(self) -> int: ...

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights, as they are laid out."""
        ...

    @property
    def num_weights(self) -> int:
        """Weights of its linears and embeddings, whatever memory each takes."""
        ...

    @property
    def hidden_size(self) -> int | None:
        """C of `ForwardBatch.take_hidden`; None where the model cannot give hidden states."""
        ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """[S, V] float32: logits of `logits_rows`, `logits_out` itself where the batch has it. Writes the batch's K and
        V into the cache. Runs under inference mode."""
        ...
