"""The linears of a decoder that LoRA may change, grouped by the input they share."""

from __future__ import annotations

from dataclasses import dataclass

LAYER_SITES: tuple[str, ...] = (
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj",
    "dense", "out_proj", "fc1", "fc2", "c_fc", "c_proj", "query_key_value", "dense_h_to_4h", "dense_4h_to_h",
)  # fmt: skip
"""Every linear of a decoder layer that an adapter may carry, by its leaf name. `qkv_proj` and `gate_up_proj` are those
of families whose checkpoints hold Q, K and V, or gate and up, as one linear (Phi-3): one A and one B over all its rows,
Q before K before V, gate before up. The second line are names of families that run through transformers: Phi, OPT,
StarCoder2, GPT-NeoX. There a linear is adapted as it stands: the rows of a `query_key_value` are in the family's own
order."""

HEAD = "lm_head"
"""The linear behind the last layer, from hidden states to logits. Where a layer's number is asked for, it has 0."""

EMBEDDING = "embed_tokens"
"""The table before the first layer, from token ids to hidden states: a linear of one-hot rows. Its layer is 0 too."""

SITES = (*LAYER_SITES, HEAD, EMBEDDING)
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
