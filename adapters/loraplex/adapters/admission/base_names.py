"""The names that a base model goes by: whether an adapter's `base_model_name_or_path` means the one that is served.

The same weights are on hubs under many names: of other organisations, quantised for training (QLoRA), in other formats,
and as paths of caches. A path is only read as text here.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from loraplex.adapters.spec import BaseSpec

_MAX_NAME = 200
_BETWEEN_WORDS = re.compile(r"[-_\s]+|\.(?!\d)|(?<!\d)\.")
"""A dot inside a number is none."""
_FORMAT = re.compile(
    r"bnb|nf4|fp4|fp8|mxfp[48]|nvfp4|bf16|fp16|f16|fp32|f32|int[2348]|uint[48]|[234568]bits?"
    r"|gptq|awq|gguf|ggml|exl[23]|eetq|hqq|aqlm|autoround|marlin|quantized|quanto|torchao|mlx|unsloth"
    r"|w[48]a(?:4|8|16)|g(?:32|64|128)|(?:32|64|128)g|dynamic|i?q[1-8]|safetensors|hf"
)
"""Words at the end of a name that say how its weights are stored, and by whom they were made so."""
_BITS = frozenset({"2", "3", "4", "5", "6", "8"})
_GGUF_KIND = re.compile(r"i?q[1-8]")
_GGUF_ENDS = frozenset({"k", "0", "1", "s", "m", "l", "xs", "xxs", "nl", "xl"})
"""Words behind the Q in the names of llama.cpp's kinds: Q4_K_M, Q8_0."""


def names_base(name: str, base: BaseSpec) -> bool:
    """Whether a model's name or path means this base, or a copy of it that is stored in another form."""
    return plain_name(name) in _names_of(base)


def plain_name(name: str) -> str:
    """The name without organisation, folders, case, and what says how the weights are stored: "qwen2.5-7b-instruct" of
    "unsloth/Qwen2.5-7B-Instruct-bnb-4bit". Empty for what is longer than any name."""
    # Meta's repositories were renamed.
    return "-".join(_split(name)[0]).removeprefix("meta-")


def format_words(name: str) -> tuple[str, ...]:
    """The words at the end of a name that say how the weights are stored: ("bnb", "4bit"). None for what is longer than
    any name."""
    return tuple(_split(name)[1])


def is_same_copy(name: str, base: BaseSpec) -> bool:
    """Whether a name has the last part of the served directory's: the same model in the same form."""
    return _last_part(name).lower() == _last_part(base.model_dir).lower()


def _split(name: str) -> tuple[list[str], list[str]]:
    """The words of a name's last part, and those behind them that say how the weights are stored."""
    last = _last_part(name)
    if len(last) > _MAX_NAME:
        return [], []
    # ModelScope's cache writes a dot so.
    words = [word for word in _BETWEEN_WORDS.split(last.lower().replace("___", ".")) if word]
    plain = words
    while len(plain) > 1:
        kept = _without_format(plain)
        if len(kept) == len(plain):
            break
        plain = kept
    return plain, words[len(plain) :]


def _without_format(words: list[str]) -> list[str]:
    """The words without the last one that says how weights are stored; all where there is none."""
    if _FORMAT.fullmatch(words[-1]):
        return words[:-1]
    if words[-1] in ("bit", "bits") and words[-2] in _BITS:
        return words[:-2]
    for count in range(2, min(4, len(words))):
        *before, kind = words[: 1 - count]
        if before and _GGUF_KIND.fullmatch(kind) and _GGUF_ENDS.issuperset(words[1 - count :]):
            return before
    return words


def _last_part(name: str) -> str:
    parts = [part for part in name.replace("\\", "/").split("/") if part not in ("", ".")]
    for place, part in enumerate(parts):
        if part.startswith("models--") and (place == len(parts) - 1 or parts[place + 1] == "snapshots"):
            return part.split("--", 2)[-1]
    return parts[-1] if parts else ""


def _names_of(base: BaseSpec) -> frozenset[str]:
    """The plain names of its directory, and those that its config has."""
    try:
        config = json.loads((Path(base.model_dir) / "config.json").read_bytes())
    except (OSError, ValueError):
        config = {}
    own = (
        [config.get(field) for field in ("_name_or_path", "_model_name_or_path")]
        if isinstance(config, dict)
        else []
    )
    names = [base.model_dir, *own]
    return frozenset(plain for name in names if isinstance(name, str) and (plain := plain_name(name)))
