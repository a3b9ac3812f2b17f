"""Rows of the embedding and of the head that an adapter replaces: PEFT's trainable_token_indices.

PEFT (`tuners/trainable_tokens`, `utils/other.py`) saves the rows themselves, not what they differ by. A list names rows
of the embedding; an object names them by module. Where the base ties its head to the embedding, the head has the
embedding's rows, unless the object names others for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from loraplex.adapters.admission.base_model import locate_module_weights
from loraplex.adapters.admission.module_names import ModuleNames, without_wrappers
from loraplex.adapters.admission.peft_support import is_neutral
from loraplex.adapters.admission.tensor_names import AdapterTensors
from loraplex.adapters.errors import AdapterRefused
from loraplex.adapters.spec import BaseSpec, SiteWeights, TensorSlice, TokenRows
from loraplex.adapters.store.files import shown
from loraplex.adapters.store.tensors import NUMPY_DTYPES, iter_rows, read_native
from loraplex.kernels.lora.site_groups import EMBEDDING, HEAD

MAX_TOKEN_ROWS = 1024
"""Rows that an adapter may replace in a module. Each step multiplies the head's with every sampled row."""
_FIELD = "trainable_token_indices"


def parse_token_indices(value: Any) -> dict[str, tuple[int, ...]]:
    """Token ids by the name of the module, as the config has it; a list's are of the embedding. Empty where the field
    asks for nothing. Raises AdapterRefused (config_invalid, too_large)."""
    if is_neutral(value):
        return {}
    by_name = {EMBEDDING: value} if isinstance(value, list) else value
    if not isinstance(by_name, dict) or len(by_name) > 2:
        _invalid("must be a list of token ids, or an object of such lists for the embedding and lm_head")
    return {without_wrappers(name): _ids(name, ids) for name, ids in by_name.items()}


def _ids(name: str, ids: Any) -> tuple[int, ...]:
    if not isinstance(ids, list) or not ids:
        _invalid(f"has no list of token ids for {shown(name)}")
    if len(ids) > MAX_TOKEN_ROWS:
        raise AdapterRefused(
            "too_large",
            f"adapter_config.json: {_FIELD} names {len(ids)} tokens for {shown(name)}; at most {MAX_TOKEN_ROWS} rows "
            "are replaced. Train the embedding by LoRA instead (embed_tokens can be a target, without DoRA and aLoRA)",
        )
    seen: set[int] = set()
    for token in ids:
        if type(token) is not int or token < 0:
            _invalid(f"must name token ids, not {shown(token)}")
        if token in seen:
            _invalid(
                f"names token {token} twice for {shown(name)}: which of its two rows counts is undefined"
            )
        seen.add(token)
    return tuple(ids)


def find_token_rows(
    found: AdapterTensors,
    indices: Mapping[str, tuple[int, ...]],
    base: BaseSpec,
    names: ModuleNames,
    *,
    tie: bool,
) -> tuple[TokenRows, ...]:
    """The tables of an adapter. `names` are those of its file, `tie` is its ensure_weight_tying. Raises
    AdapterRefused."""
    tensors = {names.in_base(module): rows for module, rows in found.token_rows.items()}
    adapted = frozenset(map(names.in_base, found.a))
    by_module = _by_module(indices, base, names)
    embedding = base.sites.get((0, EMBEDDING))
    embedding_path = "" if embedding is None else embedding.module_path
    both = base.tied_head and {embedding_path, HEAD} <= by_module.keys()
    if both and by_module[embedding_path] == by_module[HEAD]:
        del by_module[HEAD]
    elif both and tie:
        _invalid("names other tokens for lm_head than for the embedding, and ensure_weight_tying is set")
    copies = {HEAD} if base.tied_head and embedding_path in by_module else frozenset()
    for module in tensors:
        if module not in by_module and module not in copies:
            raise AdapterRefused(
                "unexpected_tensor",
                f"{shown(module, 160)} has trainable_tokens_delta, but {_FIELD} does not name its tokens",
            )
    tables = tuple(
        _table(module, ids, tensors, adapted, base, in_head=base.tied_head and HEAD not in by_module)
        for module, ids in by_module.items()
    )
    if any(table.in_head for table in tables) and f"{HEAD}.bias" in locate_module_weights(base):
        raise AdapterRefused(
            "unsupported_feature",
            f"adapter_config.json: {_FIELD} replaces rows of {HEAD}, which has a bias in this base; PEFT computes such "
            "a head without its bias, wherever the adapter is loaded",
            feature=_FIELD,
        )
    return tables


def _by_module(
    indices: Mapping[str, tuple[int, ...]], base: BaseSpec, names: ModuleNames
) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for name, ids in indices.items():
        shapes = [base.sites[key] for key in ((0, EMBEDDING), (0, HEAD)) if key in base.sites]
        own = names.in_base(name)
        # A list is of the embedding, whatever its name.
        path = next(
            (s.module_path for s in shapes if name == s.site or f".{s.module_path}".endswith(f".{own}")), None
        )
        if path is None or path in found:
            raise AdapterRefused(
                "unsupported_feature",
                f"adapter_config.json: {_FIELD} names {shown(name)}; rows are served of the embedding "
                f"({EMBEDDING}) and of {HEAD}, each named once",
                feature=_FIELD,
            )
        found[path] = ids
    return found


def _table(
    module: str,
    ids: tuple[int, ...],
    tensors: Mapping[str, TensorSlice],
    adapted: frozenset[str],
    base: BaseSpec,
    *,
    in_head: bool,
) -> TokenRows:
    rows = tensors.get(module)
    is_head = module == HEAD
    shape = base.sites[0, HEAD if is_head else EMBEDDING]
    vocab_size, hidden_size = (
        (shape.out_features, shape.in_features) if is_head else (shape.in_features, shape.out_features)
    )
    if rows is None:
        raise AdapterRefused(
            "missing_tensor", f"{_FIELD} names tokens of {module}, but no trainable_tokens_delta came for it"
        )
    if module in adapted:
        raise AdapterRefused(
            "unsupported_feature",
            f"{module} has both LoRA and rows of {_FIELD}, which PEFT refuses too: take one of the two",
            feature=_FIELD,
        )
    if rows.dtype not in NUMPY_DTYPES:
        raise AdapterRefused(
            "unsupported_feature",
            f"{module}.trainable_tokens_delta is stored as {rows.dtype}; accepted are {', '.join(NUMPY_DTYPES)}",
            feature=f"dtype_{rows.dtype}",
        )
    if rows.shape != (len(ids), hidden_size):
        raise AdapterRefused(
            "shape_mismatch",
            f"{module}: trainable_tokens_delta is {list(rows.shape)}, not a row of {hidden_size} for each of the "
            f"{len(ids)} tokens that the config names",
        )
    if max(ids) >= vocab_size:
        raise AdapterRefused(
            "base_mismatch",
            f"{_FIELD} names token {max(ids)}, but {module} has {vocab_size} rows: the vocabulary of the base was "
            "enlarged for the training",
        )
    return TokenRows(module, ids, rows, in_embedding=not is_head, in_head=is_head or in_head)


def check_tied_rows(
    tensors_path: Path, found: AdapterTensors, tables: tuple[TokenRows, ...], names: ModuleNames
) -> None:
    """Check the rows of a tied head. PEFT saves those of an embedding a second time, as the tied head's, where it
    saves the embedding itself too. Raises AdapterRefused("unexpected_tensor") where the two differ."""
    shared = next((table for table in tables if table.in_embedding and table.in_head), None)
    copy = next((rows for module, rows in found.token_rows.items() if names.in_base(module) == HEAD), None)
    if shared is None or copy is None:
        return
    is_equal = (copy.dtype, copy.shape) == (shared.rows.dtype, shared.rows.shape) and all(
        np.array_equal(ours.view(np.uint8), theirs.view(np.uint8))
        for ours, theirs in zip(
            iter_rows(tensors_path, shared.rows), iter_rows(tensors_path, copy), strict=True
        )
    )
    if not is_equal:
        raise AdapterRefused(
            "unexpected_tensor",
            f"the base ties {HEAD} to its embedding, and the file holds other rows of {_FIELD} for {HEAD} than for "
            f"{shared.module_path}: which of them were trained is undefined. Save the trained model again, with "
            "save_embedding_layers=False",
        )


def check_finite_rows(tensors_path: Path, tables: tuple[TokenRows, ...]) -> None:
    """Raises AdapterRefused("non_finite")."""
    for table in tables:
        for rows in iter_rows(tensors_path, table.rows):
            with np.errstate(all="ignore"):
                exact = rows.astype(np.float32)
            if not np.isfinite(exact).all():
                raise AdapterRefused(
                    "non_finite",
                    f"{table.module_path}.trainable_tokens_delta holds NaN or infinite values",
                )


def check_tied_head(tensors_path: Path, sites: tuple[SiteWeights, ...]) -> None:
    """PEFT saves the adapter of an embedding twice where ensure_weight_tying has it adapt the head too, and would take
    the head's copy for both. Raises AdapterRefused("unexpected_tensor") where they differ."""
    by_site = {site.site: site for site in sites}
    embedding, head = by_site[EMBEDDING], by_site[HEAD]
    a = read_native(tensors_path, embedding.a)
    b = read_native(tensors_path, embedding.b)
    first = 0
    is_equal = embedding.scaling == head.scaling and np.array_equal(read_native(tensors_path, head.a), b.T)
    for rows in iter_rows(tensors_path, head.b) if is_equal else ():
        is_equal = is_equal and np.array_equal(rows, a[:, first : first + len(rows)].T)
        first += len(rows)
    if not is_equal:
        raise AdapterRefused(
            "unexpected_tensor",
            "ensure_weight_tying gives lm_head the embedding's adapter, but the file holds another one for lm_head",
        )


def _invalid(what: str) -> NoReturn:
    raise AdapterRefused("config_invalid", f"adapter_config.json: {_FIELD} {what}")
