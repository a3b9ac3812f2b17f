"""Families whose attention transformers computes in the model's own code: their attention modules, which call ours in a
step of the engine, and their own outside of one.

ALiBi adds slope · position of the key to a score. It is two more numbers of queries and keys here: (256 · slope, slope)
over the scale, and the position's two digits to the base 256, which bfloat16 holds exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from loraplex.adapters.store.files import shown
from loraplex.engine.model.base import ModelUnsupported

ALIBI_SIZE = 2
"""Numbers of a head that hold a position."""
_DIGIT = 256
LONGEST_ALIBI = _DIGIT**2
"""Positions that two digits hold."""


class PagedAttention(Protocol):
    """Attention in a step of the engine."""

    def positions(self) -> torch.Tensor | None:
        """[T], of the step's rows; None outside of a step."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float,
        window: int | None = None,
    ) -> torch.Tensor:
        """query [1, Hq, T, D]; key, value [1, Hkv, T, D]; returns [1, T, Hq, D]."""


_MPT: Mapping[str, Any] = {
    "alibi": True, "alibi_bias_max": 8, "attn_type": "multihead_attention", "prefix_lm": False, "qk_ln": False,
    "attn_uses_sequence_id": False, "no_bias": True, "logit_scale": None,
}  # fmt: skip
"""MPT's fields that transformers does not read, as it computes."""


def has_own_attention(model_type: str) -> bool:
    return model_type in _MODULES


def uses_alibi(config: Any) -> bool:
    return config.model_type in ("bloom", "mpt")


def check_own_attention(config: Any) -> None:
    """Raises ModelUnsupported for values of fields that are not served."""
    if config.model_type == "mpt":
        for name, served in _MPT.items():
            value = getattr(config if hasattr(config, name) else config.attn_config, name)
            if value != served:
                raise ModelUnsupported(
                    f"the config's {name} is {shown(value)}; transformers computes {shown(served)}, whatever it says"
                )
    if config.model_type == "falcon" and config.alibi:
        raise ModelUnsupported(
            f"the config's alibi is {shown(config.alibi)}; falcon is served with false, where it rotates its keys"
        )


def own_kv_heads(config: Any) -> int | None:
    """The number where no field of it is named num_key_value_heads; None: one a query head."""
    if config.model_type == "falcon" and config.new_decoder_architecture:
        heads: int = config.num_kv_heads
        return heads
    is_single = config.model_type in ("falcon", "gpt_bigcode") and config.multi_query
    return 1 if is_single else None


def replace_attention(model: Any, paged: PagedAttention) -> None:
    """Nothing is done to a model of another family."""
    name, replace = _MODULES.get(model.config.model_type, ("", _replace_attn))
    for module in model.modules():
        if type(module).__name__ == name:
            replace(module, model.config, paged)


def _replace_attn(module: Any, config: Any, paged: PagedAttention) -> None:
    """A module with a method that computes the attention alone."""
    own = module._attn
    is_neo = config.model_type == "gpt_neo"
    layer = module.layer_id if is_neo else module.layer_idx
    scaling = 1.0 if is_neo else module.head_dim**-0.5
    window = config.window_size if is_neo and module.attention_type == "local" else None

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any = None) -> Any:
        if paged.positions() is None:
            return own(query, key, value, mask)
        out = paged.attend(
            layer, query.to(value.dtype), key.to(value.dtype), value, scaling=scaling, window=window
        )
        return out.transpose(1, 2), None

    module._attn = attend


def _replace_falcon(module: Any, config: Any, paged: PagedAttention) -> None:
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

    own = module.forward

    def forward(x: torch.Tensor, *args: Any, **options: Any) -> Any:
        if paged.positions() is None:
            return own(x, *args, **options)
        split = module._split_heads(module.query_key_value(x))
        query, key, value = (part.transpose(1, 2) for part in split)
        # Falcon 40B's are repeated for each query head.
        times = key.shape[1] // module.num_kv_heads
        query, key = apply_rotary_pos_emb(query, key[:, ::times], *options["position_embeddings"])
        out = paged.attend(module.layer_idx, query, key, value[:, ::times], scaling=module.inv_norm_factor)
        return module.dense(out.flatten(2)), None

    module.forward = forward


def _replace_bloom(module: Any, config: Any, paged: PagedAttention) -> None:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    own = module.forward
    slopes = build_alibi_tensor(torch.ones(1, 2), module.num_heads, torch.float32)[:, 0, 1]

    def forward(x: torch.Tensor, residual: torch.Tensor, *args: Any, **options: Any) -> Any:
        if paged.positions() is None:
            return own(x, residual, *args, **options)
        parts = module._reshape(module.query_key_value(x))
        out = _with_alibi(paged, module.layer_idx, parts, slopes, module.inv_norm_factor)
        return module.dense(out.flatten(2)) + residual, None

    module.forward = forward


def _replace_mpt(module: Any, config: Any, paged: PagedAttention) -> None:
    own = module.forward

    def forward(x: torch.Tensor, position_bias: torch.Tensor, *args: Any, **options: Any) -> Any:
        if paged.positions() is None:
            return own(x, position_bias, *args, **options)
        mixed = module.Wqkv(x)
        if module.clip_qkv:
            mixed = mixed.clamp(min=-module.clip_qkv, max=module.clip_qkv)
        heads = mixed.view(*mixed.shape[:2], 3, module.n_heads, module.head_dim)
        # Of the last positions' columns.
        slopes = position_bias[:, 0, -1] - position_bias[:, 0, -2]
        parts = tuple(heads[:, :, part].transpose(1, 2) for part in range(3))
        out = _with_alibi(paged, module.layer_idx, parts, slopes, module.softmax_scale)
        return module.out_proj(out.flatten(2)), None

    module.forward = forward


def _with_alibi(
    paged: PagedAttention,
    layer: int,
    parts: tuple[torch.Tensor, ...],
    slopes: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """`parts`: queries, keys and values [1, H, T, D]; returns [1, T, H, D]."""
    query, key, value = parts
    positions = paged.positions()
    assert positions is not None
    digits = torch.stack((positions // _DIGIT, positions % _DIGIT), -1).to(key.dtype)
    bias = torch.stack((_DIGIT * slopes, slopes), -1).to(query.device) / scaling
    shape = *query.shape[:3], ALIBI_SIZE
    query = torch.cat((query, bias[None, :, None].to(query.dtype).expand(shape)), -1)
    key = torch.cat((key, digits[None, None].expand(shape)), -1)
    value = torch.nn.functional.pad(value, (0, ALIBI_SIZE))
    return paged.attend(layer, query, key, value, scaling=scaling)[..., :-ALIBI_SIZE]


_MODULES: Mapping[str, tuple[str, Callable[[Any, Any, PagedAttention], None]]] = {
    "bloom": ("BloomAttention", _replace_bloom),
    "codegen": ("CodeGenAttention", _replace_attn),
    "falcon": ("FalconAttention", _replace_falcon),
    "gpt_neo": ("GPTNeoSelfAttention", _replace_attn),
    "gptj": ("GPTJAttention", _replace_attn),
    "mpt": ("MptAttention", _replace_mpt),
}
"""The class of a family's attention by its model type."""
