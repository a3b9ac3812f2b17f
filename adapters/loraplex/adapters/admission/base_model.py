"""The facts about the base model that admission needs, read from its checkpoint without torch."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loraplex.adapters.admission.base_families import (
    ANSWER_FILE,
    NO_SITES,
    ROUTED,
    not_served,
    obstacle_of,
    text_fields,
)
from loraplex.adapters.admission.model_parts import LAYER_LISTS, ModelParts, parts_of
from loraplex.adapters.admission.safetensors_header import CHECKPOINT_LIMITS, read_header
from loraplex.adapters.base_weights.fingerprint import base_fingerprint
from loraplex.adapters.base_weights.gguf import FILE, is_indexed, read_index
from loraplex.adapters.base_weights.grouped import NotFinite, quantise_int8
from loraplex.adapters.base_weights.schemes import StoredLinears, read_linears
from loraplex.adapters.base_weights.tensors import QuantisedTensors
from loraplex.adapters.errors import AdapterRefused, BaseModelInvalid
from loraplex.adapters.expert_shapes import Columns, find_experts, split_stack
from loraplex.adapters.spec import BaseSpec, SiteShape, TensorSlice
from loraplex.adapters.store.tensors import NUMPY_DTYPES, iter_rows, read_native
from loraplex.kernels.lora.site_groups import (
    ATTENTION_OUT,
    EMBEDDING,
    EMBEDDING_NAMES,
    FLOAT_SITES,
    HEAD,
    LAYER_SITES,
    MODEL_PROJECTION,
    ROUTED_SITES,
    SITES,
)

_SITE_NAME = re.compile(
    rf"((?:.*\.)?)(?:{'|'.join(LAYER_LISTS)})\.(\d+)\.(?:.*\.)?({'|'.join(LAYER_SITES)})|(?:.*\.)?({MODEL_PROJECTION})"
)
_ATTENTION_OUT = ".attn.c_proj"
"""The end of a path whose leaf the feed-forward has too: StarCoder's and GPT-2's."""
_HEAD_NAME = f"{HEAD}.weight"
_FLOATS = FLOAT_SITES | {EMBEDDING}
"""Sites whose weights the engine keeps in its dtype."""
_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class BaseTensor:
    """Where a tensor of the checkpoint lies, and its name there."""

    path: Path
    tensor: TensorSlice
    stored_name: str
    is_part: bool = False
    """Whether that is the name of a stack that it lies in."""
    columns: Columns | None = None
    """Those that it is made of, where it lies in a matrix with others."""

    def read(self) -> NDArray[Any]:
        """The values of one of NUMPY_DTYPES. Raises as `read_native` does."""
        if self.columns is None:
            return read_native(self.path, self.tensor)
        (rows, inputs), step = self.tensor.shape, self.columns.step
        whole = read_native(self.path, replace(self.tensor, shape=(inputs, rows * step)))
        return self.columns.take(whole, self.tensor.shape)


def load_base_spec(model_dir: Path, *, cache_dir: Path | None = None, quantise: str = "none") -> BaseSpec:
    """Read `config.json` and the safetensors headers (one file, or shards with their index) of a checkpoint.

    A site is a 2-D tensor "<prefix>layers.<i>.<path>.<leaf>.weight" ([out_features, in_features]) whose leaf is
    one of LAYER_SITES, with i below num_hidden_layers (`find_sites`); or the head: "lm_head.weight", or the embedding
    where the base ties the head to it; or the embedding itself, of the language part, by one of EMBEDDING_NAMES. An
    adapter for what is no site is refused. The fingerprint hashes every weight byte; with `cache_dir` it is kept there,
    keyed by the files' paths, sizes and times of change. `quantise` as in BaseSpec. Raises BaseModelInvalid.
    """
    raw = _read_json(model_dir / "config.json")
    config, parts = text_fields(raw), parts_of(raw.get("model_type"))
    if obstacle := obstacle_of(raw):
        raise BaseModelInvalid(f"{obstacle} ({model_dir})")
    model_type: str = config["model_type"]
    num_layers = config.get(parts.layer_count, config.get("num_hidden_layers"))
    if num_layers is None and parts.others:
        num_layers = _count_layers(locate_tensors(model_dir), parts)
    if type(num_layers) is not int or num_layers < 1:
        raise BaseModelInvalid(
            f"{model_type} is not served: num_hidden_layers in {model_dir / 'config.json'} is {num_layers!a}"
        )
    located = locate_tensors(model_dir)
    tensors = {
        name: entry
        for name, entry in located.items()
        if parts.part_of(name) is None and not name.startswith(parts.unread)
    }
    stored = stored_scheme(config, tensors)
    linears = {name.removesuffix(".weight"): shape for name, shape in _linear_shapes(tensors, stored).items()}
    if parts.transposed:
        linears = {name: shape[::-1] for name, shape in linears.items()}
    sites = find_sites(linears, num_layers, routers=raw["model_type"] in ROUTED)
    sites = _without_shared(sites, config, num_layers)
    if not sites:
        raise BaseModelInvalid(not_served(model_type, NO_SITES))
    if not (model_dir / ANSWER_FILE).is_file():  # a reranker's scores are of the rows of its own lm_head
        sites |= _find_head(_linear_shapes(_with_tied_head(tensors, config), stored))
        sites |= _find_embedding(tensors)
    try:
        fingerprint = base_fingerprint(model_dir, config, located, cache_dir)
    except OSError as error:
        raise BaseModelInvalid(f"cannot read the weights in {model_dir}: {error}") from error
    return BaseSpec(
        fingerprint=fingerprint,
        model_type=model_type,
        num_layers=num_layers,
        sites=sites,
        model_dir=str(model_dir),
        tied_head=_is_tied(tensors, config),
        quantise=quantise,
        stored="" if stored is None else stored.scheme.name,
        multimodal=raw["model_type"] if parts.others else "",
        experts=find_experts(
            linears,
            {name: entry.tensor.shape for name, entry in tensors.items()},
            num_layers,
            in_turns=parts.experts_in_turns,
        ),
    )


class BaseWeights:
    """The base's linears in its checkpoint, for what is computed from them later. The files must stay as they are
    now: weights on the device don't change with them."""

    def __init__(self, base: BaseSpec) -> None:
        """Reads the headers. Raises BaseModelInvalid."""
        self._base = base
        self._tensors = locate_module_weights(base)
        self._stored = stored_scheme(read_text_config(Path(base.model_dir)), self._tensors)
        self._stamps = {entry.path: _stamp(entry.path) for entry in self._tensors.values()}

    def rows(self, layer: int, site: str, served: np.dtype[Any]) -> Iterator[NDArray[np.float32]]:
        """The weight's rows [n, in_features] as the engine multiplies them, some at a time: rounded to the dtype that
        is served, or what their codes stand for. Raises BaseModelInvalid where the checkpoint has no such site, the
        file was changed or a weight is not finite; OSError."""
        module, stored = _site_of(self._base, layer, site).module_path, self._stored
        floats: Iterator[NDArray[Any]]
        if stored is not None and module in stored.modules:
            for name in stored.names(module):
                self._check_unchanged(self._tensors[name].path)
            if stored.are_codes and site not in _FLOATS:
                yield from stored.dense_rows(module)
                return
            floats = stored.dense_rows(module)
        else:
            found = _weight_of(self._base, self._tensors, layer, site)
            self._check_unchanged(found.path)
            floats = iter_rows(found.path, found.tensor)
            if site in LAYER_SITES and parts_of(self._base.model_type).transposed:
                floats = iter((np.concatenate([*floats]).T,))
        for rows in floats:
            # Rows of the embedding are looked up, not multiplied, and gates stay as they are.
            if self._base.quantise == "none" or site in _FLOATS:
                yield rows.astype(served, copy=False).astype(np.float32)
                continue
            try:
                yield quantise_int8(rows).dense()
            except NotFinite as error:
                raise BaseModelInvalid(f"{site} of layer {layer}: {error}") from error

    def bias(self, layer: int, site: str) -> NDArray[Any] | None:
        """[out_features], None where the linear has none. Raises as `rows` does."""
        shape = self._base.sites[layer, site]
        found = self._tensors.get(f"{shape.module_path}.bias")
        if found is None:
            return None
        if found.tensor.shape != (shape.out_features,) or found.tensor.dtype not in NUMPY_DTYPES:
            raise BaseModelInvalid(
                f"the bias of {shape.module_path} is not {shape.out_features} plain floats"
            )
        self._check_unchanged(found.path)
        return read_native(found.path, found.tensor)

    def _check_unchanged(self, path: Path) -> None:
        if _stamp(path) != self._stamps[path]:
            raise BaseModelInvalid(
                f"{path} was changed after the engine had loaded it; put it back, or restart the server"
            )


def locate_module_weights(base: BaseSpec) -> dict[str, BaseTensor]:
    """Tensors of `locate_tensors`, and "lm_head.weight" if the base ties it to its embedding. Raises
    BaseModelInvalid."""
    model_dir = Path(base.model_dir)
    return _with_tied_head(locate_tensors(model_dir), read_text_config(model_dir))


def locate_tensors(model_dir: Path) -> dict[str, BaseTensor]:
    """Every tensor of the checkpoint by the name that transformers gives it, those of experts each alone. Raises
    BaseModelInvalid."""
    located: dict[str, BaseTensor] = {}
    parts = parts_of(_read_json(model_dir / "config.json").get("model_type"))
    if is_indexed(model_dir):
        path = (model_dir / FILE).resolve()
        try:
            return {name: BaseTensor(path, tensor, name) for name, tensor in read_index(model_dir).items()}
        except OSError as error:
            raise BaseModelInvalid(f"cannot read {path}: {error}") from error
    for path in _weight_files(model_dir):
        try:
            header = read_header(path, CHECKPOINT_LIMITS)
        except (AdapterRefused, OSError) as error:
            raise BaseModelInvalid(f"cannot read {path}: {error}") from error
        for stored, tensor in header.items():
            of_experts = split_stack(
                parts.module_name(stored), tensor, parts.expert_linears, in_turns=parts.experts_in_turns
            )
            for name, part, columns in of_experts:
                if name in located:
                    raise BaseModelInvalid(f"{path} and {located[name].path} both hold {name}")
                located[name] = BaseTensor(path, part, stored, part is not tensor, columns)
    return located


def is_of_expert(name: str) -> bool:
    """Whether a tensor or module belongs to a routed expert of a mixture. One that all tokens go through is none."""
    return "experts" in name.split(".")


def _with_tied_head(tensors: Mapping[str, BaseTensor], config: Mapping[str, Any]) -> dict[str, BaseTensor]:
    located = dict(tensors)
    if _HEAD_NAME not in located and _is_tied(located, config):
        tied = next((name for name in located if f".{name}".endswith(f".{EMBEDDING}.weight")), None)
        if tied is not None:
            located[_HEAD_NAME] = located[tied]
    return located


def _is_tied(tensors: Mapping[str, BaseTensor], config: Mapping[str, Any]) -> bool:
    # Some families tie it unless the config says no.
    tie = config.get("tie_word_embeddings", config.get("tie_embedding"))  # the last is LFM2's
    return tie is True or (tie is not False and _HEAD_NAME not in tensors)


def _site_of(base: BaseSpec, layer: int, site: str) -> SiteShape:
    found = base.sites.get((layer, site))
    if found is None:
        raise BaseModelInvalid(f"the base in {base.model_dir} has no {site} in layer {layer}")
    return found


def _weight_of(base: BaseSpec, tensors: Mapping[str, BaseTensor], layer: int, site: str) -> BaseTensor:
    found = tensors.get(f"{_site_of(base, layer, site).module_path}.weight")
    if found is None:
        raise BaseModelInvalid(f"the base in {base.model_dir} has no weight for {site} in layer {layer}")
    if found.tensor.dtype not in NUMPY_DTYPES:
        raise BaseModelInvalid(
            f"{site} of layer {layer} is stored as {found.tensor.dtype}, not as plain floats"
        )
    return found


def _stamp(path: Path) -> tuple[int, int, int]:
    stat = path.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _weight_files(model_dir: Path) -> list[Path]:
    single, index = model_dir / _SINGLE_FILE, model_dir / _INDEX_FILE
    if single.is_file():
        return [single.resolve()]  # model caches keep links to content-addressed files
    if not index.is_file():
        raise BaseModelInvalid(f"{model_dir} holds neither {_SINGLE_FILE} nor {_INDEX_FILE}")
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BaseModelInvalid(f"{index} has no weight_map")
    names = {str(name) for name in weight_map.values()}
    if any("/" in name or name in ("", ".", "..") for name in names):
        raise BaseModelInvalid(f"{index} names files outside its own directory")
    return [(model_dir / name).resolve() for name in sorted(names)]


def find_sites(
    linears: Mapping[str, tuple[int, int]], num_layers: int, *, routers: bool
) -> dict[tuple[int, str], SiteShape]:
    """The sites in the layers of a model, of its linears' [out_features, in_features] by path; `routers`: those of
    experts, and gates of shared ones, among them. Routed experts have none, and where a layer has several linears of
    one leaf, none of them is one. A site may have other sizes in other layers, and be missing in some. Of several lists
    of layers the one with most linears counts: some checkpoints have layers beside those of the model, which predict
    further tokens ("mtp")."""
    listed: dict[str | None, list[SiteShape]] = {}
    for path, (out_features, in_features) in linears.items():
        match = _SITE_NAME.fullmatch(path)
        layer = int(match[2] or 0) if match else 0
        if (
            match
            and layer < num_layers
            and not is_of_expert(path)
            and (routers or match[3] not in ROUTED_SITES)
        ):
            leaf = ATTENTION_OUT if path.endswith(_ATTENTION_OUT) else match[3] or match[4]
            site = SiteShape(layer, leaf, in_features, out_features, path)
            listed.setdefault(match[1], []).append(site)
    most = max((len(sites) for before, sites in listed.items() if before is not None), default=0)
    found = [
        site for before, sites in listed.items() if before is None or len(sites) == most for site in sites
    ]
    claims = Counter((site.layer, site.site) for site in found)
    unique = (site for site in found if claims[site.layer, site.site] == 1)
    return {(s.layer, s.site): s for s in sorted(unique, key=lambda s: (s.layer, SITES.index(s.site)))}


def _without_shared(
    sites: Mapping[tuple[int, str], SiteShape], config: Mapping[str, Any], num_layers: int
) -> dict[tuple[int, str], SiteShape]:
    """The sites without keys and values of the last layers that read those of an earlier one: a checkpoint may have
    their tensors, transformers makes no modules of them."""
    shared = config.get("num_kv_shared_layers")
    own = num_layers - shared if type(shared) is int else num_layers
    return {
        (layer, site): shape
        for (layer, site), shape in sites.items()
        if layer < own or site not in ("k_proj", "v_proj")
    }


def _count_layers(names: Iterable[str], parts: ModelParts) -> int:
    """The text part of a multimodal model may leave out of config.json what its type has by default."""
    layer = re.compile(rf"model\.{parts.decoder}\.layers\.(\d{{1,6}})\.")
    numbers = (match[1] for name in names if (match := layer.match(name)))
    return max(map(int, numbers), default=-1) + 1


def _find_head(linears: Mapping[str, tuple[int, int]]) -> dict[tuple[int, str], SiteShape]:
    shape = linears.get(_HEAD_NAME)
    if shape is None:
        return {}
    out_features, in_features = shape
    return {(0, HEAD): SiteShape(0, HEAD, in_features, out_features, HEAD)}


def _find_embedding(tensors: Mapping[str, BaseTensor]) -> dict[tuple[int, str], SiteShape]:
    found = [
        name
        for name in tensors
        if name.removesuffix(".weight").rpartition(".")[2] in EMBEDDING_NAMES
        and len(tensors[name].tensor.shape) == 2
    ]
    if len(found) != 1:
        return {}
    (name,) = found
    vocab_size, hidden_size = tensors[name].tensor.shape
    path = name.removesuffix(".weight")
    return {(0, EMBEDDING): SiteShape(0, EMBEDDING, vocab_size, hidden_size, path)}


def _linear_shapes(
    tensors: Mapping[str, BaseTensor], stored: StoredLinears | None
) -> dict[str, tuple[int, int]]:
    """[out_features, in_features] of each matrix "….weight", as stored or as codes."""
    codes = (
        {}
        if stored is None
        else {f"{module}.weight": stored.shape(module) for module in sorted(stored.modules)}
    )
    plain = {
        name: (entry.tensor.shape[0], entry.tensor.shape[1])
        for name, entry in tensors.items()
        if name.endswith(".weight") and len(entry.tensor.shape) == 2
    }
    return plain | codes


def stored_scheme(config: Mapping[str, Any], tensors: Mapping[str, BaseTensor]) -> StoredLinears | None:
    """The quantised linears of a checkpoint; None where it has none. `config` is what `text_fields` gives. Raises
    BaseModelInvalid."""
    return read_linears(config, QuantisedTensors(tensors))


def read_text_config(model_dir: Path) -> dict[str, Any]:
    """The config.json of a checkpoint, as `text_fields` gives it. Raises BaseModelInvalid."""
    return text_fields(_read_json(model_dir / "config.json"))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise BaseModelInvalid(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise BaseModelInvalid(f"{path} is not a JSON object")
    return value
