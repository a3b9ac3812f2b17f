"""The linears of a transformers model that adapters may change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from loraplex.adapters.admission.base_model import find_sites as site_shapes
from loraplex.engine.model.base import ModelUnsupported
from loraplex.kernels.lora.site_groups import EMBEDDING, HEAD, LAYER_SITES, SiteGroup


@dataclass(frozen=True, slots=True)
class Sites:
    """Modules by (layer, site), and one group a site. `head` is the linear behind the layers, None where the model's
    own is called otherwise, and `embedding` the table before them in the same way."""

    modules: Mapping[tuple[int, str], torch.nn.Linear]
    groups: tuple[SiteGroup, ...]
    head: torch.nn.Linear | None
    embedding: torch.nn.Embedding | None


def find_sites(model: Any, num_layers: int) -> Sites:
    """The linears that admission finds in the checkpoint of the model too. Raises ModelUnsupported where there is none
    at all."""
    linears = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    shapes = site_shapes({n: (m.out_features, m.in_features) for n, m in linears.items()}, num_layers)
    if not shapes:
        raise ModelUnsupported(
            f"the model has none of the linears that adapters change ({', '.join(LAYER_SITES)})"
        )
    by_leaf = {shape.site: shape for shape in shapes.values()}
    groups = tuple(
        SiteGroup(site, (site,), by_leaf[site].in_features, (by_leaf[site].out_features,))
        for site in LAYER_SITES
        if site in by_leaf
    )
    modules = {key: linears[shape.module_path] for key, shape in shapes.items()}
    head = getattr(model, HEAD, None)
    return Sites(modules, groups, head if isinstance(head, torch.nn.Linear) else None, _find_embedding(model))


def _find_embedding(model: Any) -> torch.nn.Embedding | None:
    table = model.get_input_embeddings()
    names = [name for name, module in model.named_modules() if module is table]
    is_named = len(names) == 1 and f".{names[0]}".endswith(f".{EMBEDDING}")
    return table if is_named and isinstance(table, torch.nn.Embedding) else None
