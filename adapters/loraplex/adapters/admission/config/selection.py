"""Which linears a config's target_modules, exclude_modules, layers_to_transform and layers_pattern select, as PEFT's
check_target_module_exists does.

A list of names is evaluated. An expression is not: the tensors tell the modules.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from loraplex.adapters.admission.config.patterns import MAX_ENTRIES, MODULE_NAME, suffixes
from loraplex.adapters.admission.faults import Faults, as_json, invalid
from loraplex.adapters.admission.module_names import HEAD_NAMES, ModuleNames, without_wrappers
from loraplex.adapters.admission.peft_support import is_neutral
from loraplex.adapters.admission.strict_json import parse_object
from loraplex.adapters.store.files import shown
from loraplex.kernels.lora.site_groups import EMBEDDING_NAMES

_SETS = ("target_modules", "exclude_modules")
_SEGMENT = re.compile(r"[A-Za-z0-9_-]+")
WEIGHT = ".weight"
_NOT_EVALUATED = "which is not evaluated: the tensors tell the modules, and a missing one is not noticed"


@dataclass(frozen=True, slots=True)
class Selection:
    """`targets` None stands for "all-linear" or an expression. `exact` is False where an expression decides which
    modules there are: then the tensors tell. `layers` None: every layer."""

    targets: frozenset[str] | None = None
    exact: bool = True
    excluded: frozenset[str] = frozenset()
    layers: frozenset[int] | None = None
    layers_pattern: tuple[str, ...] = ()

    def selects(self, module_path: str) -> bool:
        """Whether PEFT would put LoRA on this linear: a target that is the whole path does so in any layer, a suffix
        only in the layers to transform; "all-linear" is every layer's. An expression may mean any module."""
        names = suffixes(module_path)
        if not self.excluded.isdisjoint(names):
            return False
        if self.targets is None:
            return not self.exact or not (module_path in HEAD_NAMES or names[-1] in EMBEDDING_NAMES)
        if module_path in self.targets:
            return True
        if self.targets.isdisjoint(names):
            return False
        return self.layers is None or _layer_index(module_path, self.layers_pattern) in self.layers

    def with_names(self, names: ModuleNames) -> Selection:
        """The same selection by the names that the tensors have."""
        bare = names.decoder == "" and self.layers is not None
        return replace(
            self,
            targets=None if self.targets is None else frozenset(map(names.own_name, self.targets)),
            excluded=frozenset(map(names.own_name, self.excluded)),
            # PEFT reads no number out of a path that begins with the list. Here the names make no difference.
            layers_pattern=self.layers_pattern or (("layers",) if bare else ()),
        )


def parse_selection(config: Mapping[str, Any], notes: list[str], faults: Faults) -> Selection:
    """Read the four fields. What is wrong goes to `faults`, warnings for the report go to `notes`."""
    targets: frozenset[str] | None = None
    excluded: frozenset[str] = frozenset()
    layers: frozenset[int] | None = None
    pattern: tuple[str, ...] = ()
    exact = is_list = True
    with faults.collect():
        targets, is_list, exact = _parse_targets(
            config.get("target_modules"), parse_parameters(config.get("target_parameters")), notes
        )
    with faults.collect():
        excluded, all_named = _parse_excluded(config.get("exclude_modules"), notes)
        exact = exact and all_named
    with faults.collect():
        layers = _parse_layers(config.get("layers_to_transform"))
    with faults.collect():
        pattern = _parse_layers_pattern(config.get("layers_pattern"))
    if pattern and layers is None:
        notes.append("layers_pattern is without effect: layers_to_transform names no layers")
    elif layers is not None and (not is_list or not all(_SEGMENT.fullmatch(name) for name in pattern)):
        which = f"layers_pattern {shown(', '.join(pattern))}" if is_list else "layers_to_transform"
        why = "is a regular expression" if is_list else "is for a list in target_modules"
        notes.append(f"{which} {why}, so it is not evaluated: the tensors tell the layers")
        layers, exact = None, False
    return Selection(targets, exact, excluded, layers, pattern if layers is not None else ())


def is_equal_but_for_order(one: bytes, other: bytes) -> bool:
    """Whether two configs of adapters differ in nothing but the order of names that PEFT keeps as sets, and so writes
    in another order each time."""
    try:
        found = [parse_object(raw) for raw in (one, other)]
    except ValueError:
        return False
    for config in found:
        for field in _SETS:
            names = config.get(field)
            if isinstance(names, list) and all(isinstance(name, str) for name in names):
                config[field] = sorted(names)
    return json.dumps(found[0]) == json.dumps(found[1])


def parse_parameters(value: Any) -> tuple[str, ...]:
    """The names of target_parameters. Raises AdapterRefused("config_invalid")."""
    return () if is_neutral(value) else tuple(sorted(_names("target_parameters", value)))


def _parse_targets(
    value: Any, parameters: Iterable[str], notes: list[str]
) -> tuple[frozenset[str] | None, bool, bool]:
    """The target names (None: all-linear, or an expression), whether they came as a list, and whether they tell. A
    router is a parameter to PEFT, and a linear here."""
    if isinstance(value, str) and value:
        if value.lower() == "all-linear":
            return None, False, True
        if not MODULE_NAME.fullmatch(value):
            notes.append(f"target_modules {as_json(value)} is a regular expression, {_NOT_EVALUATED}")
            return None, False, False
        return frozenset((without_wrappers(value),)), False, True
    names = frozenset() if parameters and is_neutral(value) else _names("target_modules", value)
    names |= {name.removesuffix(WEIGHT) for name in parameters if name.endswith(WEIGHT)}
    if not names and not parameters:
        invalid("target_modules must be a list of module names, as PEFT saves it")
    return names, True, True


def _parse_excluded(value: Any, notes: list[str]) -> tuple[frozenset[str], bool]:
    """The names, and whether they are all: False for an expression."""
    if isinstance(value, str) and value:
        notes.append(f"exclude_modules {as_json(value)} is a regular expression, {_NOT_EVALUATED}")
        return frozenset(), False
    return (frozenset() if is_neutral(value) else _names("exclude_modules", value)), True


def _names(field: str, value: Any) -> frozenset[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        invalid(f"{field} must be a list of module names, as PEFT saves it")
    if len(value) > MAX_ENTRIES:
        invalid(f"{field} has {len(value)} entries; at most {MAX_ENTRIES} are accepted")
    return frozenset(map(without_wrappers, value))


def _parse_layers(value: Any) -> frozenset[int] | None:
    indices = [value] if type(value) is int else value
    if indices is None or indices == []:
        return None
    if not isinstance(indices, list) or not all(type(index) is int and index >= 0 for index in indices):
        invalid("layers_to_transform must be a layer's index or a list of them, as PEFT saves it")
    return frozenset(indices)


def _parse_layers_pattern(value: Any) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) and value else (value or [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        invalid("layers_pattern must be a name or a list of names, as PEFT saves it")
    if len(names) > 64:
        invalid(f"layers_pattern has {len(names)} entries; at most 64 are accepted")
    return tuple(names)


def _layer_index(module_path: str, layers_pattern: tuple[str, ...]) -> int | None:
    """The layer that PEFT reads out of a path: the first number that follows a list's name, which must be one
    of `layers_pattern` where that is given (the first of them that fits decides)."""
    parts = module_path.split(".")
    numbered = [i for i in range(1, len(parts) - 1) if parts[i].isdecimal()]
    if not layers_pattern:
        return next((int(parts[i]) for i in numbered if i >= 2), None)
    for name in layers_pattern:
        for i in numbered:
            if parts[i - 1] == name:
                return int(parts[i])
    return None
