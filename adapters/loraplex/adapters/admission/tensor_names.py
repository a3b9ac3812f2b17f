"""The tensor names of a PEFT adapter, taken apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from loraplex.adapters.admission.faults import Faults
from loraplex.adapters.admission.module_names import PREFIX, tensor_without_wrappers
from loraplex.adapters.admission.peft_support import OF_TRAINING, REFUSED_TENSORS, TensorKind
from loraplex.adapters.errors import AdapterRefused
from loraplex.adapters.spec import TensorSlice
from loraplex.adapters.store.files import shown

_MAGNITUDE = "lora_magnitude_vector"
_TOKEN_ADAPTER, _TOKEN_ROWS = "token_adapter", "trainable_tokens_delta"
_BARE = frozenset(("lora_embedding_A", "lora_embedding_B", _TOKEN_ROWS))
_REFUSED = frozenset(REFUSED_TENSORS)
_BIAS = TensorKind("bias", "lora_bias")


@dataclass(slots=True)
class AdapterTensors:
    """A file's tensors by what they are for. `a`, `b` and `magnitudes` are keyed by module path; `base_copies` by the
    name of the base's tensor that PEFT saved along. `looked_up` are the modules among them whose A is an embedding's.
    `token_rows` are the rows that a module has for some tokens, by its path."""

    a: dict[str, TensorSlice] = field(default_factory=dict)
    b: dict[str, TensorSlice] = field(default_factory=dict)
    magnitudes: dict[str, TensorSlice] = field(default_factory=dict)
    base_copies: dict[str, TensorSlice] = field(default_factory=dict)
    looked_up: set[str] = field(default_factory=set)
    token_rows: dict[str, TensorSlice] = field(default_factory=dict)


def unwrap(header: Mapping[str, TensorSlice]) -> dict[str, TensorSlice]:
    """The tensors by the names that PEFT gives them in a model that nothing wraps. Raises
    AdapterRefused("unexpected_tensor") where two of them have one name then."""
    found: dict[str, TensorSlice] = {}
    for name, tensor in header.items():
        _put(found, tensor_without_wrappers(name), name, tensor)
    return found


def weight_names(header: Mapping[str, TensorSlice]) -> Iterator[str]:
    """The names without PEFT's prefix: each begins with a module's path."""
    return (name.removeprefix(PREFIX) for name in header)


def sort_tensors(header: Mapping[str, TensorSlice]) -> AdapterTensors:
    """Sort "base_model.model.<module>.lora_A[.<adapter>].weight", "….lora_B…",
    "….lora_magnitude_vector[.<adapter>][.weight]", "….base_layer.weight" (or bias) and plain "….weight" by their
    purpose. One adapter name at most may stand inside the names of a file.

    Raises AdapterRefused (unexpected_tensor, missing_tensor, unsupported_feature), once for each kind of tensors.
    """
    sorted_ = AdapterTensors()
    adapter_names: set[str] = set()
    faults = Faults()
    for name, tensor in header.items():
        try:
            _sort(name, tensor, sorted_, adapter_names)
        except AdapterRefused as refusal:
            faults.add_kind(refusal)
    faults.raise_any()
    if len(adapter_names) > 1:
        names = ", ".join(shown(name) for name in sorted(adapter_names)[:4])
        raise AdapterRefused("unexpected_tensor", f"the file holds tensors of several adapters: {names}")
    _check_pairs(sorted_)
    return sorted_


def _sort(name: str, tensor: TensorSlice, sorted_: AdapterTensors, adapter_names: set[str]) -> None:
    if not name.startswith(PREFIX):
        _unexpected(name, f"its name does not begin with '{PREFIX}'")
    parts = name.removeprefix(PREFIX).split(".")
    if not OF_TRAINING.isdisjoint(parts):
        return
    if not _REFUSED.isdisjoint(parts):
        _unsupported(name, next(REFUSED_TENSORS[part] for part in parts if part in REFUSED_TENSORS))
    if _MAGNITUDE in parts[-3:]:
        at = parts.index(_MAGNITUDE, max(0, len(parts) - 3))
        rest = parts[at + 1 :]
        infix = rest[:-1] if rest[-1:] == ["weight"] else rest
        if len(infix) > 1:
            _unexpected(name, "it is no LoRA weight")
        adapter_names.add(infix[0] if infix else "")
        _put(sorted_.magnitudes, ".".join(parts[:at]), name, tensor)
        return
    if (bare := _bare_kind(parts)) is not None:
        adapter_names.add(parts[-1] if bare == -2 else "")
        _put_bare(sorted_, parts, bare, name, tensor)
        return
    if parts[-1] == "bias" and ("lora_B" in parts[-3:]):
        _unsupported(name, _BIAS)
    if parts[-2:-1] == ["base_layer"] and parts[-1] in ("weight", "bias"):
        module = parts[:-3] if parts[-3:-2] == [_TOKEN_ADAPTER] else parts[:-2]
        _put(sorted_.base_copies, ".".join((*module, parts[-1])), name, tensor)
        return
    if parts[-1] != "weight":
        _unexpected(name, "it is no LoRA weight")
    kind = next((i for i in (-2, -3) if len(parts) >= 1 - i and parts[i] in ("lora_A", "lora_B")), None)
    if kind is None:
        _put(sorted_.base_copies, ".".join(parts), name, tensor)
        return
    adapter_names.add("" if kind == -2 else parts[-2])
    into = sorted_.a if parts[kind] == "lora_A" else sorted_.b
    _put(into, ".".join(parts[:kind]), name, tensor)


def _bare_kind(parts: list[str]) -> int | None:
    """The place from the end of a name that no ".weight" follows, but perhaps the adapter's name."""
    return next((i for i in (-1, -2) if len(parts) > -i and parts[i] in _BARE), None)


def _put_bare(into: AdapterTensors, parts: list[str], at: int, name: str, tensor: TensorSlice) -> None:
    module = parts[:at]
    if parts[at] == _TOKEN_ROWS:
        if module[-1:] != [_TOKEN_ADAPTER]:
            _unexpected(name, f"it stands in no {_TOKEN_ADAPTER}")
        _put(into.token_rows, ".".join(module[:-1]), name, tensor)
        return
    path = ".".join(module)
    into.looked_up.add(path)
    _put(into.a if parts[at] == "lora_embedding_A" else into.b, path, name, tensor)


def _check_pairs(tensors: AdapterTensors) -> None:
    if not tensors.a and not tensors.b:
        raise AdapterRefused(
            "missing_tensor",
            "the file holds no lora_A and lora_B tensors. PEFT writes such a file without an error where its names and "
            "those of the state dict differ: save the model itself, without state_dict and outside of wrappers",
        )
    for have, lack, missing in ((tensors.a, tensors.b, "lora_B"), (tensors.b, tensors.a, "lora_A")):
        for module in have:
            if module not in lack:
                raise AdapterRefused("missing_tensor", f"{shown(module)} has no {missing}.weight")
    for module in tensors.magnitudes:
        if module not in tensors.a:
            raise AdapterRefused(
                "missing_tensor", f"{shown(module)} has a {_MAGNITUDE}, but no lora_A and lora_B"
            )


def _put(into: dict[str, TensorSlice], key: str, name: str, tensor: TensorSlice) -> None:
    if key in into:
        _unexpected(name, "another tensor stands for the same weight")
    into[key] = tensor


def _unexpected(name: str, why: str) -> NoReturn:
    raise AdapterRefused("unexpected_tensor", f"unexpected tensor {shown(name, 160)}: {why}")


def _unsupported(name: str, kind: TensorKind) -> NoReturn:
    raise AdapterRefused(
        "unsupported_feature",
        f"tensor {shown(name, 160)} belongs to {kind.feature}: {kind.explain()}",
        feature=kind.feature,
    )
