"""The linears and weights of a layer's gated delta net."""

from __future__ import annotations

import torch

from loraplex.engine.model.base import ModelUnsupported
from loraplex.engine.model.layer_kinds import DeltaKind
from loraplex.engine.model.layers.recurrent import RecurrentWeights, num_channels, pad_channels
from loraplex.engine.model.layers.tensors import LayerTensors
from loraplex.kernels.lora.site_groups import SiteGroup


def delta_groups(kind: DeltaKind, hidden: int) -> tuple[SiteGroup, SiteGroup, SiteGroup]:
    keys, values = kind.key_heads * kind.key_dim, kind.value_heads * kind.value_dim
    sizes = {
        1: (2 * keys + 2 * values,),
        2: (2 * keys + values, values),
        4: (keys, keys, values, values),
    }[len(kind.sites)]
    gates = (2 * kind.value_heads // len(kind.gates),) * len(kind.gates)
    return (
        SiteGroup("delta_in", kind.sites, hidden, sizes),
        SiteGroup("delta_gates", kind.gates, hidden, gates),
        SiteGroup("delta_out", (kind.out,), values, (hidden,)),
    )


def read_delta(
    kind: DeltaKind,
    tensors: LayerTensors,
    prefix: str,
    layer: int,
    given: SiteGroup,
    gates: SiteGroup,
    o: SiteGroup,
) -> RecurrentWeights:
    """Raises ModelUnsupported for tensors that do not fit."""
    return RecurrentWeights(
        given=tensors.linear(prefix, layer, given, bias=False),
        gates=tensors.linear(prefix, layer, gates, bias=False),
        conv=pad_channels(kind, _convolution(kind, tensors, prefix)[:, 0].T.float()).contiguous(),
        bias=None,
        # In the model's dtype first, as transformers loads them.
        a_log=tensors.tensor(f"{prefix}A_log", kind.value_heads).float(),
        dt_bias=tensors.tensor(f"{prefix}dt_bias", kind.value_heads).float(),
        skip=None,
        norm=tensors.tensor(f"{prefix}{kind.norm}.weight", kind.value_dim),
        o=tensors.linear(prefix, layer, o, bias=False),
    )


def _convolution(kind: DeltaKind, tensors: LayerTensors, prefix: str) -> torch.Tensor:
    """[C, 1, W]. Of OLMo Hybrid it is stored in three parts: those of queries, keys and values, or, as transformers
    saves it, thirds of all channels."""
    channels, names = num_channels(kind), [f"{prefix}{part}_conv1d.weight" for part in "qkv"]
    if len(kind.sites) < 4 or names[0] not in tensors:
        return tensors.tensor(f"{prefix}conv1d.weight", channels, 1, kind.width)
    keys, third = kind.key_heads * kind.key_dim, -(-channels // 3)

    def read(size: int) -> torch.Tensor:
        sizes = size, size, channels - 2 * size
        return torch.cat(
            [tensors.tensor(name, rows, 1, kind.width) for name, rows in zip(names, sizes, strict=True)]
        )

    try:
        return read(keys)
    except ModelUnsupported:
        return read(third)
