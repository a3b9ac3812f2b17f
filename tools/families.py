"""Prints what becomes of each family of the installed transformers, by the tables that decide: `python -m
tools.families`. With `--write` the list goes into docs/models.md, between its marks."""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

from loraplex.adapters.errors import LoraplexError
from loraplex.engine.model.model_plan import ModelSettings, make_plan
from loraplex.kernels.torch_backend import torch_kernels

PAGE = Path(__file__).resolve().parents[1] / "docs/models.md"
MARKS = ("<!-- What tools/families.py prints. -->\n", "<!-- The end of it. -->\n")


def family_names() -> list[str]:
    """The model types for which transformers has a model that writes text."""
    writers = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return sorted({*writers, *modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES})


def default_configs() -> Iterator[tuple[str, dict[str, Any]]]:
    """(model type, config.json) of the families that have a default config."""
    for name in family_names():
        with suppress(StrictDataclassError):  # a draft's head, which has no sizes without its model
            yield name, json.loads(CONFIG_MAPPING[name]().to_json_string())


def verdicts() -> Iterator[tuple[str, str]]:
    """(model type, verdict) of each family. Encoders are left out."""
    kernels = torch_kernels(torch.device("cpu"), batch_invariant=False)
    with tempfile.TemporaryDirectory() as folder:
        for name, config in default_configs():
            if config.get("is_encoder_decoder") or config.get("is_decoder") is False:
                continue
            (Path(folder) / "config.json").write_text(json.dumps(config), "utf-8")
            try:
                plan = make_plan(Path(folder), ModelSettings(), kernels)
            except LoraplexError as error:
                yield name, f"refused: {_reason(name, error.message)}"
            else:
                how = "compared with it at the start" if plan.untested else "tested"
                yield name, "on the fused decoder" if plan.spec else f"through transformers, {how}"


def _reason(name: str, message: str) -> str:
    """What a refusal says of all families with this reason."""
    message = message.partition("; docs/models.md")[0]
    message = message.partition(" is not served: ")[2] or message
    message = re.sub(r" \(\w+: \w+\)$", "", message).removesuffix(f" ({name})")
    return re.sub(rf"\b{re.escape(name)}\b", "it", message)


def render() -> str:
    """The table of docs/models.md: the families of each verdict."""
    families: dict[str, list[str]] = {}
    for name, verdict in verdicts():
        families.setdefault(verdict, []).append(name)
    rows = (
        f"| {verdict} | {', '.join(f'`{name}`' for name in names)} |"
        for verdict, names in sorted(families.items(), key=_served_first)
    )
    head = f"| by transformers {version('transformers')} | `model_type` |"
    return "\n".join((head, "|---|---|", *rows)) + "\n"


def _served_first(row: tuple[str, list[str]]) -> tuple[bool, str]:
    return row[0].startswith("refused"), row[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    if not parser.parse_args().write:
        for name, verdict in verdicts():
            print(f"{name}: {verdict}")
        return
    page = PAGE.read_text("utf-8")
    before, _, rest = page.partition(MARKS[0])
    PAGE.write_text(before + MARKS[0] + render() + MARKS[1] + rest.partition(MARKS[1])[2], "utf-8")


if __name__ == "__main__":
    main()
