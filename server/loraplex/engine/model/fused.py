"""Our own layer loop for Llama and its like, over packed weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch.nn.functional import embedding

from loraplex.engine.kv.layers import groups_by_layer
from loraplex.engine.model.base import ExpertStarts, ForwardBatch, ModelShape
from loraplex.engine.model.family import DecoderSpec
from loraplex.engine.model.layer_kinds import AttentionKind, FeedForwardKind, MixtureKind, ShortConvKind
from loraplex.engine.model.layers.adapted_linears import AdaptedLinears
from loraplex.engine.model.layers.feed_forwards import FEED_FORWARDS
from loraplex.engine.model.layers.mixers import MIXERS
from loraplex.engine.model.layers.mixture import mixture_expert_groups
from loraplex.engine.model.layers.own_input import (
    TABLE,
    InputTables,
    InputWeights,
    add_input,
    all_inputs,
    input_groups,
    read_input,
    read_tables,
    table_group,
)
from loraplex.engine.model.layers.tensors import LayerTensors
from loraplex.engine.model.stored_linears import PackedReader
from loraplex.engine.model.weights import TensorSource
from loraplex.kernels.attention import BLOCK_SIZE
from loraplex.kernels.attention.choice import AttentionChoice
from loraplex.kernels.attention.kernel import AttentionNeeds
from loraplex.kernels.attention.triton_tiling import AttentionShape
from loraplex.kernels.experts.lora_types import ExpertSiteGroup
from loraplex.kernels.layers.rope import rotation, scaling_by_position
from loraplex.kernels.linear.packed import PackedLinear, tensor_bytes
from loraplex.kernels.lora.site_groups import HEAD, SiteGroup, name_groups
from loraplex.kernels.ops import Ops
from loraplex.kernels.recorded_layers import LayerInputs
from loraplex.kernels.torch_backend import torch_kernels, torch_ops
from loraplex.kernels.weight_form import FLOATS


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Norm weights are [C], with the model's offset added, and None where its kind has none there."""

    input_norm: torch.Tensor | None
    mixer: Any
    """The weights that `MIXERS` read."""
    mixer_out_norm: torch.Tensor | None
    mlp_norm: torch.Tensor | None
    mlp: Any
    """Those that `FEED_FORWARDS` read."""
    mlp_out_norm: torch.Tensor | None
    own_input: InputWeights | None
    scale: float
    """Multiplies the residual that leaves the layer."""


class FusedDecoder:
    """The families of `family.FAMILIES`: residual and norm are fused, and so are linears of one input. `embed` [V, C]
    is the output head too where the embeddings are tied. `weights` are all of its own, as the kernels packed them."""

    def __init__(
        self,
        spec: DecoderSpec,
        layers: Sequence[LayerWeights],
        embed: torch.Tensor,
        norm: torch.Tensor,
        head: PackedLinear,
        inputs: InputTables | None = None,
        *,
        ops: Ops,
        attention: AttentionChoice,
    ) -> None:
        """`head` is packed as the layers' weights are. `inputs`: where layers have inputs of their own."""
        self._spec = spec
        self._ops = ops
        self._layers = tuple(layers)
        self._embed = embed
        self._norm = norm
        self._head = head
        self._inputs = inputs
        self.weights = self._layers, embed, norm, head, inputs
        self.shape = decoder_shape(spec, embed.dtype)
        self.num_layers = spec.num_layers
        self.attention = attention.kernel
        self.hidden_size: int | None = spec.hidden_size
        self.dtype, self.device = embed.dtype, embed.device
        self.embedding_shape: tuple[int, int] | None = spec.vocab_size, spec.hidden_size
        groups = [*chain.from_iterable(site_groups(spec))]
        self.site_groups = tuple(dict.fromkeys(groups))
        linears = sum(group.in_features * sum(group.out_features) for group in groups) + spec.expert_weights
        tables = spec.vocab_size * spec.hidden_size * (1 if spec.tied else 2)
        self.expert_groups = expert_groups(spec)
        self.num_weights = linears + tables + (0 if inputs is None else inputs.table.numel())
        self.head_group: SiteGroup | None = SiteGroup(HEAD, (HEAD,), spec.hidden_size, (spec.vocab_size,))
        self._rotations = tuple(
            rotation(rope.inv_freq, rope.attention_factor, self.device) for rope in spec.rope.ropes
        )
        self._unwritten: torch.Tensor | None = None
        if (scale := spec.rope.query_scale) is not None:
            cache = spec.layers[0].mixer.cache
            factors = scaling_by_position(
                scale.beta, scale.length, spec.rope.max_positions, cache.head_dim, self.dtype, self.device
            )
            self._rotations = *self._rotations, factors
            shape = 1, BLOCK_SIZE, 2, cache.kv_heads, cache.head_dim
            self._unwritten = torch.empty(shape, dtype=self.dtype, device=self.device)
        self.expert_starts = _expert_starts(spec, self.device)
        kept = self.expert_starts
        self._linears = AdaptedLinears(
            ops, spec.norm.eps, {} if kept is None else dict(zip(kept.layers, kept.starts, strict=True))
        )
        self._recorded = None if ops.record_layers is None else ops.record_layers()
        # As transformers rounds it: in the embeddings' dtype.
        self._embed_scale = float(torch.tensor(spec.embed_scale).to(embed.dtype))

    @property
    def weight_bytes(self) -> int:
        return tensor_bytes(self.weights)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        spec = self._spec
        if batch.enter_layer is not None:
            batch.enter_layer(0)
        if self.attention.reads_unwritten:
            batch.kv.clear_blocks(batch.fresh_blocks)
        cos_sin = [rotate(batch.positions) for rotate in self._rotations]
        embeddings = self._embeddings(batch)
        kind, inputs = spec.layers[0].own_input, None
        if kind is not None and self._inputs is not None:
            inputs = all_inputs(kind, self._inputs, embeddings, batch, self._linears)
        x, residual = self._layers_of(
            batch,
            LayerInputs(
                embeddings,
                cos_sin,
                batch.attention,
                batch.lora,
                inputs,
                batch.recurrent,
                expert_lora=batch.expert_lora,
            ),
        )
        # Only the rows go on that something is wanted of.
        if batch.take_hidden is not None and batch.hidden_rows is not None:
            batch.take_hidden(self._final_norm(x, residual, batch.hidden_rows))
        if batch.logits_rows.shape[0] == 0:
            return torch.empty(0, spec.vocab_size, device=self.device)
        x = self._final_norm(x, residual, batch.logits_rows)
        logits = self._head(x)
        if batch.token_rows is not None:
            batch.token_rows.replace_logits(x, logits)
        if batch.head_lora is not None:
            batch.head_lora.apply(0, HEAD, x, logits)
        logits = self._ops.to_float32(logits) if batch.logits_out is None else batch.logits_out.copy_(logits)
        if spec.multipliers.logits != 1.0:
            logits.div_(spec.multipliers.logits)
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
        if self._spec.multipliers.embedding != 1.0:
            found.mul_(self._spec.multipliers.embedding)
        return found

    def _layers_of(self, batch: ForwardBatch, given: LayerInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """The result of the layers: the residual, and what is still to be added to it."""

        def run(given: LayerInputs) -> torch.Tensor:
            own = replace(
                batch,
                attention=given.attention,
                lora=given.lora,
                recurrent=given.recurrent,
                expert_lora=given.expert_lora,
            )
            return self._run_layers(own, given)

        recorded = None
        # A recording does not wait between its layers.
        if self._recorded is not None and batch.enter_layer is None:
            recorded = self._recorded.run(given, batch.kv, run)
        return recorded or (run(given), given.residual)

    def _final_norm(self, x: torch.Tensor, residual: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        x, residual = x.index_select(0, rows), residual.index_select(0, rows)
        return self._linears.add_rms_norm(x, residual, self._norm, self._layers[-1].scale)

    def _run_layers(self, batch: ForwardBatch, given: LayerInputs) -> torch.Tensor:
        """Returns what is still to be added to the residual."""
        linears, layers, residual = self._linears, self._layers, given.residual
        first, times = layers[0].input_norm, self._spec.multipliers.residual
        x = residual if first is None else linears.rms_norm(residual, first)
        scaling = None if self._unwritten is None else (given.cos_sin[-1], self._unwritten)
        for index, (kind, layer) in enumerate(zip(self._spec.layers, layers, strict=True)):
            given.enter_layer(index)
            if batch.enter_layer is not None:
                batch.enter_layer(index)
            run = MIXERS[type(kind.mixer)].run
            x = run(kind.mixer, layer.mixer, x, given.cos_sin, batch, linears, self.attention, scaling)
            x = linears.apply_and_norm(layer.mixer.o, x, batch, layer.mixer_out_norm)
            x = x if times == 1.0 else linears.times(x, times)
            if kind.feed_forward is not None:
                x = linears.add_rms_norm(x, residual, layer.mlp_norm)
                feed_forward = FEED_FORWARDS[type(kind.feed_forward)]
                x = feed_forward.run(kind.feed_forward, layer.mlp, x, batch, linears, residual)
                x = linears.norm(x, layer.mlp_out_norm)
                x = x if times == 1.0 else linears.times(x, times)
            if kind.own_input is not None and layer.own_input is not None and given.own_inputs is not None:
                size = kind.own_input.size
                part = given.own_inputs[:, index * size : (index + 1) * size]
                x = add_input(kind.own_input, layer.own_input, x, residual, part, batch, linears)
            if index + 1 < len(layers):
                x = linears.add_rms_norm(x, residual, layers[index + 1].input_norm, layer.scale)
        return x


def _expert_starts(spec: DecoderSpec, device: torch.device) -> ExpertStarts | None:
    layers = [index for index, kind in enumerate(spec.layers) if isinstance(kind.feed_forward, MixtureKind)]
    if not layers:
        return None
    (count,) = {kind.router.num_experts for kind in spec.mixtures}
    starts = torch.zeros(len(layers), count + 1, dtype=torch.int64, device=device)
    return ExpertStarts(tuple(layers), starts)


def decoder_shape(spec: DecoderSpec, dtype: torch.dtype) -> ModelShape:
    """`dtype`: of the model's rows."""
    mixers = [kind.mixer for kind in spec.layers]
    caches = tuple(MIXERS[type(mixer)].cache(mixer, dtype) for mixer in mixers)
    return ModelShape(caches, spec.vocab_size, spec.rope.max_positions)


def attention_needs(spec: DecoderSpec) -> AttentionNeeds:
    mixers: list[AttentionKind] = []
    groups: dict[int, dict[tuple[AttentionShape, int | None], None]] = {}
    previous: dict[int, int] = {}
    for layer, group in zip(spec.layers, groups_by_layer(spec.caches), strict=True):
        of_group, mixer = groups.setdefault(group, {}), layer.mixer
        if isinstance(mixer, AttentionKind):
            mixers.append(mixer)
            of_group[_shape(mixer), mixer.cache.window] = None
        elif isinstance(mixer, ShortConvKind):
            previous[group] = max(previous.get(group, 0), mixer.width - 1)
    return AttentionNeeds(
        max(map(_shape, mixers), key=lambda shape: shape.num_kv_heads * shape.head_dim),
        tuple(dict.fromkeys(mixer.cache.window for mixer in mixers)),
        any(mixer.softcap is not None for mixer in mixers),
        any(mixer.sinks for mixer in mixers),
        tuple(tuple(groups[group]) for group in sorted(groups)),
        tuple(previous.get(group, 0) for group in sorted(groups)),
    )


def _shape(mixer: AttentionKind) -> AttentionShape:
    return AttentionShape(mixer.num_heads, mixer.cache.kv_heads, mixer.cache.head_dim, BLOCK_SIZE)


def site_groups(spec: DecoderSpec) -> list[tuple[SiteGroup, ...]]:
    """Those of each layer."""
    hidden, own = spec.hidden_size, spec.layers[0].own_input
    of_layer: list[tuple[SiteGroup, ...]] = [
        (
            *MIXERS[type(kind.mixer)].groups(kind.mixer, hidden),
            *_feed_forward_groups(kind.feed_forward, hidden),
            *(() if kind.own_input is None else input_groups(kind.own_input, hidden)),
        )
        for kind in spec.layers
    ]
    if own is not None:
        of_layer[0] = *of_layer[0], table_group(own, hidden, spec.num_layers)
    return name_groups(of_layer)


def expert_groups(spec: DecoderSpec) -> tuple[ExpertSiteGroup, ...]:
    """The linears of routed experts. All layers have as many of them, and as wide ones."""
    mixtures = {
        layer: kind.feed_forward
        for layer, kind in enumerate(spec.layers)
        if isinstance(kind.feed_forward, MixtureKind)
    }
    if not mixtures:
        return ()
    ((size, count),) = {(kind.size, kind.router.num_experts) for kind in mixtures.values()}
    return mixture_expert_groups(spec.hidden_size, size, count, tuple(mixtures))


def _feed_forward_groups(kind: FeedForwardKind | None, hidden: int) -> tuple[SiteGroup, ...]:
    return () if kind is None else FEED_FORWARDS[type(kind)].groups(kind, hidden)


class DecoderReader:
    """Tensors as `FusedDecoder` has them: of a checkpoint, or from anywhere else. Memory beside the weights themselves:
    one tensor. Its methods raise ModelUnsupported for a tensor that is missing, or of another shape."""

    def __init__(
        self,
        checkpoint: TensorSource,
        spec: DecoderSpec,
        dtype: torch.dtype,
        device: torch.device,
        ops: Ops | None = None,
        attention: AttentionChoice | None = None,
        codes: PackedReader | None = None,
    ) -> None:
        """`ops` and `attention` belong together; None: torch's. `codes` reads linears and head as more than floats;
        None: they are kept in `dtype`."""
        self._codes = codes
        self._ops = ops or torch_ops(device)
        self._attention = attention or torch_kernels(device, batch_invariant=False).choose_attention(
            "auto", attention_needs(spec), dtype
        )
        self._checkpoint = checkpoint
        self._spec = spec
        self._groups = site_groups(spec)
        self._tensors = LayerTensors(checkpoint, spec.norm, dtype, device, self._ops, codes)
        # A checkpoint of the model without its head is named without the "model." before each tensor, that of a
        # model that sees too has its text model one level down.
        roots = ("", "model.language_model.", "model.text_model.")
        name = f"{spec.names.embedding}.weight"
        self._root = next((root for root in roots if f"{root}{name}" in checkpoint), "model.")

    def decoder(self) -> FusedDecoder:
        spec = self._spec
        name = f"{self._root}{spec.names.embedding}.weight"
        embed = self._tensors.tensor(name, spec.vocab_size, spec.hidden_size)
        layers = [self.layer(index) for index in range(spec.num_layers)]
        head = None if self._codes is None else self._codes.read(self._head_names())
        head = self._head(embed) if head is None else head
        norm = self.final_norm()
        inputs = self.inputs()
        return FusedDecoder(spec, layers, embed, norm, head, inputs, ops=self._ops, attention=self._attention)

    @property
    def input_table(self) -> str | None:
        """The name of the table of layers' own inputs; None where they have none."""
        return None if self._spec.layers[0].own_input is None else f"{self._root}{TABLE}"

    def inputs(self, table: torch.Tensor | None = None) -> InputTables | None:
        """The weights that layers' own inputs are made with; None where they have none. `table` [V, L·P] in place of
        the checkpoint's."""
        own = self._spec.layers[0].own_input
        if own is None:
            return None
        return read_tables(own, self._tensors, self._root, self._groups[0][-1], table)

    @property
    def unread(self) -> tuple[str, ...]:
        """How the names begin of tensors that a checkpoint may have for nothing: layers behind the model's own, and
        keys and values of layers that read those of another."""
        spec, layers = self._spec, f"{self._root}layers."
        behind = (f"{layers}{spec.num_layers + index}." for index in range(spec.further_layers))
        shared = (
            f"{layers}{index}.self_attn.{part}_{what}"
            for index, kind in enumerate(spec.layers)
            if kind.mixer.cache.shares is not None
            for part in "kv"
            for what in ("proj", "norm")
        )
        return *behind, *shared

    def _head(self, embed: torch.Tensor) -> PackedLinear:
        if self._spec.tied and "lm_head.weight" not in self._checkpoint:
            return self._ops.pack(embed, FLOATS, embed.dtype)
        head = self._tensors.tensor("lm_head.weight", *embed.shape)
        # As transformers does: a head saved along with the embedding it is tied to counts where it differs.
        if self._spec.tied and not head.is_meta and torch.equal(head, embed):
            head = embed
        return self._ops.pack(head, FLOATS, head.dtype)

    def _head_names(self) -> dict[str, tuple[int, int]]:
        has_own = self._codes is not None and self._codes.stores("lm_head")
        has_own = has_own or "lm_head.weight" in self._checkpoint
        stored = "lm_head" if has_own else f"{self._root}{self._spec.names.embedding}"
        return {stored: (self._spec.vocab_size, self._spec.hidden_size)}

    def final_norm(self) -> torch.Tensor:
        return self._norm(f"{self._root}{self._spec.names.final_norm}")

    def layer(self, index: int) -> LayerWeights:
        kind, prefix = self._spec.layers[index], f"{self._root}layers.{index}."
        mixer, groups, hidden = MIXERS[type(kind.mixer)], self._groups[index], self._spec.hidden_size
        count = len(mixer.groups(kind.mixer, hidden))
        names, feed_forward = self._spec.names, kind.feed_forward
        of_mlp = groups[count : count + len(_feed_forward_groups(feed_forward, hidden))]
        own = groups[count + len(of_mlp) :]
        module = f"{prefix}{names.mixer or mixer.name}."
        behind, first, last = (
            names.with_norms_behind if kind.norms_behind else ("", names.feed_forward_norm, "")
        )
        before = kind.norms_before
        return LayerWeights(
            input_norm=self._norm(f"{prefix}{names.input_norm}") if before else None,
            mixer=mixer.read(kind.mixer, self._tensors, module, index, *groups[:count]),
            mixer_out_norm=self._norm(f"{prefix}{behind}") if behind else None,
            mlp_norm=self._norm(f"{prefix}{first}") if before and feed_forward is not None else None,
            mlp=None
            if feed_forward is None
            else FEED_FORWARDS[type(feed_forward)].read(
                feed_forward, self._tensors, prefix, names.feed_forward, index, *of_mlp
            ),
            mlp_out_norm=self._norm(f"{prefix}{last}") if last else None,
            own_input=read_input(self._tensors, prefix, index, *own[:2]) if own else None,
            scale=self._tensors.number(f"{prefix}layer_scalar") if kind.is_scaled else 1.0,
        )

    def _norm(self, module: str) -> torch.Tensor:
        return self._tensors.norm(module, self._spec.hidden_size)
