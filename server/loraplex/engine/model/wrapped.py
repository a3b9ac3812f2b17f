"""Any decoder that transformers defines, on our flat batch and paged KV cache.

The flat batch goes through the model as one row of T positions, with the position of each in its own sequence.
Attention is the only place where rows meet; there transformers calls our function, which knows from the current
forward's context where each sequence begins. Adapters are added by hooks on the linears of their sites.
"""

from __future__ import annotations

import inspect
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from loraplex.adapters.admission.base_families import NO_SITES, ROUTED, not_served
from loraplex.adapters.admission.base_model import find_sites as site_shapes
from loraplex.engine.kv.layers import keeping_all
from loraplex.engine.model.base import ExpertStarts, ForwardBatch, ModelShape, ModelUnsupported
from loraplex.engine.model.families.own_attention import has_own_attention, replace_attention
from loraplex.kernels.attention.choice import AttentionChoice
from loraplex.kernels.attention.kernel import AttentionKernel
from loraplex.kernels.attention.kv_codes import head_dim_of, transform_keys, transform_queries
from loraplex.kernels.attention.torch_attention import TorchAttention, write_kv
from loraplex.kernels.experts.lora_types import ExpertSiteGroup
from loraplex.kernels.linear.dense import linear
from loraplex.kernels.linear.packed import tensor_bytes
from loraplex.kernels.lora.site_groups import EMBEDDING_NAMES, HEAD, ROUTERS, SiteGroup, name_groups

ATTENTION_NAME = "loraplex_paged"

_BATCH: ContextVar[ForwardBatch] = ContextVar("loraplex_forward_batch")
"""The batch of the forward pass that runs in this thread."""
_KERNEL: ContextVar[TorchAttention] = ContextVar("loraplex_attention_kernel")
"""The kernel of the attention."""

_IGNORED_ARGUMENTS = frozenset(
    {"position_ids", "use_cache", "cache_position", "position_embeddings", "past_key_values"}
)
"""Attention arguments whose effect is in q, k and v already, or that speak of a cache that we do not use."""
_WINDOWS_IN_MASKS = frozenset({"phimoe"})
"""Model types whose window transformers puts into its masks alone, for all layers."""


def wrapped_attention(shape: ModelShape, dtype: torch.dtype, device: torch.device) -> AttentionChoice:
    kernel = _attention_kernel(shape, dtype, device)
    return AttentionChoice(kernel, "models that run through transformers have no other")


def _attention_kernel(shape: ModelShape, dtype: torch.dtype, device: torch.device) -> TorchAttention:
    widest = max(shape.caches, key=lambda kind: kind.kv_heads * kind.head_dim)
    return TorchAttention(widest.kv_heads, widest.head_dim, dtype, device)


class TransformersDecoder:
    """A transformers model whose attention is ours. Build it with `wrap`."""

    def __init__(self, model: Any, shape: ModelShape) -> None:
        self.eager_model = model
        """The model of transformers, for the start's comparison with its own attention."""
        shape = shape if _has_windows(model, shape) else replace(shape, caches=keeping_all(shape.caches))
        self.shape, self.num_layers = shape, shape.num_layers
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self._kernel = _attention_kernel(shape, self.dtype, self.device)
        self.attention: AttentionKernel = self._kernel
        self.num_weights = sum(parameter.numel() for parameter in model.parameters())
        modules, self.site_groups = find_sites(model, shape.num_layers)
        for group in self.site_groups:
            for layer in group.layers_of(shape.num_layers):
                module = modules[layer, group.sites[0]]
                if isinstance(module, torch.nn.Linear):
                    module.register_forward_hook(_adapter_hook(layer, group.key))
                else:
                    adapt = _adapter_hook(layer, group.key)
                    module.forward = partial(_route, module.forward, adapt)
        self.expert_groups: tuple[ExpertSiteGroup, ...] = ()
        self.head_group: SiteGroup | None = None
        if isinstance(head := getattr(model, HEAD, None), torch.nn.Linear):
            self.head_group = SiteGroup(HEAD, (HEAD,), head.in_features, (head.out_features,))
            head.register_forward_hook(_adapt_head)
        self.embedding_shape: tuple[int, int] | None = None
        if (table := _find_embedding(model)) is not None:
            self.embedding_shape = table.num_embeddings, table.embedding_dim
            table.register_forward_hook(_adapt_embedding)
        self.expert_starts: ExpertStarts | None = None
        self.has_own_attention = has_own_attention(model.config.model_type)
        """Whether transformers has no choice of it."""
        replace_attention(model, _InStep())
        for module in model.modules():
            if type(module) is torch.nn.Linear:
                module.forward = partial(_linear, module)  # type: ignore[method-assign]
        # What the model is behind its head, by the name that transformers gives it.
        inner = model.base_model
        if inner is not model:
            inner.register_forward_hook(_take_hidden)
        self.hidden_size = None if inner is model else int(model.config.get_text_config().hidden_size)
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters

    @property
    def weight_bytes(self) -> int:
        return tensor_bytes((tuple(self.eager_model.parameters()), tuple(self.eager_model.buffers())))

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        batch.kv.clear_blocks(batch.fresh_blocks)
        arguments: dict[str, Any] = {"use_cache": False}
        if self._keeps_rows:
            arguments["logits_to_keep"] = batch.logits_rows
        token, kernel_token = _BATCH.set(batch), _KERNEL.set(self._kernel)
        try:
            answer = self.eager_model(
                input_ids=batch.token_ids[None], position_ids=batch.positions[None], **arguments
            )
        finally:
            _BATCH.reset(token)
            _KERNEL.reset(kernel_token)
        logits: torch.Tensor = answer.logits[0]
        if not self._keeps_rows:
            logits = logits.index_select(0, batch.logits_rows)
        return logits.float().contiguous() if batch.logits_out is None else batch.logits_out.copy_(logits)


def _has_windows(model: Any, shape: ModelShape) -> bool:
    """Whether the attention of each layer has the window that `shape` says, of the model's config."""
    windows = {
        module.layer_idx: module.sliding_window
        for module in model.modules()
        if hasattr(module, "layer_idx") and hasattr(module, "sliding_window")
    }
    return all(
        layer.window is None or windows.get(index) == layer.window for index, layer in enumerate(shape.caches)
    )


def register_attention() -> None:
    """Make our attention known to transformers under `ATTENTION_NAME`. Calling it again changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, _attention)
    AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Our attention makes its own masks; which ones, its arguments say, and the probe at start proves."""


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, Hq, T, D]; key, value [1, Hkv, T, D]; returns [1, T, Hq, D]. Raises ModelUnsupported for anything
    that it does not compute."""
    unknown = sorted(
        name
        for name, argument in others.items()
        if argument is not None and argument is not False and name not in _IGNORED_ARGUMENTS
    )
    if unknown:
        raise ModelUnsupported(f"the model's attention wants {', '.join(unknown)}, which is not supported")
    if attention_mask is not None or dropout or is_causal is False:
        raise ModelUnsupported("the model's attention is not plainly causal (it gives a mask of its own)")
    config = getattr(module, "config", None)
    if sliding_window is None and getattr(config, "model_type", None) in _WINDOWS_IN_MASKS:
        sliding_window = getattr(config, "sliding_window", None)
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise ModelUnsupported("the model's attention does not know its layer (it has no layer_idx)")
    sinks = None if s_aux is None else s_aux.float()
    return _paged(layer, query, key, value, scaling, sliding_window, softcap, sinks), None


class _InStep:
    """The attention of the forward pass that runs in this thread."""

    def positions(self) -> torch.Tensor | None:
        batch = _BATCH.get(None)
        return None if batch is None else batch.positions

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
        return _paged(layer, query, key, value, scaling, window, None, None)


def _paged(
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    batch = _BATCH.get()
    cache = batch.kv.layer(layer)
    if key.shape != value.shape or key.shape[1] != cache.shape[3] or key.shape[3] != head_dim_of(cache):
        raise ModelUnsupported(
            f"layer {layer} has keys of shape {list(key.shape)} and values of {list(value.shape)}, not those that "
            f"the config says: {cache.shape[3]} heads of size {head_dim_of(cache)}"
        )
    kept = batch.kv.windows[layer]
    if kept is not None and (sliding_window is None or sliding_window > kept):
        raise ModelUnsupported(
            f"layer {layer} sees {sliding_window or 'all'} positions, and its config says {kept}"
        )
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    if cache.dtype is torch.int8:
        q = transform_queries(query[0])
        kv = torch.stack((transform_keys(key[0]), value[0].float()))
    else:
        q = query[0].to(cache.dtype)
        kv = torch.stack((key[0], value[0])).to(cache.dtype)
    kernel = _KERNEL.get()
    write_kv(kv.permute(2, 0, 1, 3), cache, batch.attention_of(layer))
    q = q.transpose(0, 1)
    out = kernel.run(
        q,
        cache,
        batch.attention_of(layer),
        scale=scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=sinks,
    )
    return out.to(query.dtype)[None]


def _linear(module: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return linear(x, module.weight, module.bias)


def _take_hidden(module: torch.nn.Module, args: Any, output: Any) -> None:
    batch = _BATCH.get(None)
    if batch is not None and batch.take_hidden is not None and batch.hidden_rows is not None:
        batch.take_hidden(output.last_hidden_state[0].index_select(0, batch.hidden_rows))


def _adapter_hook(layer: int, group: str) -> Any:
    def add_adapters(module: object, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        batch = _BATCH.get(None)
        if batch is not None and batch.lora is not None:
            if batch.enter_layer is not None:
                batch.enter_layer(layer)
            x = args[0]
            batch.lora.apply(layer, group, x.reshape(-1, x.shape[-1]), output.view(-1, output.shape[-1]))

    return add_adapters


class _AdaptedProducts(TorchFunctionMode):
    """Calls `adapt` with the rows and the results of linears, as a hook of a module."""

    def __init__(self, adapt: Any) -> None:
        super().__init__()
        self._adapt = adapt

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.nn.functional.linear:
            self._adapt(None, args, result)
        return result


def _route(forward: Any, adapt: Any, x: torch.Tensor) -> Any:
    """The result of a router, which has no module for its linear."""
    with _AdaptedProducts(adapt):
        return forward(x)


def _adapt_embedding(
    module: torch.nn.Embedding, args: tuple[torch.Tensor, ...], output: torch.Tensor
) -> None:
    batch = _BATCH.get(None)
    if batch is None or batch.token_rows is None:
        return
    y = output.view(-1, output.shape[-1])
    scale = getattr(module, "embed_scale", None)
    if scale is None:
        batch.token_rows.replace_embeddings(batch.token_ids, y)
    else:
        # What the module returns is scaled already.
        plain = torch.nn.functional.embedding(batch.token_ids, module.weight)
        batch.token_rows.replace_embeddings(batch.token_ids, plain)
        scale = torch.as_tensor(scale).to(plain.dtype)
        y.copy_(plain.mul_(scale))
    batch.token_rows.add_embeddings(batch.token_ids, y, 1.0 if scale is None else float(scale))


def _adapt_head(module: torch.nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    batch = _BATCH.get(None)
    if batch is None or (batch.head_lora is None and batch.token_rows is None):
        return
    x, y = args[0].reshape(-1, args[0].shape[-1]), output.view(-1, output.shape[-1])
    rows = batch.logits_rows
    if x.shape[0] == rows.shape[0]:
        _change_logits(batch, x, y)
        return
    # A model that cannot compute the logits of chosen rows alone.
    wanted = y.index_select(0, rows)
    _change_logits(batch, x.index_select(0, rows), wanted)
    y.index_copy_(0, rows, wanted)


def _change_logits(batch: ForwardBatch, x: torch.Tensor, logits: torch.Tensor) -> None:
    if batch.token_rows is not None:
        batch.token_rows.replace_logits(x, logits)
    if batch.head_lora is not None:
        batch.head_lora.apply(0, HEAD, x, logits)


def find_sites(
    model: Any, num_layers: int
) -> tuple[dict[tuple[int, str], torch.nn.Module], tuple[SiteGroup, ...]]:
    """The linears that admission finds in the checkpoint of the model too, and routers, by (layer, site), and their
    groups, one for each size of a site. Raises ModelUnsupported where there is none at all."""
    routed = model.config.model_type in ROUTED
    linears = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) or (routed and name.rpartition(".")[2] in ROUTERS)
    }
    sizes = {name: tuple(module.weight.shape) for name, module in linears.items()}
    shapes = site_shapes(sizes, num_layers, routers=routed)
    if not shapes:
        raise ModelUnsupported(not_served(model.config.model_type, NO_SITES))
    of_layers: list[list[SiteGroup]] = [[] for _ in range(num_layers)]
    for (layer, site), shape in shapes.items():
        of_layers[layer].append(SiteGroup(site, (site,), shape.in_features, (shape.out_features,)))
    groups = dict.fromkeys(chain.from_iterable(name_groups(of_layers)))
    return {key: linears[shape.module_path] for key, shape in shapes.items()}, tuple(groups)


def _find_embedding(model: Any) -> torch.nn.Embedding | None:
    table = model.get_input_embeddings()
    names = [name for name, module in model.named_modules() if module is table]
    is_named = len(names) == 1 and names[0].rpartition(".")[2] in EMBEDDING_NAMES
    return table if is_named and isinstance(table, torch.nn.Embedding) else None
