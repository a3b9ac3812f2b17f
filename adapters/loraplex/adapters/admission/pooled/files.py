"""Labels, prompts and poolings that an upload brings: transformers' config.json of a classifier, and modules.json,
1_Pooling/config.json and config_sentence_transformers.json of sentence-transformers.

A field that is not there has its default. One that is there and cannot be used is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, get_args

from loraplex.adapters.admission.strict_json import parse_object, parse_value
from loraplex.adapters.errors import AdapterRefused
from loraplex.adapters.pooled import EmbeddingSpec, Head, HeadTask, ProblemType, VectorPooling
from loraplex.adapters.store.files import POOLED_FILE_BYTES, open_regular

CONFIG_FILE, MODULES_FILE, POOLING_FILE, PROMPTS_FILE = POOLED_FILE_BYTES
MAX_LABEL_CHARS = 256
MAX_PROMPT_CHARS = 4096
_MAX_MODULES = 16
_POOLINGS: Mapping[str, VectorPooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_BY_NAME: Mapping[str, VectorPooling] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
_MODULES = ("Transformer", "Pooling", "Normalize")
"""The modules of sentence-transformers that are served, in their order."""


def read_head(folder: Path, task: HeadTask, num_labels: int, base_pad: Any = None) -> tuple[Head, list[str]]:
    """The head of an upload with its labels from config.json, else LABEL_0, …; and warnings for the report. `base_pad`:
    the base's pad_token_id, where the upload has none. Raises AdapterRefused (config_invalid, too_large), OSError."""
    raw = _content(folder, CONFIG_FILE)
    config = {} if raw is None else _object(raw, CONFIG_FILE)
    head, notes = head_of({"pad_token_id": base_pad} | config, task, num_labels)
    return replace(head, prompt=read_prompt(folder)), notes


def head_of(config: Mapping[str, Any], task: HeadTask, num_labels: int) -> tuple[Head, list[str]]:
    """The same of a config.json that was read. Without a problem_type one label is a regression, as transformers has
    it."""
    notes = []
    labels = _labels(config.get("id2label"))
    if labels is not None and len(labels) != num_labels:
        notes.append(f"{CONFIG_FILE} has {len(labels)} labels, the head {num_labels}: they are LABEL_0, …")
        labels = None
    problem: Any = config.get("problem_type")
    if problem is None or task == "token_classify":
        is_number = num_labels == 1 and task == "classify"
        problem = "regression" if is_number else "single_label_classification"
    elif problem not in get_args(ProblemType):
        _invalid(CONFIG_FILE, f"problem_type is none of {', '.join(get_args(ProblemType))}")
    pad = config.get("pad_token_id")
    pad = pad if type(pad) is int and task == "classify" else None
    return Head(task, labels or tuple(f"LABEL_{number}" for number in range(num_labels)), problem, pad), notes


def read_embedding(folder: Path) -> tuple[EmbeddingSpec | None, list[str]]:
    """The vectors that an upload was trained for, None where it does not say; and warnings for the report. Raises
    AdapterRefused (config_invalid, too_large), OSError."""
    raw = _content(folder, POOLING_FILE)
    if raw is None:
        return None, []
    listed = _content(folder, MODULES_FILE)
    modules = None if listed is None else _module_names(listed)
    others = [name for name in modules or () if name not in _MODULES]
    if others:
        return None, [
            f"{MODULES_FILE} names {others[0]}, which is not served: vectors are those of the model"
        ]
    config = _object(raw, POOLING_FILE)
    pooling = _pooling(config)
    if pooling is None:
        return None, [
            f"{POOLING_FILE} asks for a pooling that is not served: {', '.join(_BY_NAME)} alone are"
        ]
    notes = []
    if read_prompt(folder) is not None:
        notes.append(
            f"{PROMPTS_FILE} names a default prompt: write it into each input, as texts are embedded as given"
        )
    return EmbeddingSpec(pooling, modules is None or "Normalize" in modules, None), notes


def read_prompt(folder: Path) -> str | None:
    """The default prompt of sentence-transformers. Raises AdapterRefused (config_invalid, too_large), OSError."""
    raw = _content(folder, PROMPTS_FILE)
    config = {} if raw is None else _object(raw, PROMPTS_FILE)
    name, prompts = config.get("default_prompt_name"), config.get("prompts")
    if name is None:
        return None
    prompt = prompts.get(name) if isinstance(prompts, dict) and isinstance(name, str) else None
    if not isinstance(prompt, str) or len(prompt) > MAX_PROMPT_CHARS:
        _invalid(
            PROMPTS_FILE,
            f"default_prompt_name is none of its prompts, or one of more than {MAX_PROMPT_CHARS} characters",
        )
    return prompt or None


def _labels(given: Any) -> tuple[str, ...] | None:
    """Labels by number: an object whose keys are 0, 1, … as text, or a list."""
    if given is None:
        return None
    if isinstance(given, list):
        given = {str(number): label for number, label in enumerate(given)}
    labels: list[Any] = [given.get(str(n)) for n in range(len(given))] if isinstance(given, dict) else [None]
    if not all(isinstance(label, str) and _is_label(label) for label in labels):
        _invalid(
            CONFIG_FILE,
            f"id2label has a label of 1 to {MAX_LABEL_CHARS} printable characters for each number from 0 on",
        )
    return tuple(labels)


def _is_label(text: str) -> bool:
    return 0 < len(text) <= MAX_LABEL_CHARS and text.isprintable()


def _pooling(config: Mapping[str, Any]) -> VectorPooling | None:
    name = config.get("pooling_mode")
    if name is not None:
        return _BY_NAME.get(name) if isinstance(name, str) else None
    chosen = [field for field, value in config.items() if field.startswith("pooling_mode_") and value is True]
    return _POOLINGS.get(chosen[0]) if len(chosen) == 1 else None


def _module_names(raw: bytes) -> Sequence[str]:
    """The classes of the modules, without the packages they are in."""
    try:
        modules = parse_value(raw)
    except ValueError as error:
        _invalid(MODULES_FILE, f"it is not valid JSON: {error}")
    names = [module.get("type") if isinstance(module, dict) else None for module in _list(modules)]
    if not all(
        isinstance(name, str) and len(name) <= MAX_LABEL_CHARS and name.isprintable() for name in names
    ):
        _invalid(MODULES_FILE, "a module has a type")
    return [name.rpartition(".")[2] for name in names if name is not None]


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list) or len(value) > _MAX_MODULES:
        _invalid(MODULES_FILE, f"it is a list of at most {_MAX_MODULES} modules")
    return value


def _content(folder: Path, name: str) -> bytes | None:
    most = POOLED_FILE_BYTES[name]
    try:
        with open_regular(folder / name) as file:
            data = b"".join(iter(lambda: file.read(most + 1), b""))
    except (FileNotFoundError, NotADirectoryError):
        return None
    if len(data) > most:
        raise AdapterRefused("too_large", f"{name} has more than {most} bytes; leave it out.")
    return data


def _object(raw: bytes, name: str) -> dict[str, Any]:
    try:
        return parse_object(raw)
    except ValueError as error:
        _invalid(name, f"it is not valid JSON: {error}")


def _invalid(name: str, why: str) -> NoReturn:
    raise AdapterRefused("config_invalid", f"{name} cannot be used: {why}. Mend it, or leave it out.")
