"""The linears and weights of a layer's Mamba-2: one linear to all that it computes with, and one behind it."""

from __future__ import annotations

from loraplex.engine.model.layer_kinds import MambaKind
from loraplex.engine.model.layers.recurrent import RecurrentWeights, num_channels, pad_channels
from loraplex.engine.model.layers.tensors import LayerTensors
from loraplex.kernels.lora.site_groups import SiteGroup


def mamba_groups(kind: MambaKind, hidden: int) -> tuple[SiteGroup, SiteGroup]:
    inner = kind.num_heads * kind.head_dim
    given = inner + num_channels(kind) + kind.num_heads
    return (
        SiteGroup("mamba_in", ("in_proj",), hidden, (given,)),
        SiteGroup("mamba_out", ("out_proj",), inner, (hidden,)),
    )


def read_mamba(
    kind: MambaKind, tensors: LayerTensors, prefix: str, layer: int, given: SiteGroup, o: SiteGroup
) -> RecurrentWeights:
    """Raises ModelUnsupported for tensors that do not fit."""
    channels, norm = num_channels(kind), tensors.tensor(f"{prefix}norm.weight", o.in_features)
    conv = tensors.tensor(f"{prefix}conv1d.weight", channels, 1, kind.width)[:, 0].T.float()
    bias = tensors.tensor(f"{prefix}conv1d.bias", channels).float() if kind.conv_bias else None
    return RecurrentWeights(
        given=tensors.linear(prefix, layer, given, kind.bias),
        gates=None,
        conv=pad_channels(kind, conv).contiguous(),
        bias=None if bias is None else pad_channels(kind, bias),
        a_log=tensors.tensor(f"{prefix}A_log", kind.num_heads).float(),
        dt_bias=tensors.tensor(f"{prefix}dt_bias", kind.num_heads).float(),
        skip=tensors.tensor(f"{prefix}D", kind.num_heads).float(),
        norm=norm if kind.num_groups == 1 else norm.view(kind.num_groups, -1),
        o=tensors.linear(prefix, layer, o, kind.bias),
    )
