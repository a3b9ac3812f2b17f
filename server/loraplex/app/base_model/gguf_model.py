"""`python -m loraplex.app.base_model.gguf_model GGUF DIR [FOLDER]`: a model directory over a GGUF file.

The weights stay where they are: DIR gets a link to the file and the places of its tensors, beside config, tokenizer and
chat template of the file's metadata. Where FOLDER has one of these, FOLDER's is copied. A file without blocks of codes
is converted. Needs neither torch nor transformers.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from loraplex.adapters.admission.chat_files import MORE_TEMPLATES
from loraplex.adapters.base_weights.gguf import FILE, INDEX, PLAIN, tensor_bytes
from loraplex.adapters.base_weights.gguf_blocks import KINDS
from loraplex.adapters.store.files import shown
from loraplex.app.base_model.convert import (
    Weight,
    check_keys,
    convert,
    file_rope,
    model_config,
    model_weights,
    open_gguf,
)
from loraplex.app.base_model.gguf_families import FAMILIES, ModelKeys
from loraplex.app.base_model.gguf_file import GgufFile, GgufUnsupported, Metadata, run_limited
from loraplex.app.base_model.gguf_tokenizer import build_tokenizer, write_json, write_tokenizer
from loraplex.app.base_model.source import TOKENIZER_FILES


def make_model(gguf: Path, target: Path, folder: Path | None = None) -> None:
    """Write the new directory `target`. Raises GgufUnsupported, OSError."""
    reader, metadata = open_gguf(gguf)
    if all(tensor.tensor_type.name in PLAIN for tensor in reader.tensors):
        if folder is not None and any(
            (folder / name).is_file() for name in ("config.json", *TOKENIZER_FILES)
        ):
            raise GgufUnsupported(
                f"{gguf.name} is not quantised: give the model's safetensors, or the file without the others beside it"
            )
        convert(gguf, target)
        return
    keys = ModelKeys(metadata)
    own = None if folder is None else _own_config(folder, keys.architecture)
    if own is not None:
        _check_own(own, reader, metadata, keys)
    check_keys(metadata, model=own is None, tokenizer=not _has_tokenizer(folder))
    weights = model_weights(reader, metadata)
    index = {weight.name: _entry(weight) for weight in weights}
    kinds = sorted({entry["kind"] for entry in index.values()} - PLAIN.keys())
    config = model_config(reader, metadata) if own is None else own
    target.mkdir(parents=True)
    _write_texts(gguf, metadata, folder, target)
    write_json(
        target / "config.json", config | {"quantization_config": {"quant_method": "gguf", "kinds": kinds}}
    )
    (target / FILE).symlink_to(gguf.resolve())
    (target / INDEX).write_text(json.dumps(index))


def _entry(weight: Weight) -> dict[str, Any]:
    kind, shape, name = weight.stored.tensor_type.name, weight.shape, shown(weight.stored.name)
    if kind not in KINDS.keys() | PLAIN.keys():
        raise GgufUnsupported(f"the tensor {name} is {kind}: {', '.join((*KINDS, *PLAIN))} are served")
    if weight.heads is not None and kind in PLAIN:
        raise GgufUnsupported(
            f"the tensor {name} is {kind} in a quantised file: quantise it as the others are"
        )
    try:
        tensor_bytes(kind, tuple(shape))
    except ValueError as error:
        raise GgufUnsupported(f"the tensor {name}: {error}") from error
    return {"kind": kind, "shape": shape, "start": weight.stored.data_offset}


def _own_config(folder: Path, architecture: str) -> dict[str, Any] | None:
    path = folder / "config.json"
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise GgufUnsupported(f"{path} is no JSON: {error}") from error
    family = FAMILIES[architecture]
    if not isinstance(found, dict) or found.get("model_type") not in family.model_types:
        raise GgufUnsupported(f"{path} is not that of a {family.title}, as the GGUF file beside it is")
    return found


_SAME = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
}
"""Fields of config.json, and the keys that say the same: the codes of a file are read by them."""


def _check_own(own: dict[str, Any], reader: GgufFile, metadata: Metadata, keys: ModelKeys) -> None:
    """Raises GgufUnsupported for the config.json of another model than the file's."""
    for field, key in _SAME.items():
        theirs = keys.get(key)
        if theirs is not None and own.get(field, theirs) != theirs:
            raise GgufUnsupported(
                f"config.json has {field} {shown(own[field])}, and the file's {keys.key(key)} is {shown(theirs)}"
            )
    rope = own.get("rope_parameters") or own.get("rope_scaling") or {}
    rope = rope.get("full_attention", rope) if isinstance(rope, dict) else None
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else None
    if kind == "default" and file_rope(reader, metadata)["rope_type"] != kind:
        raise GgufUnsupported(
            f"config.json scales no rope, and the file does ({keys.key('rope.scaling.*')} or a tensor of factors): "
            "give the config.json of the model that the file was made of, or the file without it"
        )


def _has_tokenizer(folder: Path | None) -> bool:
    return folder is not None and (folder / "tokenizer.json").is_file()


def _write_texts(gguf: Path, metadata: Metadata, folder: Path | None, target: Path) -> None:
    """Write what belongs to texts: all of FOLDER's, where it has a tokenizer, else what the metadata say."""
    if folder is not None and _has_tokenizer(folder):
        for name in TOKENIZER_FILES:
            if (folder / name).is_file():
                shutil.copy(folder / name, target / name)
        if (folder / MORE_TEMPLATES).is_dir():
            shutil.copytree(folder / MORE_TEMPLATES, target / MORE_TEMPLATES)
        return
    try:
        tokenizer = build_tokenizer(metadata)
    except GgufUnsupported as error:
        raise GgufUnsupported(
            f"{error}: put the model's own tokenizer.json beside {gguf.name}, and give --model the folder"
        ) from error
    write_tokenizer(metadata, tokenizer, target)


if __name__ == "__main__":
    _file, _target, *_folders = map(Path, sys.argv[1:])
    sys.exit(run_limited(_file, lambda: make_model(_file, _target, *_folders)))
