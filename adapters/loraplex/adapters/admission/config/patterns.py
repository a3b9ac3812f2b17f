"""rank_pattern and alpha_pattern: a rank or an alpha by the modules that a key names.

To PEFT each key is a regular expression for a whole module path or for its end behind a "."; of several that match, the
first in the file counts (peft.utils.other.get_pattern_key). A key that is a name is looked up. Any other key of
alpha_pattern is evaluated by `expressions` over the modules of the base. Any other key of rank_pattern need not be: the
tensors tell the ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Generic, TypeVar

import numpy as np

from loraplex.adapters.admission.config.expressions import ExpressionRefused, match_paths
from loraplex.adapters.admission.faults import as_json, invalid, unsupported
from loraplex.adapters.admission.module_names import ModuleNames, without_wrappers

MAX_ENTRIES = 4096
MODULE_NAME = re.compile(r"[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*")
_KEY = re.compile(r"(\^?)((?:[A-Za-z0-9_-]|\\?\.)+)\$?")
_T = TypeVar("_T", int, float)


@dataclass(frozen=True, slots=True)
class Pattern(Generic[_T]):
    """Values with their positions in the file: `names` by literal key, one that stands for a whole path alone with "^"
    before it; `matched` by the module that an expression matches."""

    names: Mapping[str, tuple[int, _T]] = field(default_factory=dict)
    matched: Mapping[str, Sequence[tuple[int, _T]]] = field(default_factory=dict)

    def values(self, module_path: str) -> list[_T]:
        """The values of all keys that name the module, in the order of the file. The first counts."""
        if not self.names and not self.matched:
            return []
        found = [self.names[key] for key in _literal_keys(module_path) if key in self.names]
        found += self.matched.get(module_path, ())
        return [value for _, value in sorted(found, key=lambda entry: entry[0])]

    def with_names(self, names: ModuleNames) -> Pattern[_T]:
        """The same values by the names that the tensors have."""
        renamed: dict[str, tuple[int, _T]] = {}
        for key, entry in self.names.items():
            anchor = "^" if key.startswith("^") else ""
            renamed.setdefault(anchor + names.own_name(key.removeprefix("^")), entry)
        return replace(self, names=renamed)


@dataclass(frozen=True, slots=True)
class RankPattern:
    """`loose` are the ranks whose keys are expressions: any module may be meant."""

    literal: Pattern[int] = field(default_factory=Pattern)
    loose: frozenset[int] = frozenset()

    def rank(self, module_path: str, default: int, tensor_rank: int | None) -> int:
        """`tensor_rank` is taken where an expression may have meant it."""
        if tensor_rank is not None and tensor_rank in self.loose:
            return tensor_rank
        return next(iter(self.literal.values(module_path)), default)


def parse_ranks(value: Any, parse: Callable[[Any, str], int], module_paths: Sequence[str]) -> RankPattern:
    """Raises AdapterRefused (config_invalid)."""
    entries = _entries("rank_pattern", value, parse)
    names, expressions = _split(entries, module_paths)
    return RankPattern(Pattern(names), frozenset(rank for _, _, rank in expressions))


def parse_alphas(
    value: Any, parse: Callable[[Any, str], float], module_paths: Sequence[str]
) -> Pattern[float]:
    """Raises AdapterRefused (config_invalid; unsupported_feature where a key is not evaluated)."""
    entries = _entries("alpha_pattern", value, parse)
    names, expressions = _split(entries, module_paths)
    if not expressions:
        return Pattern(names)
    try:
        matches = match_paths([key for _, key, _ in expressions], module_paths)
    except ExpressionRefused as refusal:
        which = f"the key {as_json(refusal.expression)}" if refusal.expression is not None else "keys"
        unsupported(
            "alpha_pattern",
            f"{which} of alpha_pattern cannot be evaluated as a regular expression: {refusal}. A key that is a "
            "module's name is served",
        )
    matched: dict[str, list[tuple[int, float]]] = {}
    for (position, _, alpha), paths in zip(expressions, matches, strict=True):
        for path in paths:
            matched.setdefault(path, []).append((position, alpha))
    return Pattern(names, matched)


def ends(module_path: str) -> Iterator[str]:
    """ "a.b.c" itself, then "b.c", then "c"."""
    while module_path:
        yield module_path
        module_path = module_path.partition(".")[2]


@lru_cache(maxsize=4096)
def suffixes(module_path: str) -> tuple[str, ...]:
    """`ends`, remembered. For the base's modules: what an upload names may be of any number and length."""
    return tuple(ends(module_path))


def _literal_keys(module_path: str) -> Iterator[str]:
    yield f"^{module_path}"
    yield from suffixes(module_path)


def _entries(field_name: str, value: Any, parse: Callable[[Any, str], _T]) -> dict[str, _T]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        invalid(f"{field_name} must be an object, as PEFT saves it")
    if len(value) > MAX_ENTRIES:
        invalid(f"{field_name} has {len(value)} entries; at most {MAX_ENTRIES} are accepted")
    found: dict[str, _T] = {}
    for key, entry in value.items():
        anchor = "^" if key.startswith("^") else ""
        bare = anchor + without_wrappers(key.removeprefix("^"))
        found.setdefault(bare, parse(entry, f"{field_name}[{as_json(key)}]"))
    return found


def _split(
    entries: Mapping[str, _T], module_paths: Sequence[str]
) -> tuple[dict[str, tuple[int, _T]], list[tuple[int, str, _T]]]:
    """The values of keys that are names, and (position, key, value) of the others."""
    literals = {key: _literal(key) for key in entries}
    # "\." is a dot and nothing else.
    dotted = {key: key.strip("^$") for key, name in literals.items() if name is not None and "\\" not in key}
    ambiguous = _ambiguous(set(dotted.values()), module_paths)
    names: dict[str, tuple[int, _T]] = {}
    expressions: list[tuple[int, str, _T]] = []
    for position, (key, value) in enumerate(entries.items()):
        name = literals[key]
        if name is None or dotted.get(key) in ambiguous:
            expressions.append((position, key, value))
        else:
            names.setdefault(name, (position, value))
    return names, expressions


def _literal(key: str) -> str | None:
    """The name that a key is, with "^" before it where it is anchored. None for any other regular expression."""
    found = _KEY.fullmatch(key)
    if found is None:
        return None
    name = found[2]
    if "\\" in name and "." in name.replace("\\.", ""):
        return None  # some dots escaped, some not
    name = name.replace("\\.", ".")
    return f"{found[1]}{name}" if MODULE_NAME.fullmatch(name) else None


def _ambiguous(keys: set[str], module_paths: Sequence[str]) -> set[str]:
    """The keys in which a "." would match another character of some module's name, as in "q.proj"."""
    by_length: dict[int, list[str]] = {}
    for key in keys:
        if "." in key:
            by_length.setdefault(len(key), []).append(key)
    found: set[str] = set()
    if not by_length:
        return found
    of_length: dict[int, set[str]] = {length: set() for length in by_length}
    for path in module_paths:
        for suffix in ends(path):
            if len(suffix) in of_length:
                of_length[len(suffix)].add(suffix)
    for length, group in by_length.items():
        rows = np.frombuffer("".join(group).encode("ascii"), np.uint8).reshape(-1, length)
        is_dot = rows == ord(".")
        for suffix in of_length[length]:
            equal = rows == np.frombuffer(suffix.encode("ascii", "replace"), np.uint8)
            hits = (equal | is_dot).all(axis=1) & ~equal.all(axis=1)
            found.update(group[int(index)] for index in hits.nonzero()[0])
    return found
