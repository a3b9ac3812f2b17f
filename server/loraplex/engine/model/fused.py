"""Our own layer loop for Llama and its like, over packed weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import embedding

from loraplex.engine.kv.layers import CacheKind
from loraplex.engine.model.adapted_linears import AdaptedLinears, Linear
from loraplex.engine.model.base import ForwardBatch, ModelShape
from loraplex.engine.model.family import DecoderSpec
from loraplex.engine.model.stored_codes import PackedReader
from loraplex.engine.model.stored_floats import packed_reader
from loraplex.engine.model.weights import TensorSource, open_checkpoint, tensor_bytes
from loraplex.kernels.attention import BLOCK_SIZE
from loraplex.kernels.attention.choice import AttentionChoice
from loraplex.kernels.attention.kernel import AttentionKernel, AttentionNeeds
from loraplex.kernels.attention.torch_attention import TorchAttention
from loraplex.kernels.attention.triton_tiling import AttentionShape
from loraplex.kernels.layers.rope import CosSinTable, rope_cos_sin
from loraplex.kernels.lora.site_groups import HEAD, SiteGroup
from loraplex.kernels.ops import Ops
from loraplex.kernels.recorded_layers import LayerInputs
from loraplex.kernels.torch_backend import torch_ops


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Norm weights are [C]: `input_norm` and `mlp_norm` before the two halves, `attention_out_norm` and
    `mlp_out_norm` behind them, before their results are added (Gemma). `q_norm` and `k_norm` are [D]. None where the
    family has no norm there. Gemma's are 1 + w in float32."""

    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Linear
    attention_out_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    mlp_out_norm: torch.Tensor | None


_CosSin = tuple[torch.Tensor, torch.Tensor]


class FusedDecoder:
    """Llama, Mistral, Qwen2, Qwen3, SmolLM, Phi-3, Gemma 2 and Gemma 3: one QKV and one gate-up linear a layer,
    residual and norm fused. `embed` [V, C] is the output head too where the embeddings are tied. `weights` are all of
    its own, as the kernels packed them."""

    def __init__(
        self,
        spec: DecoderSpec,
        layers: Sequence[LayerWeights],
        embed: torch.Tensor,
        norm: torch.Tensor,
        head: Any,
        *,
        ops: Ops,
        attention: AttentionChoice,
    ) -> None:
        """`head` is packed as the layers' weights are."""
        self._spec = spec
        self._ops = ops
        self._kernel = attention.kernel
        self._attention_reason = attention.reason
        self._layers = tuple(layers)
        self._embed = embed
        self._norm = norm
        self._head = head
        self.weights = self._layers, embed, norm, head
        self._inv_freqs = tuple(
            torch.tensor(rope.inv_freq, dtype=torch.float32, device=embed.device) for rope in spec.rope.ropes
        )
        self._cos_sin_tables = tuple(
            CosSinTable(inv_freq, rope.attention_factor)
            for inv_freq, rope in zip(self._inv_freqs, spec.rope.ropes, strict=True)
        )
        self._linears = AdaptedLinears(ops, eps=spec.rms_norm_eps, gemma=spec.gemma)
        self._recorded = None if ops.record_layers is None else ops.record_layers()
        # What differs between families is chosen here, so that the loop over the layers asks nothing.
        if spec.gemma:
            self._run_layers = self._gemma_layers
            # As transformers rounds it: in the embeddings' dtype.
            self._embed_scale = float(torch.tensor(spec.hidden_size**0.5).to(embed.dtype))
        else:
            self._run_layers = self._llama_layers
            self._embed_scale = 1.0

    @property
    def weight_bytes(self) -> int:
        return tensor_bytes(self.weights)

    @property
    def num_weights(self) -> int:
        spec = self._spec
        embedding = spec.vocab_size * spec.hidden_size
        layer = sum(group.in_features * sum(group.out_features) for group in self.site_groups)
        return spec.num_layers * layer + embedding * (1 if spec.tied else 2)

    @property
    def shape(self) -> ModelShape:
        spec = self._spec
        caches = tuple(CacheKind(spec.num_kv_heads, spec.head_dim, window) for window in spec.windows)
        return ModelShape(caches, spec.vocab_size, spec.rope.max_positions)

    @property
    def attention(self) -> AttentionKernel:
        return self._kernel

    @property
    def attention_reason(self) -> str:
        return self._attention_reason

    @property
    def num_layers(self) -> int:
        return self._spec.num_layers

    @property
    def hidden_size(self) -> int:
        return self._spec.hidden_size

    @property
    def dtype(self) -> torch.dtype:
        return self._embed.dtype

    @property
    def device(self) -> torch.device:
        return self._embed.device

    @property
    def site_groups(self) -> tuple[SiteGroup, ...]:
        spec = self._spec
        hidden, inner = spec.hidden_size, spec.intermediate_size
        query, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        o = SiteGroup("o", ("o_proj",), query, (hidden,))
        down = SiteGroup("down", ("down_proj",), inner, (hidden,))
        if spec.packed:
            return (
                SiteGroup("qkv", ("qkv_proj",), hidden, (query + 2 * kv,)),
                o,
                SiteGroup("gate_up", ("gate_up_proj",), hidden, (2 * inner,)),
                down,
            )
        return (
            SiteGroup("qkv", ("q_proj", "k_proj", "v_proj"), hidden, (query, kv, kv)),
            o,
            SiteGroup("gate_up", ("gate_proj", "up_proj"), hidden, (inner, inner)),
            down,
        )

    @property
    def head_group(self) -> SiteGroup:
        return SiteGroup(HEAD, (HEAD,), self._spec.hidden_size, (self._spec.vocab_size,))

    @property
    def embedding_shape(self) -> tuple[int, int]:
        return self._spec.vocab_size, self._spec.hidden_size

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        spec = self._spec
        if self._kernel.reads_unwritten:
            batch.kv.clear_blocks(batch.fresh_blocks)
        cos_sin = self._cos_sin(batch.positions)
        x, residual = self._layers_of(batch, self._embeddings(batch), cos_sin)
        # Only the rows go on that something is wanted of.
        if batch.take_hidden is not None and batch.hidden_rows is not None:
            batch.take_hidden(self._final_norm(x, residual, batch.hidden_rows))
        if batch.logits_rows.shape[0] == 0:
            return torch.empty(0, spec.vocab_size, device=self.device)
        x = self._final_norm(x, residual, batch.logits_rows)
        logits = self._ops.linear(x, self._head, None)
        if batch.token_rows is not None:
            batch.token_rows.replace_logits(x, logits)
        if batch.head_lora is not None:
            batch.head_lora.apply(0, HEAD, x, logits)
        logits = self._ops.to_float32(logits) if batch.logits_out is None else batch.logits_out.copy_(logits)
        if spec.logits_softcap is not None:
            logits.div_(spec.logits_softcap).tanh_().mul_(spec.logits_softcap)
        return logits

    def _embeddings(self, batch: ForwardBatch) -> torch.Tensor:
        """[T, C]"""
        found = embedding(batch.token_ids, self._embed)
        if batch.token_rows is not None:
            batch.token_rows.replace_embeddings(batch.token_ids, found)
        if self._embed_scale != 1.0:
            found.mul_(self._embed_scale)
        if batch.token_rows is not None:
            batch.token_rows.add_embeddings(batch.token_ids, found, self._embed_scale)
        return found

    def _layers_of(
        self, batch: ForwardBatch, residual: torch.Tensor, cos_sin: list[_CosSin]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The result of the layers: the residual, and what is still to be added to it."""

        def run(given: LayerInputs) -> torch.Tensor:
            inputs = replace(batch, attention=given.attention, lora=given.lora, begin_lora=given.begin_lora)
            return self._run_layers(
                inputs, given.residual, [given.cos_sin[kind] for kind in self._spec.rope.of_layer]
            )

        given = LayerInputs(residual, cos_sin, batch.attention, batch.lora, batch.begin_lora)
        recorded = None if self._recorded is None else self._recorded.run(given, batch.kv, run)
        return recorded or (run(given), residual)

    def _cos_sin(self, positions: torch.Tensor) -> list[_CosSin]:
        """cos and sin of each kind of rotation."""
        if positions.device.type == "cpu":
            return [table.rows(positions) for table in self._cos_sin_tables]
        return [
            rope_cos_sin(positions, inv_freq, rope.attention_factor)
            for inv_freq, rope in zip(self._inv_freqs, self._spec.rope.ropes, strict=True)
        ]

    def _final_norm(self, x: torch.Tensor, residual: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        x, residual = x.index_select(0, rows), residual.index_select(0, rows)
        return self._linears.add_rms_norm(x, residual, self._norm)

    def _llama_layers(
        self, batch: ForwardBatch, residual: torch.Tensor, cos_sin: list[_CosSin]
    ) -> torch.Tensor:
        """A norm before each half of a layer. Returns what is still to be added to `residual`."""
        linears = self._linears
        x = linears.rms_norm(residual, self._layers[0].input_norm)
        for index, layer in enumerate(self._layers):
            x = self._attention(index, layer, x, cos_sin[index], batch)
            x = linears.apply_and_norm(layer.o, x, index, "o", batch, layer.mlp_norm, residual)
            x = linears.gate(layer.gate_up, x, index, "gate_up", batch)
            if index == len(self._layers) - 1:
                break
            following = self._layers[index + 1].input_norm
            x = linears.apply_and_norm(layer.down, x, index, "down", batch, following, residual)
        return linears.apply(layer.down, x, index, "down", batch)

    def _gemma_layers(
        self, batch: ForwardBatch, residual: torch.Tensor, cos_sin: list[_CosSin]
    ) -> torch.Tensor:
        """A norm before each half of a layer and one behind it, in float32. Returns as `_llama_layers` does."""
        linears = self._linears
        x: torch.Tensor | None = None
        for index, layer in enumerate(self._layers):
            assert layer.attention_out_norm is not None
            assert layer.mlp_out_norm is not None
            if x is None:
                x = linears.rms_norm(residual, layer.input_norm)
            else:
                x = linears.add_rms_norm(x, residual, layer.input_norm)
            x = self._attention(index, layer, x, cos_sin[index], batch)
            x = linears.apply_and_norm(layer.o, x, index, "o", batch, layer.attention_out_norm, None)
            x = linears.add_rms_norm(x, residual, layer.mlp_norm)
            x = linears.gate(layer.gate_up, x, index, "gate_up", batch)
            x = linears.apply_and_norm(layer.down, x, index, "down", batch, layer.mlp_out_norm, None)
        assert x is not None
        return x

    def _attention(
        self,
        index: int,
        layer: LayerWeights,
        x: torch.Tensor,
        cos_sin: _CosSin,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        spec = self._spec
        num_rows = x.shape[0]
        queries = self._linears.apply_and_rotate(
            layer.qkv, x, index, "qkv", batch, spec.num_heads, cos_sin, layer.q_norm, layer.k_norm
        )
        out = self._kernel.run(
            queries,
            batch.kv.layer(index),
            batch.attention,
            scale=spec.attention_scale,
            window=spec.windows[index],
            softcap=spec.attention_softcap,
        )
        return out.view(num_rows, spec.num_heads * spec.head_dim)


def load_fused(
    model_dir: Path,
    spec: DecoderSpec,
    dtype: torch.dtype,
    device: torch.device,
    *,
    unread: tuple[str, ...] = (),
    ops: Ops | None = None,
    attention: AttentionChoice | None = None,
    quantise: bool = False,
) -> FusedDecoder:
    """Read a checkpoint into the packed layout. Memory beside the weights themselves: one tensor of the checkpoint.
    Tensors whose names begin with one of `unread` belong to other parts of a larger model. `quantise`: linears and head
    as codes of 8 bits in groups (`base_weights.grouped`), where they are not stored as codes. Those that are stored as
    8-bit floats stay so where `ops` multiplies with them. Raises ModelUnsupported for a tensor that is missing, of
    another shape, or unknown to the family: it would change the computation."""
    with open_checkpoint(model_dir) as checkpoint:
        codes = packed_reader(checkpoint, ops or torch_ops(device), dtype, quantise=quantise)
        decoder = fused_decoder(checkpoint, spec, dtype, device, ops=ops, attention=attention, codes=codes)
        checkpoint.refuse_leftover(spec.model_type, unread)
    return decoder


def fused_decoder(
    tensors: TensorSource,
    spec: DecoderSpec,
    dtype: torch.dtype,
    device: torch.device,
    *,
    ops: Ops | None = None,
    attention: AttentionChoice | None = None,
    codes: PackedReader | None = None,
) -> FusedDecoder:
    """The same of tensors that come from anywhere. `ops` and `attention` belong together; None: torch's. `codes` reads
    linears and head as codes; None: they are kept in `dtype`."""
    return DecoderReader(tensors, spec, dtype, device, ops, attention, codes).decoder()


def attention_needs(spec: DecoderSpec) -> AttentionNeeds:
    shape = AttentionShape(spec.num_heads, spec.num_kv_heads, spec.head_dim, BLOCK_SIZE)
    return AttentionNeeds(shape, tuple(dict.fromkeys(spec.windows)), spec.attention_softcap is not None)


class DecoderReader:
    """A checkpoint's tensors as `FusedDecoder` has them. Its methods raise ModelUnsupported as `load_fused` does."""

    def __init__(
        self,
        checkpoint: TensorSource,
        spec: DecoderSpec,
        dtype: torch.dtype,
        device: torch.device,
        ops: Ops | None,
        attention: AttentionChoice | None,
        codes: PackedReader | None,
    ) -> None:
        self._codes = codes
        self._ops = ops or torch_ops(device)
        self._attention = attention or AttentionChoice(
            TorchAttention(spec.num_kv_heads, spec.head_dim, dtype, device), "the default"
        )
        self._checkpoint = checkpoint
        self._spec = spec
        self._dtype = dtype
        self._device = device
        # A checkpoint of the model without its head is named without the "model." before each tensor, that of a
        # model that sees too has its text model one level down.
        roots = ("", "model.language_model.")
        self._root = next((root for root in roots if f"{root}embed_tokens.weight" in checkpoint), "model.")

    def decoder(self) -> FusedDecoder:
        spec = self._spec
        embed = self._tensor(f"{self._root}embed_tokens.weight", spec.vocab_size, spec.hidden_size)
        layers = [self.layer(index) for index in range(spec.num_layers)]
        head = None if self._codes is None else self._codes.read(self._head_names())
        head = self._head(embed) if head is None else head
        norm = self.final_norm()
        return FusedDecoder(spec, layers, embed, norm, head, ops=self._ops, attention=self._attention)

    def _head(self, embed: torch.Tensor) -> Any:
        if self._spec.tied and "lm_head.weight" not in self._checkpoint:
            return self._ops.pack_weight(embed)
        head = self._tensor("lm_head.weight", *embed.shape)
        # As transformers does: a head saved along with the embedding it is tied to counts where it differs.
        if self._spec.tied and not head.is_meta and torch.equal(head, embed):
            head = embed
        return self._ops.pack_weight(head)

    def _head_names(self) -> dict[str, tuple[int, int]]:
        has_own = self._codes is not None and self._codes.stores("lm_head")
        has_own = has_own or "lm_head.weight" in self._checkpoint
        stored = "lm_head" if has_own else f"{self._root}embed_tokens"
        return {stored: (self._spec.vocab_size, self._spec.hidden_size)}

    def final_norm(self) -> torch.Tensor:
        return self._norm(f"{self._root}norm", self._spec.hidden_size)

    def layer(self, index: int) -> LayerWeights:
        spec, prefix = self._spec, f"{self._root}layers.{index}."
        hidden, inner, head_dim = spec.hidden_size, spec.intermediate_size, spec.head_dim
        query, kv = spec.num_heads * head_dim, spec.num_kv_heads * head_dim
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        if spec.packed:
            qkv = {f"{attention}qkv_proj": query + 2 * kv}
            gate_up = {f"{mlp}gate_up_proj": 2 * inner}
        else:
            qkv = {f"{attention}q_proj": query, f"{attention}k_proj": kv, f"{attention}v_proj": kv}
            gate_up = {f"{mlp}gate_proj": inner, f"{mlp}up_proj": inner}
        return LayerWeights(
            input_norm=self._norm(f"{prefix}input_layernorm", hidden),
            qkv=self._linear(qkv, hidden, spec.qkv_bias),
            q_norm=self._norm(f"{attention}q_norm", head_dim) if spec.qk_norm else None,
            k_norm=self._norm(f"{attention}k_norm", head_dim) if spec.qk_norm else None,
            o=self._linear({f"{attention}o_proj": hidden}, query, spec.o_bias),
            attention_out_norm=(
                self._norm(f"{prefix}post_attention_layernorm", hidden) if spec.gemma else None
            ),
            mlp_norm=self._norm(
                f"{prefix}{'pre_feedforward' if spec.gemma else 'post_attention'}_layernorm", hidden
            ),
            gate_up=self._linear(gate_up, hidden, spec.mlp_bias),
            down=self._linear({f"{mlp}down_proj": hidden}, inner, spec.mlp_bias),
            mlp_out_norm=self._norm(f"{prefix}post_feedforward_layernorm", hidden) if spec.gemma else None,
        )

    def _linear(self, parts: dict[str, int], in_features: int, bias: bool) -> Linear:
        out_features = sum(parts.values())
        packed_bias = torch.empty(out_features, dtype=self._dtype, device=self._device) if bias else None
        if packed_bias is not None:
            self._fill(packed_bias, {f"{name}.bias": rows for name, rows in parts.items()})
        if self._codes is not None:
            codes = self._codes.read({name: (rows, in_features) for name, rows in parts.items()})
            if codes is not None:
                return Linear(codes, packed_bias)
        weight = torch.empty(out_features, in_features, dtype=self._dtype, device=self._device)
        self._fill(weight, {f"{name}.weight": rows for name, rows in parts.items()})
        return Linear(self._ops.pack_weight(weight), packed_bias)

    def _fill(self, out: torch.Tensor, parts: dict[str, int]) -> None:
        """Read the named tensors, each with its number of rows, one behind the other."""
        first = 0
        for name, rows in parts.items():
            self._checkpoint.read_into(name, out[first : first + rows])
            first += rows

    def _norm(self, module: str, size: int) -> torch.Tensor:
        if not self._spec.gemma:
            return self._tensor(f"{module}.weight", size)
        # 1 + w has too few digits for w in the model's own dtype.
        weight = torch.empty(size, dtype=torch.float32, device=self._device)
        self._checkpoint.read_into(f"{module}.weight", weight)
        return weight.add_(1.0)

    def _tensor(self, name: str, *shape: int) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
        self._checkpoint.read_into(name, tensor)
        return tensor
