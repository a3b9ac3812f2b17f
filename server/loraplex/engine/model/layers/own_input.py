"""An input of each layer's own: a row of a table for each token, with a projection of its embedding, gated in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import embedding

from loraplex.engine.model.base import ForwardBatch
from loraplex.engine.model.layer_kinds import InputKind
from loraplex.engine.model.layers.adapted_linears import AdaptedLinears, Linear
from loraplex.engine.model.layers.tensors import LayerTensors
from loraplex.kernels.lora.site_groups import MODEL_PROJECTION, SiteGroup

TABLE = "embed_tokens_per_layer.weight"


@dataclass(frozen=True, slots=True)
class InputTables:
    """The weights that all layers' inputs are made with: `table` [V, L·P], the linear to [T, L·P], the norm [P] of each
    part."""

    table: torch.Tensor
    projection: Linear
    norm: torch.Tensor


@dataclass(frozen=True, slots=True)
class InputWeights:
    """One layer's: to [T, P] and back to [T, C], and the norm [C] behind."""

    gate: Linear
    projection: Linear
    norm: torch.Tensor


def table_group(kind: InputKind, hidden: int, num_layers: int) -> SiteGroup:
    """The projection of all layers' inputs. It counts as of layer 0."""
    return SiteGroup(MODEL_PROJECTION, (MODEL_PROJECTION,), hidden, (num_layers * kind.size,))


def input_groups(kind: InputKind, hidden: int) -> tuple[SiteGroup, SiteGroup]:
    """The gate, and the projection back."""
    gate, back = "per_layer_input_gate", "per_layer_projection"
    return SiteGroup(gate, (gate,), hidden, (kind.size,)), SiteGroup(back, (back,), kind.size, (hidden,))


def read_tables(
    kind: InputKind, tensors: LayerTensors, prefix: str, group: SiteGroup, table: torch.Tensor | None
) -> InputTables:
    """`prefix`: of the decoder's names. `table`: in place of the checkpoint's. Raises ModelUnsupported for tensors that
    do not fit."""
    if table is None:
        table = tensors.tensor(f"{prefix}{TABLE}", kind.vocab_size, sum(group.out_features))
    return InputTables(
        table=table,
        projection=tensors.linear(prefix, 0, group, bias=False),
        norm=tensors.norm(f"{prefix}per_layer_projection_norm", kind.size),
    )


def read_input(
    tensors: LayerTensors, prefix: str, layer: int, gate: SiteGroup, projection: SiteGroup
) -> InputWeights:
    """Raises ModelUnsupported for tensors that do not fit."""
    return InputWeights(
        gate=tensors.linear(prefix, layer, gate, bias=False),
        projection=tensors.linear(prefix, layer, projection, bias=False),
        norm=tensors.norm(f"{prefix}post_per_layer_input_norm", sum(projection.out_features)),
    )


def all_inputs(
    kind: InputKind,
    weights: InputTables,
    embeddings: torch.Tensor,
    batch: ForwardBatch,
    linears: AdaptedLinears,
) -> torch.Tensor:
    """[T, L·P], of the scaled embeddings [T, C]."""
    x = linears.apply(weights.projection, embeddings, batch).mul_(embeddings.shape[1] ** -0.5)
    x = linears.rms_norm(x.view(-1, kind.size), weights.norm).view(x.shape)
    # As transformers rounds it: in the table's dtype.
    scale = float(torch.tensor(kind.size**0.5).to(weights.table.dtype))
    rows = embedding(batch.token_ids, weights.table).mul_(scale)
    return x.add_(rows).mul_(2**-0.5)


def add_input(
    kind: InputKind,
    weights: InputWeights,
    x: torch.Tensor,
    residual: torch.Tensor,
    own: torch.Tensor,
    batch: ForwardBatch,
    linears: AdaptedLinears,
) -> torch.Tensor:
    """Add what the feed-forward left, x [T, C], to the residual. Returns what the layer's own input [T, P] makes of
    that, still to be added."""
    linears.add(residual, x)
    gated = linears.gate(weights.gate, residual, batch, kind.activation, own)
    return linears.apply_and_norm(weights.projection, gated, batch, weights.norm)
