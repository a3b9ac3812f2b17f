"""Our own reading of PEFT's adapter_config.json: LoRA and DoRA as PEFT >= 0.18 compute them, nothing else. What is
accepted of each field is in `peft_support`; `config` reads the fields that name modules.

Nothing from an upload is ever given to Python's `re`: literal names mean what PEFT makes of them. An expression for
modules or ranks is replaced by what the tensors show; one for alphas is matched in linear time (`config.expressions`).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from loraplex.adapters.admission.config.invocation import parse_invocation
from loraplex.adapters.admission.config.patterns import Pattern, RankPattern, ends, parse_alphas, parse_ranks
from loraplex.adapters.admission.config.selection import WEIGHT, Selection, parse_parameters, parse_selection
from loraplex.adapters.admission.config.token_indices import parse_token_indices
from loraplex.adapters.admission.faults import Faults, as_json, invalid, unsupported
from loraplex.adapters.admission.module_names import ModuleNames, without_wrappers
from loraplex.adapters.admission.peft_support import (
    FIELD_RULES,
    READ_FIELDS,
    UNKNOWN_FIELD,
    is_neutral,
    is_number,
    is_of_heads,
    not_converted,
)
from loraplex.adapters.admission.strict_json import parse_object
from loraplex.adapters.contents.kinds import START_BYTES, identify_config
from loraplex.adapters.errors import AdapterRefused
from loraplex.adapters.store.files import MAX_CONFIG_BYTES, open_regular, read_into, shown

_MAX_ALPHA = 1e6
_MAX_SAVED = 16
"""Names of modules_to_save that are looked up in the base."""
_FIELD_NAME = re.compile(r"[A-Za-z0-9_]{1,64}")
_RELEASE = re.compile(r"(\d{1,4})\.(\d{1,4})\.(\d{1,4})(?:\.post\d{1,4})?")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """Ranks, scaling and changed modules from an adapter's config."""

    rank: int
    """The config's `r`, for modules that `rank_pattern` does not name."""
    alpha: float
    """The config's `lora_alpha`, for modules that `alpha_pattern` does not name."""
    use_rslora: bool
    """Whether the scaling is alpha/sqrt(rank)."""
    use_dora: bool
    """Whether the training had DoRA's magnitudes."""
    ties_weights: bool
    """The config's `ensure_weight_tying`."""
    rank_pattern: RankPattern
    """Ranks of modules by patterns of their paths."""
    alpha_pattern: Pattern[float]
    """Alphas of modules by patterns of their paths."""
    selection: Selection
    """The modules that `target_modules` and its companions select."""
    token_indices: Mapping[str, tuple[int, ...]]
    """The tokens whose rows are replaced, by the name of their module."""
    invocation: tuple[int, ...]
    """The token ids that begin an activated LoRA (`config.invocation`), else empty."""
    base_name: str | None
    """The base's name, as the training had it."""
    task_type: str | None
    """The task of the training."""
    saves_head: bool
    """Whether `modules_to_save` names a head."""
    notes: tuple[str, ...]
    """Warnings for the report."""
    target_parameters: tuple[str, ...] = ()
    """Parameters of experts or routers, by the ends of their paths."""
    release: tuple[int, ...] | None = None
    """The release of PEFT that saved the files. None: it is not told."""

    def rank_and_scaling(self, module_path: str, tensor_rank: int | None = None) -> tuple[int, float]:
        """Rank and scaling of a module of the base: alpha/r, under rsLoRA alpha/sqrt(r). `tensor_rank` is taken where
        an expression may have meant it."""
        rank = self.rank_pattern.rank(module_path, self.rank, tensor_rank)
        alpha = next(iter(self.alpha_pattern.values(module_path)), self.alpha)
        return rank, alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def matched_path(self, module_path: str) -> str:
        """The path that PEFT matches patterns with: that of the weight where target_parameters names the weight."""
        weight = f"{module_path}{WEIGHT}"
        return module_path if set(ends(weight)).isdisjoint(self.target_parameters) else weight

    def with_names(self, names: ModuleNames) -> LoraSettings:
        """The same settings where every path of a module is the one that the tensors have: a config may come from
        another version of transformers than they."""
        return replace(
            self,
            selection=self.selection.with_names(names),
            rank_pattern=replace(self.rank_pattern, literal=self.rank_pattern.literal.with_names(names)),
            alpha_pattern=self.alpha_pattern.with_names(names),
            target_parameters=tuple(map(names.own_name, self.target_parameters)),
        )


def read_settings(
    path: Path,
    module_paths: Iterable[str],
    faults: Faults,
    tensors: Iterable[str] = (),
    is_left_out: Callable[[list[str]], bool] = lambda saved: False,
    *,
    has_experts: bool = False,
) -> LoraSettings | None:
    """Read and check an adapter_config.json, with refusals added to `faults`; `module_paths` are the base's linears.
    None if a field that counts cannot be read. `tensors`: the names of those that came with the config.
    `is_left_out`: whether the names of modules_to_save stand for parts of the base whose tensors are left out.
    `has_experts`: whether the base has experts whose LoRA is read: then target_parameters counts.

    Raises AdapterRefused where nothing of the config can be."""
    config = _read(path)
    peft_type = config.pop("peft_type", None)
    if not isinstance(peft_type, str):
        invalid("peft_type is missing; an adapter saved by PEFT has it")
    if peft_type != "LORA":
        about = FIELD_RULES["peft_type"].explain(peft_type)
        unsupported("peft_type", f"{as_json(peft_type)} adapters are not served, only LORA: {about}")
    unconverted = not_converted(config, tensors)
    settings = {name: config.pop(name) for name in sorted(READ_FIELDS) if name in config}
    notes: list[str] = []
    _drop_unused_head(config, notes)
    _drop_left_out(config, notes, is_left_out)
    settings |= {name: config.get(name) for name in ("task_type", "modules_to_save", "peft_version")}
    if has_experts:
        settings["target_parameters"] = config.pop("target_parameters", None)
    for name, value in config.items():
        with faults.collect():
            _check_other(name, value, unconverted, notes)
    unreadable = Faults()
    found = _parse_settings(settings, list(module_paths), notes, unreadable)
    with faults.collect():
        unreadable.raise_any()
    return None if unreadable else found


def read_raw_config(path: Path) -> bytes:
    """Raises AdapterRefused("too_large"), OSError."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        raw = bytearray(min(size, MAX_CONFIG_BYTES))
        read_into(file, memoryview(raw))
    if size > MAX_CONFIG_BYTES:
        raise AdapterRefused("too_large", f"adapter_config.json is larger than {MAX_CONFIG_BYTES} bytes")
    return bytes(raw)


def _drop_unused_head(config: dict[str, Any], notes: list[str]) -> None:
    """PEFT adds "qa_outputs" to modules_to_save for QUESTION_ANS by itself. A decoder has no such module; where the
    model of the training had one, PEFT saved it, and its tensors are refused."""
    saved = config.get("modules_to_save")
    unused = isinstance(saved, list) and bool(saved) and all(name == "qa_outputs" for name in saved)
    if unused and config.get("task_type") == "QUESTION_ANS":
        del config["modules_to_save"]
        notes.append(
            "modules_to_save names qa_outputs, as PEFT writes it for every QUESTION_ANS; the base has no such module"
        )


def _drop_left_out(
    config: dict[str, Any], notes: list[str], is_left_out: Callable[[list[str]], bool]
) -> None:
    saved = config.get("modules_to_save")
    if not isinstance(saved, list) or not 0 < len(saved) <= _MAX_SAVED:
        return
    if all(isinstance(name, str) for name in saved) and is_left_out(list(map(without_wrappers, saved))):
        del config["modules_to_save"]
        notes.append(f"modules_to_save names {as_json(saved)}, which no text goes through: not read")


def _check_other(name: str, value: Any, unconverted: list[str], notes: list[str]) -> None:
    rule = FIELD_RULES.get(name)
    accepts = is_neutral if rule is None or rule.accepts is None else rule.accepts
    if accepts(value):
        return
    if rule is not None and rule.idle:
        notes.append(f"{name} = {as_json(value)} is nothing that PEFT writes; it is not read ({rule.note})")
        return
    feature = name if _FIELD_NAME.fullmatch(name) else shown(name, 64)
    about = rule.explain(value, unconverted) if rule else UNKNOWN_FIELD
    unsupported(feature, f"{feature} = {as_json(value)} is not served: {about}")


def _parse_settings(
    settings: Mapping[str, Any], module_paths: list[str], notes: list[str], faults: Faults
) -> LoraSettings:
    """The settings. Where `faults` grew, some are defaults."""

    def parse(default: _T, read: Callable[..., _T], *given: Any) -> _T:
        try:
            return read(*given)
        except AdapterRefused as refusal:
            faults.extend(refusal)
            return default

    no_alphas: Pattern[float] = Pattern()
    no_names: tuple[str, ...] = ()
    parameters = parse(no_names, parse_parameters, settings.get("target_parameters"))
    module_paths = [*module_paths, *_weights_named(parameters, module_paths)]
    rank_pattern, alpha_pattern = settings.get("rank_pattern"), settings.get("alpha_pattern")
    found = LoraSettings(
        rank=parse(1, _positive, settings.get("r", 8), "r"),
        alpha=parse(1.0, _alpha, settings.get("lora_alpha", 8), "lora_alpha"),
        use_rslora=parse(False, _flag, settings, "use_rslora"),
        use_dora=parse(False, _flag, settings, "use_dora"),
        ties_weights=parse(False, _flag, settings, "ensure_weight_tying"),
        rank_pattern=parse(RankPattern(), parse_ranks, rank_pattern, _positive, module_paths),
        alpha_pattern=parse(no_alphas, parse_alphas, alpha_pattern, _alpha, module_paths),
        selection=parse_selection(settings, notes, faults),
        token_indices=parse({}, parse_token_indices, settings.get("trainable_token_indices")),
        invocation=parse((), parse_invocation, settings.get("alora_invocation_tokens")),
        base_name=parse(None, _text, settings, "base_model_name_or_path"),
        task_type=task if isinstance(task := settings.get("task_type"), str) else None,
        saves_head=bool(saved := settings.get("modules_to_save")) and is_of_heads(saved),
        notes=(),
        target_parameters=parameters,
        release=_release(settings.get("peft_version")),
    )
    if parse(False, _flag, settings, "fan_in_fan_out"):
        notes.append("fan_in_fan_out is not read: as in PEFT, how the base stores its linears decides")
    return replace(found, notes=tuple(notes))


def _weights_named(parameters: Iterable[str], module_paths: Iterable[str]) -> list[str]:
    """The weights of modules that target_parameters may name, under any name of the modules."""
    leaves = {name.removesuffix(WEIGHT).rpartition(".")[2] for name in parameters if name.endswith(WEIGHT)}
    return [f"{path}{WEIGHT}" for path in module_paths if path.rpartition(".")[2] in leaves]


def _release(version: Any) -> tuple[int, ...] | None:
    """A pre-release is told as nothing: what it has of its release is not known."""
    found = _RELEASE.fullmatch(version) if isinstance(version, str) else None
    return tuple(map(int, found.groups())) if found else None


def _flag(settings: Mapping[str, Any], name: str) -> bool:
    value = settings.get(name, False)
    if value is not None and not isinstance(value, bool):
        invalid(f"{name} must be true or false, as PEFT saves it, not {as_json(value)}")
    return bool(value)


def _text(settings: Mapping[str, Any], name: str) -> str | None:
    value = settings.get(name)
    if value is None or isinstance(value, str):
        return value
    invalid(f"{name} must be a string or null, as PEFT saves it")


def _positive(value: Any, where: str) -> int:
    if type(value) is not int or value < 1:
        invalid(f"{where} must be a positive integer, as PEFT saves it, not {as_json(value)}")
    return value


def _alpha(value: Any, where: str) -> float:
    if isinstance(value, bool) or not is_number(value) or abs(value) > _MAX_ALPHA:
        invalid(f"{where} must be a number of at most {_MAX_ALPHA:g} in size, not {as_json(value)}")
    return float(value)


def _read(path: Path) -> dict[str, Any]:
    raw = read_raw_config(path)
    kind = identify_config(raw[:START_BYTES], len(raw))
    if kind is not None:
        raise AdapterRefused("config_invalid", f"adapter_config.json is {kind}")
    try:
        return parse_object(raw)
    except ValueError as error:
        invalid(f"it is not valid JSON: {error}")
