"""Heads of classifiers, as PEFT saves them of SEQ_CLS and TOKEN_CLS: one linear behind the final norm, in
modules_to_save beside the LoRA."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from loraplex.adapters.admission.base_model import read_text_config
from loraplex.adapters.admission.peft_config import LoraSettings
from loraplex.adapters.admission.peft_support import HEAD_MODULES
from loraplex.adapters.admission.values import check_dtype
from loraplex.adapters.errors import AdapterRefused
from loraplex.adapters.pooled import HeadTask
from loraplex.adapters.spec import BaseSpec, HeadWeights, TensorSlice
from loraplex.adapters.store.files import shown
from loraplex.adapters.store.tensors import iter_rows
from loraplex.kernels.lora.site_groups import EMBEDDING, HEAD

MAX_LABELS: Mapping[HeadTask, int] = {"classify": 1024, "token_classify": 256}
"""The most labels of a head. A head of every token gives that many numbers for each."""
_TASKS: Mapping[str, HeadTask] = {"SEQ_CLS": "classify", "TOKEN_CLS": "token_classify"}
_TENSOR = re.compile(
    rf"base_model\.model\.({'|'.join(HEAD_MODULES)})(?:\.modules_to_save(?:\.[^.]{{1,64}})?)?\.(weight|bias)"
)
"""The names of PEFT's versions: most leave modules_to_save and the adapter's name out."""


@dataclass(frozen=True, slots=True)
class HeadTensors:
    """A head of a file: the `module` that it stood in, and its tensors."""

    module: str
    weight: TensorSlice
    bias: TensorSlice | None


def take_head(header: Mapping[str, TensorSlice]) -> tuple[dict[str, TensorSlice], HeadTensors | None]:
    """The tensors without a head's, and the head. Raises AdapterRefused (unexpected_tensor, missing_tensor)."""
    rest: dict[str, TensorSlice] = {}
    found: dict[tuple[str, str], TensorSlice] = {}
    for name, tensor in header.items():
        matched = _TENSOR.fullmatch(name)
        if matched is None:
            rest[name] = tensor
            continue
        key = (matched[1], matched[2])
        if key in found or any(module != key[0] for module, _ in found):
            raise AdapterRefused(
                "unexpected_tensor", f"{shown(name, 160)} is of a second head; an adapter has one"
            )
        found[key] = tensor
    for module, _ in found:
        if (module, "weight") not in found:
            raise AdapterRefused("missing_tensor", f"{module} has a bias, but no weight")
        return rest, HeadTensors(module, found[module, "weight"], found.get((module, "bias")))
    return rest, None


def find_head(tensors: HeadTensors | None, settings: LoraSettings, base: BaseSpec) -> HeadWeights | None:
    """Check a head against the config and the base. Where task_type does not say what it is for, its bias does:
    transformers has one for tokens alone.

    Raises AdapterRefused (missing_tensor, unsupported_feature, base_mismatch, shape_mismatch, too_large)."""
    task = _TASKS.get(settings.task_type or "")
    is_named = task is not None or settings.saves_head
    if tensors is None:
        if is_named:
            raise AdapterRefused(
                "missing_tensor" if task is None else "unsupported_feature",
                f"the config names a head ({' or '.join(HEAD_MODULES)}), but the file has no tensors of it: the LoRA "
                "without its head does not compute what was trained",
                feature=None if task is None else "task_type",
            )
        return None
    if not is_named or (task is None and settings.task_type):
        raise AdapterRefused(
            "unsupported_feature",
            f"the file holds a head, {tensors.module}, and the config has the task_type {shown(settings.task_type)} "
            f"and does not say that it is trained: save it with task_type {' or '.join(_TASKS)}",
            feature="modules_to_save",
        )
    if task is None:
        task = "classify" if tensors.bias is None else "token_classify"
    _check_shapes(tensors, task, base)
    return HeadWeights(task, tensors.weight, tensors.bias)


def _check_shapes(tensors: HeadTensors, task: HeadTask, base: BaseSpec) -> None:
    weight, bias, module = tensors.weight, tensors.bias, tensors.module
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None:
            check_dtype(module, name, tensor)
    if len(weight.shape) != 2 or not weight.shape[0]:
        raise AdapterRefused(
            "shape_mismatch", f"{module}.weight is {list(weight.shape)}, not [labels, hidden size]"
        )
    labels, width = weight.shape
    if bias is not None and bias.shape != (labels,):
        raise AdapterRefused(
            "shape_mismatch", f"{module}.bias is {list(bias.shape)}, not one for each of {labels} labels"
        )
    hidden = _hidden_size(base)
    if width != hidden:
        raise AdapterRefused(
            "base_mismatch",
            f"{module}.weight reads {width} numbers, the base's hidden states have {hidden}: the adapter is for "
            "another model",
        )
    if labels > MAX_LABELS[task]:
        raise AdapterRefused(
            "too_large",
            f"{module} has {labels} labels; this server takes at most {MAX_LABELS[task]} of a prompt's "
            f"{'last token' if task == 'classify' else 'every token'}",
        )


def check_finite_head(tensors_path: Path, head: HeadWeights | None) -> None:
    """Raises AdapterRefused("non_finite")."""
    tensors = () if head is None else (("weight", head.weight), ("bias", head.bias))
    for name, tensor in tensors:
        for rows in iter_rows(tensors_path, tensor) if tensor is not None else ():
            with np.errstate(all="ignore"):
                exact = rows.astype(np.float32)
            if not np.isfinite(exact).all():
                raise AdapterRefused("non_finite", f"the head's {name} holds NaN or infinite values")


def told(head: HeadWeights) -> str:
    """A head, for the report."""
    tokens = "the last token" if head.task == "classify" else "every token"
    return f"a head of {head.num_labels} label{'' if head.num_labels == 1 else 's'} for {tokens}"


def _hidden_size(base: BaseSpec) -> int | None:
    head, embedding = base.sites.get((0, HEAD)), base.sites.get((0, EMBEDDING))
    if head is not None:
        return head.in_features
    if embedding is not None:
        return embedding.out_features
    size = read_text_config(Path(base.model_dir)).get("hidden_size")
    return size if isinstance(size, int) else None
