"""The linears of a decoder that LoRA may change, grouped by the input they share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

ATTENTION_OUT = "attn_c_proj"
"""The output of an attention whose leaf name, c_proj, is that of the feed-forward's output too."""

LAYER_SITES: tuple[str, ...] = (
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj",
    "per_layer_input_gate", "per_layer_projection",
    "dense", "out_proj", "fc1", "fc2", "c_fc", "c_proj", "query_key_value", "dense_h_to_4h", "dense_4h_to_h",
    "input_linear", "output_linear", "g_proj", "in_proj", "w1", "w2", "w3",
    "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "b_proj", "a_proj",
    "c_attn", ATTENTION_OUT, "fc_in", "fc_out", "Wqkv", "gate", "in_proj_qkvz", "in_proj_ba", "shared_expert_gate",
    "router", "proj",
)  # fmt: skip
"""Every linear of a decoder layer that an adapter may carry, by its leaf name. `qkv_proj` and `gate_up_proj` are
those of families whose checkpoints hold Q, K and V, or gate and up, as one linear (Phi-3): one A and one B over all
its rows, Q before K before V, gate before up. `per_layer_input_gate` and `per_layer_projection` are those of a
layer's own input (Gemma 4). `in_proj_qkv` to `in_proj_a`, and `out_proj`, are those of a gated delta net (Qwen3.5),
`b_proj` and `a_proj` its gates' in OLMo Hybrid. `in_proj` to `w3`, and `out_proj`, are LFM2's, and `g_proj` LFM3's;
those from `dense` on are names of families that run through transformers: Phi, OPT, StarCoder2, GPT-NeoX, Granite 4,
Laguna, and from `c_attn` to `Wqkv` on StarCoder, GPT-2, GPT-J and MPT. There a linear is adapted as it stands: the
rows of a `query_key_value` are in the family's own order. `gate` is the router of a mixture of experts (`ROUTERS`),
and `shared_expert_gate` gives the number that opens its shared expert. `in_proj_qkvz` and `in_proj_ba` are those of a
delta net in Qwen3-Next, whose rows are by key head."""

ROUTERS = ("gate", "router", "proj")
"""Names of the linear from a row to its experts' scores; the second is gpt-oss's and Granite's, the last Gemma 4's."""

SHARED_GATE = "shared_expert_gate"
"""The linear from a row to the gate of a shared expert."""

ROUTED_SITES = frozenset({*ROUTERS, SHARED_GATE})
"""Linears of a mixture that are sites in some families alone."""

FLOAT_SITES = frozenset({"in_proj_b", "in_proj_a", "in_proj_ba", "b_proj", "a_proj"}) | ROUTED_SITES
"""Linears that stay floats where those of a layer become codes: a delta net's gates, routers, and gates of experts."""

HEAD = "lm_head"
"""The linear behind the last layer, from hidden states to logits. Where a layer's number is asked for, it has 0."""

EMBEDDING = "embed_tokens"
"""The table before the first layer, from token ids to hidden states: a linear of one-hot rows. Its layer is 0 too."""

EMBEDDING_NAMES = frozenset({EMBEDDING, "embeddings"})
"""The leaf names of its module; the second is Nemotron-H's."""

MODEL_PROJECTION = "per_layer_model_projection"
"""The linear before the first layer, from an embedding to inputs of all layers' own. It counts as of layer 0."""

SITES = (*LAYER_SITES, HEAD, EMBEDDING, MODEL_PROJECTION)
"""Every linear that an adapter may carry."""


@dataclass(frozen=True, slots=True)
class SiteGroup:
    """Sites of one layer that read the same input and write adjacent columns of one output.

    `x` is [T, in_features]; `y` is [T, sum(out_features)], site i's columns following those of site i-1. A
    model declares its groups once; layers whose sizes differ have groups of other keys. One LoRA launch serves a group.
    """

    key: str
    sites: tuple[str, ...]
    in_features: int
    out_features: tuple[int, ...]
    layers: tuple[int, ...] | None = None
    """Those that have it; None: all."""

    def layers_of(self, num_layers: int) -> Iterable[int]:
        """Those that have it, of a model with `num_layers`."""
        return range(num_layers) if self.layers is None else self.layers


def name_groups(of_layers: Sequence[Sequence[SiteGroup]]) -> list[tuple[SiteGroup, ...]]:
    """The groups of each layer, each with the layers that have it. Groups of other sizes under one key get keys of
    their own, "down.1" behind "down"."""
    places: dict[SiteGroup, list[int]] = {}
    for layer, groups in enumerate(of_layers):
        for group in groups:
            places.setdefault(group, []).append(layer)
    named: dict[SiteGroup, SiteGroup] = {}
    for group, layers in places.items():
        same = sum(group.key == other.key for other in named)
        key = f"{group.key}.{same}" if same else group.key
        named[group] = replace(
            group, key=key, layers=None if len(layers) == len(of_layers) else tuple(layers)
        )
    return [tuple(named[group] for group in groups) for groups in of_layers]
