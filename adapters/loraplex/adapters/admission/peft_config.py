"""Our own reading of PEFT's adapter_config.json: LoRA and DoRA as PEFT >= 0.18 compute them, nothing else. What is
accepted of each field is in `peft_support`.

PEFT takes the keys of rank_pattern and alpha_pattern, a string in target_modules or exclude_modules and
layers_pattern for regular expressions. Nothing from an upload is ever compiled here: literal names mean what PEFT
makes of them. An expression for modules or ranks is replaced by what the tensors show; any other expression is refused.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np

from loraplex.adapters.admission.module_names import HEAD_NAMES, ModuleNames
from loraplex.adapters.admission.peft_support import FIELD_RULES, READ_FIELDS, is_neutral, is_number, is_text
from loraplex.adapters.admission.strict_json import parse_object
from loraplex.adapters.contents.kinds import START_BYTES, identify_config
from loraplex.adapters.errors import AdapterRefused
from loraplex.adapters.store.files import open_regular, read_into, shown

MAX_CONFIG_BYTES = 1 << 20
_MAX_ENTRIES = 4096
_MAX_ALPHA = 1e6
_MODULE_NAME = re.compile(r"[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*")
_PATTERN_KEY = re.compile(r"(\^?)((?:[A-Za-z0-9_-]|\\?\.)+)\$?")
_SEGMENT = re.compile(r"[A-Za-z0-9_-]+")
_FIELD_NAME = re.compile(r"[A-Za-z0-9_]{1,64}")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """Ranks, scaling and changed modules from an adapter's config.

    `targets` None stands for "all-linear" or an expression. `exact` is False where an expression decides which
    modules there are: then the tensors tell. `layers` None: every layer. Pattern keys are literal and in the order
    of the file, one that stands for a whole path alone with "^" before it; `loose_ranks` are the ranks whose keys
    are expressions. `notes` are warnings for the report.
    """

    rank: int
    alpha: float
    use_rslora: bool
    use_dora: bool
    rank_pattern: Mapping[str, int]
    loose_ranks: frozenset[int]
    alpha_pattern: Mapping[str, float]
    targets: frozenset[str] | None
    exact: bool
    excluded: frozenset[str]
    layers: frozenset[int] | None
    layers_pattern: tuple[str, ...]
    base_name: str | None
    notes: tuple[str, ...]

    def rank_and_scaling(self, module_path: str, tensor_rank: int | None = None) -> tuple[int, float]:
        """Rank and scaling of a module: alpha/r, under rsLoRA alpha/sqrt(r). Of several pattern keys that name
        the module, the first of the file wins, as PEFT's get_pattern_key does. `tensor_rank` is taken where an
        expression may have meant it."""
        rank = _first_match(self.rank_pattern, module_path, self.rank)
        if tensor_rank is not None and tensor_rank in self.loose_ranks:
            rank = tensor_rank
        alpha = _first_match(self.alpha_pattern, module_path, self.alpha)
        return rank, alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def selects(self, module_path: str) -> bool:
        """Whether PEFT would put LoRA on this linear (check_target_module_exists): a target that is the whole
        path does so in any layer, a suffix only in the layers to transform; "all-linear" is all but the head. An
        expression may mean any module."""
        names = suffixes(module_path)
        if not self.excluded.isdisjoint(names):
            return False
        if self.targets is None:
            return not self.exact or module_path not in HEAD_NAMES
        if module_path in self.targets:
            return True
        if self.targets.isdisjoint(names):
            return False
        return self.layers is None or _layer_index(module_path, self.layers_pattern) in self.layers

    def with_names(self, names: ModuleNames) -> LoraSettings:
        """The same settings where every path of a module is the one that the tensors have: a config may come from
        another version of transformers than they."""
        bare = names.decoder == "" and self.layers is not None
        return replace(
            self,
            targets=None if self.targets is None else frozenset(map(names.own_name, self.targets)),
            excluded=frozenset(map(names.own_name, self.excluded)),
            rank_pattern=_with_names(self.rank_pattern, names),
            alpha_pattern=_with_names(self.alpha_pattern, names),
            # PEFT reads no number out of a path that begins with the list. Here the names make no difference.
            layers_pattern=self.layers_pattern or (("layers",) if bare else ()),
        )


def parse_peft_config(path: Path, module_paths: Iterable[str]) -> LoraSettings:
    """Read and check an adapter_config.json. `module_paths` are the base's linears: a pattern key that means
    one thing as a name and another as PEFT's regular expression for any of them is refused.

    Raises AdapterRefused (config_invalid, unsupported_feature, too_large).
    """
    config = _read(path)
    peft_type = config.pop("peft_type", None)
    if not isinstance(peft_type, str):
        _invalid("peft_type is missing; an adapter saved by PEFT has it")
    if peft_type != "LORA":
        _unsupported(
            "peft_type", f"{shown(peft_type)} adapters are not served; {FIELD_RULES['peft_type'].advice}"
        )
    settings = {name: config.pop(name) for name in sorted(READ_FIELDS) if name in config}
    for name, value in config.items():
        _check_other(name, value)
    return _parse_settings(settings, list(module_paths))


def read_raw_config(path: Path) -> bytes:
    """Raises AdapterRefused("too_large"), OSError."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        raw = bytearray(min(size, MAX_CONFIG_BYTES))
        read_into(file, memoryview(raw))
    if size > MAX_CONFIG_BYTES:
        raise AdapterRefused("too_large", f"adapter_config.json is larger than {MAX_CONFIG_BYTES} bytes")
    return bytes(raw)


@lru_cache(maxsize=4096)
def suffixes(module_path: str) -> tuple[str, ...]:
    """ "a.b.c" itself, then "b.c", then "c". For the base's modules: what an upload names may be of any number and
    length, and is not to be remembered."""
    found = []
    while module_path:
        found.append(module_path)
        module_path = module_path.partition(".")[2]
    return tuple(found)


def pattern_keys(module_path: str) -> Iterator[str]:
    """Every literal key of a pattern that names this module."""
    yield f"^{module_path}"
    yield from suffixes(module_path)


def _check_other(name: str, value: Any) -> None:
    rule = FIELD_RULES.get(name)
    accepts = is_neutral if rule is None or rule.accepts is None else rule.accepts
    if accepts(value):
        return
    feature = name if _FIELD_NAME.fullmatch(name) else shown(name, 64)
    advice = (
        rule.advice
        if rule and rule.advice
        else "leave it out, or give it the value that turns it off (null, false, [] or {})"
    )
    _unsupported(feature, f"{feature} = {shown(value)} is not supported; {advice}")


def _parse_settings(settings: dict[str, Any], module_paths: list[str]) -> LoraSettings:
    notes: list[str] = []
    base_name = settings.get("base_model_name_or_path")
    if not is_text(base_name):
        _invalid("base_model_name_or_path must be a string or null")
    targets, is_list, exact = _parse_targets(settings.get("target_modules"), notes)
    excluded, all_named = _parse_excluded(settings.get("exclude_modules"), notes)
    layers = _parse_layers(settings.get("layers_to_transform"))
    layers_pattern = _parse_layers_pattern(settings.get("layers_pattern"))
    if layers_pattern and settings.get("layers_to_transform") is None:
        _invalid("layers_pattern needs layers_to_transform")
    if layers is not None and not is_list:
        _invalid("layers_to_transform needs target_modules to be a list")
    if _flag(settings, "fan_in_fan_out"):
        notes.append(
            "fan_in_fan_out is taken for false, as PEFT takes it: every linear here is stored as [out, in]"
        )
    rank_pattern, expressions = _split_ranks(settings.get("rank_pattern"))
    return LoraSettings(
        rank=_positive(settings.get("r", 8), "r"),
        alpha=_alpha(settings.get("lora_alpha", 8), "lora_alpha"),
        use_rslora=_flag(settings, "use_rslora"),
        use_dora=_flag(settings, "use_dora"),
        rank_pattern=_parse_pattern("rank_pattern", rank_pattern, _positive, module_paths),
        loose_ranks=frozenset(
            _positive(rank, f"rank_pattern[{shown(key)}]") for key, rank in expressions.items()
        ),
        alpha_pattern=_parse_pattern("alpha_pattern", settings.get("alpha_pattern"), _alpha, module_paths),
        targets=targets,
        exact=exact and all_named,
        excluded=excluded,
        layers=layers,
        layers_pattern=layers_pattern,
        base_name=base_name,
        notes=tuple(notes),
    )


def _flag(settings: Mapping[str, Any], name: str) -> bool:
    value = settings.get(name, False)
    if value is not None and not isinstance(value, bool):
        _invalid(f"{name} must be true or false, not {shown(value)}")
    return bool(value)


def _parse_targets(value: Any, notes: list[str]) -> tuple[frozenset[str] | None, bool, bool]:
    """The target names (None: all-linear, or an expression), whether they came as a list, and whether they tell."""
    if isinstance(value, str) and value:
        if value.lower() == "all-linear":
            return None, False, True
        if not _MODULE_NAME.fullmatch(value):
            notes.append(
                f"target_modules {shown(value)} is a regular expression, which is not evaluated: the tensors tell the "
                "modules, and a missing one is not noticed"
            )
            return None, False, False
        return frozenset((value,)), False, True
    names = _names("target_modules", value)
    if not names:
        _invalid("target_modules must be a list of module names, as PEFT saves it")
    return names, True, True


def _parse_excluded(value: Any, notes: list[str]) -> tuple[frozenset[str], bool]:
    """The names, and whether they are all: False for an expression."""
    if isinstance(value, str) and value:
        notes.append(
            f"exclude_modules {shown(value)} is a regular expression, which is not evaluated: the tensors tell the "
            "modules, and a missing one is not noticed"
        )
        return frozenset(), False
    return (frozenset() if is_neutral(value) else _names("exclude_modules", value)), True


def _names(field: str, value: Any) -> frozenset[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        _invalid(f"{field} must be a list of module names, as PEFT saves it")
    if len(value) > _MAX_ENTRIES:
        _invalid(f"{field} has {len(value)} entries; at most {_MAX_ENTRIES} are accepted")
    return frozenset(value)


def _split_ranks(value: Any) -> tuple[Any, dict[str, Any]]:
    """A rank_pattern without its expressions, and those."""
    if not isinstance(value, dict) or len(value) > _MAX_ENTRIES:
        return value, {}  # refused later
    names = {key: rank for key, rank in value.items() if _literal(key) is not None}
    return names, {key: rank for key, rank in value.items() if key not in names}


def _literal(key: str) -> str | None:
    """The name that a pattern key is, with "^" before it where it is anchored, so that it stands for a whole path
    only. None for any other regular expression."""
    found = _PATTERN_KEY.fullmatch(key)
    if found is None:
        return None
    name = found[2]
    if "\\" in name and "." in name.replace("\\.", ""):
        return None  # some dots escaped, some not
    name = name.replace("\\.", ".")
    return f"{found[1]}{name}" if _MODULE_NAME.fullmatch(name) else None


def _parse_layers(value: Any) -> frozenset[int] | None:
    indices = [value] if type(value) is int else value
    if indices is None or indices == []:
        return None
    if not isinstance(indices, list) or not all(type(index) is int and index >= 0 for index in indices):
        _invalid("layers_to_transform must be a layer's index or a list of them")
    return frozenset(indices)


def _parse_layers_pattern(value: Any) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) and value else (value or [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        _invalid("layers_pattern must be a name or a list of names")
    if len(names) > 64:
        _invalid(f"layers_pattern has {len(names)} entries; at most 64 are accepted")
    for name in names:
        if not _SEGMENT.fullmatch(name):
            _unsupported(
                "layers_pattern", f"layers_pattern {shown(name)} is not the plain name of a module list"
            )
    return tuple(names)


def _parse_pattern(
    field: str, value: Any, parse: Callable[[Any, str], _T], module_paths: list[str]
) -> dict[str, _T]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        _invalid(f"{field} must be an object")
    if len(value) > _MAX_ENTRIES:
        _invalid(f"{field} has {len(value)} entries; at most {_MAX_ENTRIES} are accepted")
    literals = {key: _literal(key) for key in value}
    for key, literal in literals.items():
        if literal is None:
            _unsupported(
                field, f"the key {shown(key)} of {field} is a regular expression; use a module's name"
            )
    if ambiguous := _first_ambiguous([key.strip("^$") for key in value if "\\" not in key], module_paths):
        _unsupported(
            field,
            f"the key {shown(ambiguous)} of {field} names other modules as a regular expression than as a name",
        )
    parsed: dict[str, _T] = {}
    for key, entry in value.items():
        parsed.setdefault(literals[key] or key, parse(entry, f"{field}[{shown(key)}]"))
    return parsed


def _first_ambiguous(keys: list[str], module_paths: list[str]) -> str | None:
    """A key in which a "." would match another character of some module's name, as in "q.proj"."""
    dotted: dict[int, list[str]] = {}
    for key in keys:
        if "." in key:
            dotted.setdefault(len(key), []).append(key)
    if not dotted:
        return None
    by_length: dict[int, set[str]] = {}
    for path in module_paths:
        for suffix in suffixes(path):
            by_length.setdefault(len(suffix), set()).add(suffix)
    for length, group in dotted.items():
        rows = np.frombuffer("".join(group).encode("ascii"), np.uint8).reshape(-1, length)
        is_dot = rows == ord(".")
        for suffix in by_length.get(length, ()):
            equal = rows == np.frombuffer(suffix.encode("ascii", "replace"), np.uint8)
            hits = (equal | is_dot).all(axis=1) & ~equal.all(axis=1)
            if hits.any():
                return group[int(hits.argmax())]
    return None


def _first_match(pattern: Mapping[str, _T], module_path: str, default: _T) -> _T:
    if not pattern:
        return default
    named = {key for key in pattern_keys(module_path) if key in pattern}
    if not named:
        return default
    return pattern[next(iter(named)) if len(named) == 1 else next(key for key in pattern if key in named)]


def _with_names(pattern: Mapping[str, _T], names: ModuleNames) -> dict[str, _T]:
    renamed: dict[str, _T] = {}
    for key, value in pattern.items():
        anchor = "^" if key.startswith("^") else ""
        renamed.setdefault(anchor + names.own_name(key.removeprefix("^")), value)
    return renamed


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


def _positive(value: Any, where: str) -> int:
    if type(value) is not int or value < 1:
        _invalid(f"{where} must be a positive integer, not {shown(value)}")
    return value


def _alpha(value: Any, where: str) -> float:
    if isinstance(value, bool) or not is_number(value) or abs(value) > _MAX_ALPHA:
        _invalid(f"{where} must be a number of at most {_MAX_ALPHA:g} in size, not {shown(value)}")
    return float(value)


def _read(path: Path) -> dict[str, Any]:
    raw = read_raw_config(path)
    kind = identify_config(raw[:START_BYTES], len(raw))
    if kind is not None:
        raise AdapterRefused("config_invalid", f"adapter_config.json is {kind}")
    try:
        return parse_object(raw)
    except ValueError as error:
        _invalid(f"it is not valid JSON: {error}")


def _invalid(what: str) -> NoReturn:
    raise AdapterRefused("config_invalid", f"adapter_config.json: {what}")


def _unsupported(feature: str, what: str) -> NoReturn:
    raise AdapterRefused("unsupported_feature", f"adapter_config.json: {what}", feature=feature)
