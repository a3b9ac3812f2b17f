"""LoRA of a tied head that a file names after the embedding, given the head's name.

Tinker trains LoRA on the head of every base. Where the base ties its head to the embedding, `build_lora_adapter` of
tinker-cookbook calls the pair `embed_tokens.lora_A.weight` and `embed_tokens.lora_B.weight`. Their shapes are those of
a linear from hidden to vocabulary. PEFT's LoRA of an embedding has other names (`lora_embedding_A`) and shapes, so the
pair can be the head's alone. Every value keeps its bits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from loraplex.adapters.admission.experts.checks import read_upload
from loraplex.adapters.admission.module_names import PREFIX, ModuleNames, names_of
from loraplex.adapters.admission.peft_config import read_raw_config
from loraplex.adapters.admission.strict_json import parse_object
from loraplex.adapters.admission.tensor_names import sort_tensors, unwrap, weight_names
from loraplex.adapters.errors import AdapterRefused
from loraplex.adapters.rewriting import copy_tensor, replace_config, replace_tensors
from loraplex.adapters.spec import BaseSpec, SiteShape, TensorSlice
from loraplex.adapters.store.artifact_store import Staging
from loraplex.adapters.store.files import disk_failures_named
from loraplex.kernels.lora.site_groups import EMBEDDING, HEAD

_PATTERNS = ("rank_pattern", "alpha_pattern")
_PLAIN = re.compile(r"[A-Za-z0-9_.]+").fullmatch


def name_tied_head(staging: Staging, base: BaseSpec) -> list[dict[str, Any]]:
    """Replace the files in `staging` where they have LoRA of a tied head under the embedding's name, and return what a
    report says of it: an entry of its `checks`. None where they have none, or cannot be read: the inspection says why.

    Raises StoreFull, StoreFailed, OSError.
    """
    embedding = base.sites.get((0, EMBEDDING))
    if not base.tied_head or embedding is None:
        return []
    try:
        header = unwrap(read_upload(staging.tensors_path, base))
        names = names_of(weight_names(header), base)
        path = names.in_file(embedding.module_path)
        if not _is_of_head(header, path, names, embedding):
            return []
        config = _with_head(parse_object(read_raw_config(staging.config_path)), path)
    except (AdapterRefused, ValueError, FileNotFoundError):
        return []
    if config is None:
        return []
    old, new = f"{PREFIX}{path}.lora_", f"{PREFIX}{names.in_file(HEAD)}.lora_"
    tensors = {
        new + name.removeprefix(old) if name.startswith(old) else name: tensor
        for name, tensor in header.items()
    }
    source = staging.tensors_path
    with disk_failures_named():
        shapes = {name: (t.dtype, t.shape, t.end - t.start) for name, t in tensors.items()}
        replace_tensors(staging, shapes, lambda name, file, _: copy_tensor(source, tensors[name], file))
        replace_config(staging, config)
    detail = (
        f"LoRA with the name {path} and the shapes of a linear, as tinker-cookbook writes it for a head that is tied "
        f"to the embedding, was given the name {HEAD}; digest and bytes are those of the result"
    )
    return [{"name": "tied_head", "ok": True, "detail": detail}]


def _is_of_head(
    header: Mapping[str, TensorSlice], path: str, names: ModuleNames, embedding: SiteShape
) -> bool:
    """Raises AdapterRefused as `sort_tensors` does."""
    if not any(name.startswith(f"{PREFIX}{path}.lora_") for name in header):
        return False
    found = sort_tensors(header)
    a, b = found.a.get(path), found.b.get(path)
    if a is None or b is None or path in found.looked_up or names.in_file(HEAD) in found.a:
        return False
    hidden, vocabulary = embedding.out_features, embedding.in_features
    return len(b.shape) == 2 and a.shape == (b.shape[1], hidden) and b.shape[0] == vocabulary


def _with_head(config: dict[str, Any], path: str) -> dict[str, Any] | None:
    """The config with the head's name in place of the embedding's; None where it does not say the embedding's rank and
    alpha by its name alone."""
    own = {path, path.rpartition(".")[2]}
    targets = config.get("target_modules")
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        return None
    if own.isdisjoint(targets) or HEAD in targets:
        return None
    if config.get("ensure_weight_tying"):
        return None
    found = config | {"target_modules": [HEAD if target in own else target for target in targets]}
    for field in _PATTERNS:
        pattern = config.get(field) or {}
        # An expression may mean the embedding without naming it.
        if not isinstance(pattern, dict) or len(own & pattern.keys()) > 1 or not all(map(_PLAIN, pattern)):
            return None
        found[field] = {HEAD if key in own else key: value for key, value in pattern.items()}
    return found
