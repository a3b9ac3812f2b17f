"""The linears of a transformers model that adapters may change."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from loraplex.engine.model.base import ModelUnsupported
from loraplex.kernels.lora.site_groups import EMBEDDING, HEAD, LAYER_SITES, SiteGroup

# As `loraplex.adapters.admission.base_model` reads it from the names of the checkpoint's tensors.
_SITE_NAME = re.compile(rf"(?:.*\.)?layers\.(\d+)\.(?:.*\.)?({'|'.join(LAYER_SITES)})")


@dataclass(frozen=True, slots=True)
class Sites:
    """Modules by (layer, site), and one group a site. `head` is the linear behind the layers, None where the model's
    own is called otherwise, and `embedding` the table before them in the same way."""

    modules: Mapping[tuple[int, str], torch.nn.Linear]
    groups: tuple[SiteGroup, ...]
    head: torch.nn.Linear | None
    embedding: torch.nn.Embedding | None


def find_sites(model: Any, num_layers: int) -> Sites:
    """Every linear whose leaf name is one of LAYER_SITES and that is the only such one of its layer (experts share
    theirs, and are left out). Raises ModelUnsupported where a site's size differs between layers, and where there
    is none at all."""
    found: list[tuple[tuple[int, str], torch.nn.Linear]] = []
    for name, module in model.named_modules():
        match = _SITE_NAME.fullmatch(name)
        if match and isinstance(module, torch.nn.Linear) and int(match[1]) < num_layers:
            found.append(((int(match[1]), match[2]), module))
    claims = Counter(key for key, _ in found)
    modules = {key: module for key, module in found if claims[key] == 1}
    if not modules:
        raise ModelUnsupported(
            f"the model has none of the linears that adapters change ({', '.join(LAYER_SITES)})"
        )
    groups: list[SiteGroup] = []
    for site in LAYER_SITES:
        sizes = {(m.in_features, m.out_features) for (_, leaf), m in modules.items() if leaf == site}
        if len(sizes) > 1:
            listed = ", ".join(f"{inputs} to {outputs}" for inputs, outputs in sorted(sizes))
            raise ModelUnsupported(f"{site} has not the same size in all layers: {listed}")
        for in_features, out_features in sizes:
            groups.append(SiteGroup(site, (site,), in_features, (out_features,)))
    head = getattr(model, HEAD, None)
    return Sites(
        modules, tuple(groups), head if isinstance(head, torch.nn.Linear) else None, _find_embedding(model)
    )


def _find_embedding(model: Any) -> torch.nn.Embedding | None:
    table = model.get_input_embeddings()
    names = [name for name, module in model.named_modules() if module is table]
    is_named = len(names) == 1 and f".{names[0]}".endswith(f".{EMBEDDING}")
    return table if is_named and isinstance(table, torch.nn.Embedding) else None
