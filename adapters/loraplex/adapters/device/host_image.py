"""Adapters in host memory, laid out as they will lie on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from loraplex.adapters.admission.base_model import BaseWeights
from loraplex.adapters.device.dora import dora_vectors
from loraplex.adapters.device.elements import Elements, all_finite
from loraplex.adapters.device.expert_image import (
    ExpertWriter,
    check_experts_fit,
    examine_experts,
    expert_tensors,
)
from loraplex.adapters.device.expert_tiles import ExpertKey
from loraplex.adapters.device.host_slab import HostPages, loose_pages
from loraplex.adapters.device.layout import IN_FLOAT32, ArenaLayout, TileKind
from loraplex.adapters.device.placement import HEAD_LAYER, Piece, Placement, place
from loraplex.adapters.errors import AdapterRefused, ArtifactCorrupt, LoadAbandoned
from loraplex.adapters.spec import AdapterSpec, TensorSlice, TokenRows
from loraplex.adapters.store.tensors import NUMPY_DTYPES, read_tensor, scan_tensors
from loraplex.kernels.lora.dispatch import CHUNK
from loraplex.kernels.lora.site_groups import EMBEDDING, HEAD

IN_EMBEDDING, IN_HEAD = 1, 2
_DTYPE_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True, slots=True, eq=False)
class HostImage:
    """One adapter, ready to be copied page by page.

    `memory` holds its pages, in order; it goes back with `release`. `sites` int32 [n, 5] has a row for
    each chunk of each site that the adapter has: layer, number of the site, chunk, and where its A and its B tile
    begin, in granules from the start of the image. `vectors` int32 [m, 3] has one for each site with vectors: layer,
    number, and where they begin. The head's blocks stand in both as sites of layer HEAD_LAYER, numbered by
    themselves; their A tile is the same.

    `rows` int32 [k, 3] has one for each tile of the embedding: kind, number, and where it begins. Kind 0 is A, from
    token `number` on; 1 is B, of chunk `number`; 2 are replaced rows, from row `number` on; 3 is the row of label
    `number` of a classifier's head, float32 [hidden size + 1] with its bias at the end. `tokens` int32 [n, 2] has
    the token id of each replaced row, and what it replaces a row of: IN_EMBEDDING, IN_HEAD or both.

    `experts` int32 [e, 6] has one for each chunk of each routed expert that the adapter has: layer, number of the site
    in `ArenaLayout.experts`, expert, chunk, and where its A and its B tile begin; experts may share them. `heights`
    int32 [h, 3]: layer, number, and the ranks of a tile there.

    Vectors are made from the base's weights too, so an image belongs to a digest, a layout and a base together. It
    never outlives its process, which has one of each base and layout.
    """

    digest: str
    rank: int
    memory: HostPages
    sites: NDArray[np.int32]
    vectors: NDArray[np.int32] = field(default_factory=lambda: np.empty((0, 3), np.int32))
    rows: NDArray[np.int32] = field(default_factory=lambda: np.empty((0, 3), np.int32))
    tokens: NDArray[np.int32] = field(default_factory=lambda: np.empty((0, 2), np.int32))
    experts: NDArray[np.int32] = field(default_factory=lambda: np.empty((0, 6), np.int32))
    heights: NDArray[np.int32] = field(default_factory=lambda: np.empty((0, 3), np.int32))

    @property
    def num_pages(self) -> int:
        return self.memory.num_pages

    @property
    def num_bytes(self) -> int:
        return self.memory.num_bytes

    def release(self) -> None:
        """Give its memory back. Once, when nothing reads it any more."""
        self.memory.release()


def build_image(
    spec: AdapterSpec,
    tensors_path: Path,
    layout: ArenaLayout,
    *,
    base: BaseWeights | None = None,
    memory: Callable[[int], HostPages] | None = None,
    wanted: Callable[[], bool] = lambda: True,
    feed: Callable[[memoryview], object] = lambda _: None,
) -> HostImage:
    """Read an adapter's tensors and lay them out.

    The scaling, and DoRA's gain, are folded into B in float32; A and B are rounded once, to the layout's dtype. Ranks
    are filled up to whole chunks with zeros. DoRA needs `base`, whose weights are read in slices. Holds the largest
    tensor, or for DoRA one site's in float32, beside the image. `wanted` is called before each matrix; if it returns
    False, LoadAbandoned is raised. `feed` gets every byte of the file, in order and before it is used, so that a caller
    can hash the file without a second read; one on experts is read once more before that. `memory` gives that number of
    pages; None: torch's allocator does. They are given back where this raises.

    Raises ArtifactCorrupt where the adapter does not fit the layout, AdapterRefused("non_finite") where a value is not
    finite in its dtype, BaseModelInvalid where the base's weights can't be read as they were, OSError.
    """
    _check_fits(spec, layout)
    experts: tuple[ExpertKey, ...] = ()
    if layout.experts is not None and spec.experts:
        experts = examine_experts(spec, tensors_path, layout.experts, lambda: _check_wanted(wanted))
    placement = place(spec, layout, experts)
    if not placement.num_pages:
        raise ArtifactCorrupt("the adapter changes nothing")
    pages = memory(placement.num_pages) if memory else loose_pages(placement.num_pages, layout.page_bytes)
    try:
        _fill(_Image(spec, layout, placement, pages), spec, tensors_path, base, wanted, feed)
    except BaseException:
        pages.release()
        raise
    return HostImage(
        spec.digest,
        spec.rank,
        pages,
        placement.sites,
        placement.vectors,
        placement.rows,
        _token_table(spec.tokens),
        placement.experts.tiles,
        placement.experts.heights,
    )


def _token_table(tables: Sequence[TokenRows]) -> NDArray[np.int32]:
    """See `HostImage.tokens`."""
    rows = [
        (token, IN_EMBEDDING * table.in_embedding + IN_HEAD * table.in_head)
        for table in tables
        for token in table.ids
    ]
    return np.array(rows, np.int32).reshape(-1, 2)


def _fill(
    image: _Image,
    spec: AdapterSpec,
    tensors_path: Path,
    base: BaseWeights | None,
    wanted: Callable[[], bool],
    feed: Callable[[memoryview], object],
) -> None:
    puts: dict[int, tuple[TensorSlice, Callable[[NDArray[Any]], None]]] = {}
    for index, site in enumerate(spec.sites):
        if site.magnitude is None:
            puts[site.a.start] = site.a, partial(image.put, index, "a")
            puts[site.b.start] = site.b, partial(image.put, index, "b")
    first = 0
    for table in spec.tokens:
        puts[table.rows.start] = table.rows, partial(image.put_token_rows, first)
        first += len(table.ids)
    if spec.head is not None:
        for tensor in filter(None, (spec.head.weight, spec.head.bias)):
            puts[tensor.start] = tensor, image.put_head
    for start, found in expert_tensors(spec).items():
        puts[start] = found.tensor, partial(image.experts.put, found)
    # What is not finite is found and refused at the end.
    with np.errstate(over="ignore", invalid="ignore"):
        for tensor, values in scan_tensors(tensors_path, [tensor for tensor, _ in puts.values()], feed):
            _check_wanted(wanted)
            _, put = puts[tensor.start]
            put(values)
        for index, site in enumerate(spec.sites):
            if site.magnitude is not None:
                _check_wanted(wanted)
                image.put_dora(index, site.magnitude, tensors_path, base)
    image.check_finite()


class _Image:
    """An image on its way: matrices are cut into tiles and rounded. With numpy alone: torch would start a team of
    threads of its own for a loader thread, beside the step's."""

    def __init__(
        self, spec: AdapterSpec, layout: ArenaLayout, placement: Placement, pages: HostPages
    ) -> None:
        self._spec = spec
        self._pieces = placement.pieces
        self._width = layout.hidden_size or 0
        self._dtype = NUMPY_DTYPES[_DTYPE_NAMES[layout.dtype]]
        each = [page for run in pages.runs for page in run.numpy()]
        self._rounded = Elements(each, self._dtype)
        self._exact = Elements(each, np.dtype(np.float32))
        self.experts = ExpertWriter(placement.experts, self._rounded)
        plain_bytes = Elements(each, np.dtype(np.uint8))
        for nobodys in placement.fillers:
            plain_bytes[nobodys][...] = 0
        for piece in self._head_pieces:
            self._exact[piece.elements][...] = 0

    def put(self, index: int, kind: Literal["a", "b"], values: NDArray[Any]) -> None:
        """A [rank, in_features] or B [out_features, rank] of the site with this index, in any dtype."""
        if kind == "a":
            same = values.dtype == self._dtype
            exact = values if same else values.astype(np.float32, copy=False)
            if self._spec.sites[index].site == EMBEDDING:
                self._put_token_ranks(index, exact)
            else:
                self._cut(index, "a", exact, self._rounded)
        else:
            scaled = values.astype(np.float32, copy=False) * np.float32(self._spec.sites[index].scaling)
            self._put_b(index, scaled)

    def put_token_rows(self, first: int, values: NDArray[Any]) -> None:
        """Rows [n, C] that replace the base's, from number `first` on."""
        exact = values if values.dtype == self._dtype else values.astype(np.float32, copy=False)
        for piece in self._pieces[len(self._spec.sites), "token_rows"]:
            start, end = max(piece.rows.start, first), min(piece.rows.stop, first + len(exact))
            if start < end:
                tile = self._rounded[piece.elements].reshape(-1, piece.stride)
                own = tile[start - piece.rows.start : end - piece.rows.start]
                own[:, : exact.shape[1]] = exact[start - first : end - first]
                own[:, exact.shape[1] :] = 0

    @property
    def _head_pieces(self) -> tuple[Piece, ...]:
        return self._pieces.get((len(self._spec.sites) + bool(self._spec.tokens), "head_rows"), ())

    def put_head(self, values: NDArray[Any]) -> None:
        """The weight [labels, C] of a head, or its bias [labels]."""
        exact = values.astype(np.float32, copy=False)
        width = self._width
        for piece in self._head_pieces:
            tile = self._exact[piece.elements].reshape(-1, piece.stride)
            if exact.ndim == 1:
                tile[:, width] = exact[piece.rows]
            else:
                tile[:, :width] = exact[piece.rows]

    def _put_token_ranks(self, index: int, a: NDArray[Any]) -> None:
        """A [rank, V] of the embedding."""
        for piece in self._pieces[index, "token_ranks"]:
            tile = self._rounded[piece.elements].reshape(-1, piece.stride)
            tile[:, : len(a)] = a[:, piece.columns].T
            tile[:, len(a) :] = 0

    def put_dora(
        self, index: int, magnitude: TensorSlice, tensors_path: Path, base: BaseWeights | None
    ) -> None:
        """A site with magnitudes. Its tensors are read again: they are needed together, and may lie anywhere."""
        if base is None:
            raise ValueError("DoRA's magnitudes need the weights of the base")
        site = self._spec.sites[index]
        a = read_tensor(tensors_path, site.a)
        b = read_tensor(tensors_path, site.b) * np.float32(site.scaling)
        gain, offset = dora_vectors(read_tensor(tensors_path, magnitude), a, b, base, site, self._dtype)
        self._cut(index, "a", a, self._rounded)
        self._put_b(index, b * gain[:, None])
        self._cut(index, "vectors", np.stack((gain - 1, offset)), self._exact)

    def check_finite(self) -> None:
        """Raises AdapterRefused for the first site that has another value."""
        if not any(kind in IN_FLOAT32 for _, kind in self._pieces) and all(
            map(all_finite, self._rounded.pages)
        ):
            return
        for (index, kind), pieces in self._pieces.items():
            into = self._exact if kind in IN_FLOAT32 else self._rounded
            if not all(all_finite(into[piece.elements]) for piece in pieces):
                raise AdapterRefused(
                    "non_finite",
                    f"{self._name(index)} has values that are not finite once they are scaled and in "
                    f"{self._dtype}",
                )
        self.experts.check_finite()

    def _name(self, index: int) -> str:
        if index >= len(self._spec.sites):
            tokens = index == len(self._spec.sites) and self._spec.tokens
            return "a row that trainable_token_indices names" if tokens else "the classifier's head"
        site = self._spec.sites[index]
        return site.site if site.site in (HEAD, EMBEDDING) else f"{site.site} of layer {site.layer}"

    def _put_b(self, index: int, scaled: NDArray[np.float32]) -> None:
        # Rounded before it is transposed: half as much to move.
        self._cut(index, "b", scaled.astype(self._dtype, copy=False).T, self._rounded)

    def _cut(self, index: int, kind: TileKind, matrix: NDArray[Any], into: Elements) -> None:
        for piece in self._pieces[index, kind]:
            part = matrix[piece.rows, piece.columns]
            into[piece.elements].reshape(part.shape)[...] = part


def blank_image(layout: ArenaLayout) -> HostImage:
    """An adapter of the largest rank on every site of every layer and the head, of zeros, that takes one page: all of
    its tiles lie in the same place."""
    pages = loose_pages(1, layout.page_bytes)
    pages.runs[0].zero_()
    head = 0 if layout.head is None else len(layout.head.sites)
    places = [*layout.places, *((HEAD_LAYER, block) for block in range(head))]
    rows = [(*place, chunk, 0, 0) for place in places for chunk in range(layout.max_chunks)]
    return HostImage("blank", layout.max_chunks * CHUNK, pages, np.array(rows, np.int32))


def _check_wanted(wanted: Callable[[], bool]) -> None:
    if not wanted():
        raise LoadAbandoned("no request waits for this adapter any more")


def _check_fits(spec: AdapterSpec, layout: ArenaLayout) -> None:
    if not (spec.sites or spec.experts):
        raise ArtifactCorrupt("the adapter changes nothing")
    seen = set()
    for site in spec.sites:
        where = f"{site.site} of layer {site.layer}"
        shape = layout.shape(site.layer, site.site)
        is_behind = site.layer != 0 and site.site in (HEAD, EMBEDDING)
        if shape is None or is_behind or (site.layer, site.site) in seen:
            raise ArtifactCorrupt(f"{where} is not a place for an adapter in this model, or is there twice")
        seen.add((site.layer, site.site))
        if not 1 <= site.rank <= layout.max_chunks * CHUNK:
            raise ArtifactCorrupt(
                f"{where} has rank {site.rank}; this engine serves 1 … {layout.max_chunks * CHUNK}"
            )
        in_features, out_features = shape
        if site.a.shape != (site.rank, in_features) or site.b.shape != (out_features, site.rank):
            raise ArtifactCorrupt(
                f"{where}: A {list(site.a.shape)} and B {list(site.b.shape)} do not fit rank {site.rank} of a linear "
                f"from {in_features} to {out_features} features"
            )
        if site.magnitude is not None and site.magnitude.shape != (out_features,):
            raise ArtifactCorrupt(
                f"{where}: the magnitudes {list(site.magnitude.shape)} do not fit {out_features} features"
            )
    check_experts_fit(spec, layout.experts)
    if spec.head is not None and spec.head.weight.shape[1:] != (layout.hidden_size,):
        raise ArtifactCorrupt(
            f"the head {list(spec.head.weight.shape)} does not fit this model's hidden states"
        )
    for table in spec.tokens:
        if layout.embedding is None or table.rows.shape != (len(table.ids), layout.embedding[1]):
            raise ArtifactCorrupt(
                f"the rows {list(table.rows.shape)} of {table.module_path} do not fit this model"
            )
        if not all(0 <= token < layout.embedding[0] for token in table.ids):
            raise ArtifactCorrupt(f"{table.module_path} has rows of tokens that the model does not have")
