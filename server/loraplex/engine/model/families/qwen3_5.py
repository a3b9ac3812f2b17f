"""Gated delta nets in the configs of Qwen3.5, Qwen3-Next and OLMo Hybrid."""

from __future__ import annotations

from typing import Any

import msgspec

from loraplex.adapters.store.files import shown
from loraplex.engine.kv.layers import CacheKind
from loraplex.engine.model.base import ModelUnsupported
from loraplex.engine.model.layer_kinds import DeltaKind

FIELDS = frozenset(
    {
        "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads",
        "linear_num_value_heads", "full_attention_interval", "partial_rotary_factor", "mtp_num_hidden_layers",
        "mtp_use_dedicated_embeddings",
    }
)  # fmt: skip
"""Config fields beside those that other families have too."""
HARMLESS: dict[str, tuple[Any, ...]] = {
    "attn_output_gate": (None, True),
    "output_gate_type": (None, "silu", "swish"),
    "mamba_ssm_dtype": (None, "float32"),
}
"""Values of fields that transformers does not read, as it computes."""
_LINEAR, _FULL = "linear_attention", "full_attention"
_MOST_WIDTH = 4
"""Positions of the convolution."""
_STEP = 16
"""Sizes of heads are multiples of this."""


OLMO_FIELDS = frozenset(
    {
        "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads",
        "linear_num_value_heads", "linear_allow_neg_eigval", "linear_a_log_min", "linear_a_log_max", "linear_dt_min",
        "linear_dt_max", "linear_dt_init_floor",
    }
)  # fmt: skip
"""Those of OLMo Hybrid; the last five are of new weights alone."""


def olmo_rotates(config: Any) -> bool:
    """Released configs have no rope_theta, and rotate nothing."""
    return (config.rope_parameters or {}).get("rope_theta") is not None


def olmo_delta_kind(config: Any) -> DeltaKind:
    """Raises ModelUnsupported."""
    return msgspec.structs.replace(
        delta_kind(config),
        sites=("q_proj", "k_proj", "v_proj", "g_proj"),
        gates=("b_proj", "a_proj"),
        out="o_proj",
        norm="o_norm",
        # As transformers has it, whatever the config says of the other norms.
        norm_eps=1e-5,
        beta_scale=2.0 if config.linear_allow_neg_eigval else 1.0,
    )


def next_delta_kind(config: Any) -> DeltaKind:
    """Raises ModelUnsupported."""
    return msgspec.structs.replace(delta_kind(config), sites=("in_proj_qkvz",), gates=("in_proj_ba",))


def delta_kind(config: Any) -> DeltaKind:
    """Raises ModelUnsupported."""
    kind = DeltaKind(
        CacheKind(0, 0),
        key_heads=config.linear_num_key_heads,
        value_heads=config.linear_num_value_heads,
        key_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim,
        width=config.linear_conv_kernel_dim,
    )
    if kind.value_heads % kind.key_heads:
        raise ModelUnsupported(
            f"linear_num_value_heads {kind.value_heads} is no multiple of linear_num_key_heads {kind.key_heads}"
        )
    for name, size in (
        ("linear_key_head_dim", kind.key_dim),
        ("linear_value_head_dim", kind.value_dim),
    ):
        if size % _STEP:
            raise ModelUnsupported(
                f"{name} {size} is no multiple of {_STEP}, which delta nets are served with"
            )
    if not 2 <= kind.width <= _MOST_WIDTH:
        raise ModelUnsupported(
            f"linear_conv_kernel_dim {kind.width} is not served; convolutions of delta nets have 2 to {_MOST_WIDTH}"
        )
    interval = getattr(config, "full_attention_interval", None)
    if interval is not None and not _repeats(config.layer_types, interval):
        raise ModelUnsupported(
            f"full_attention_interval {shown(interval)} and layer_types of {config.model_type} name other layers: "
            "transformers reads the second alone"
        )
    return kind


def _repeats(layer_types: list[str], interval: Any) -> bool:
    """Whether these are the layers of an interval."""
    if type(interval) is not int or interval < 1:
        return False
    return layer_types == [_LINEAR if (n + 1) % interval else _FULL for n in range(len(layer_types))]
