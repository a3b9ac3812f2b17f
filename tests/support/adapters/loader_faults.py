"""Faults of the loader, planted into the code that lays an adapter out: its files stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from loraplex.adapters.admission.peft_config import LoraSettings
from loraplex.adapters.device import host_image, transport
from loraplex.adapters.device.host_image import HostImage
from loraplex.adapters.device.layout import ArenaLayout
from loraplex.adapters.spec import AdapterSpec

Plant = Callable[[pytest.MonkeyPatch], None]
_LAYER, _NUMBER, _A, _B = 0, 1, 3, 4
"""Columns of `HostImage.sites`."""


def scaling(factor: float, module: str = "") -> Plant:
    """The scaling of the modules whose paths end so is wrong by this factor; of all by default."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        right = LoraSettings.rank_and_scaling

        def wrong(self: LoraSettings, path: str, tensor_rank: int | None = None) -> tuple[int, float]:
            rank, found = right(self, path, tensor_rank)
            return rank, found * factor if path.endswith(module) else found

        patch.setattr(LoraSettings, "rank_and_scaling", wrong)

    return plant


def _changed_places(change: Callable[[NDArray[np.int32], ArenaLayout], None]) -> Plant:
    """`change` gets a copy of `HostImage.sites`."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        right = host_image.build_image

        def wrong(spec: AdapterSpec, path: Any, layout: ArenaLayout, **options: Any) -> HostImage:
            image = right(spec, path, layout, **options)
            rows = image.sites.copy()
            change(rows, layout)
            return replace(image, sites=rows)

        patch.setattr(transport, "build_image", wrong)

    return plant


def exchange(layer: int, one: str, other: str) -> Plant:
    """Two sites of a layer, of one shape and rank, stand for each other."""

    def change(rows: NDArray[np.int32], layout: ArenaLayout) -> None:
        numbers = layout.sites
        first, second = (
            (rows[:, _LAYER] == layer) & (rows[:, _NUMBER] == numbers[layer, site]) for site in (one, other)
        )
        assert first.any()
        assert second.any()
        rows[first, _NUMBER], rows[second, _NUMBER] = numbers[layer, other], numbers[layer, one]

    return _changed_places(change)


def a_of_another_layer(layer: int, site: str, other: int) -> Plant:
    """A site computes with A of another layer's, and its own B."""

    def change(rows: NDArray[np.int32], layout: ArenaLayout) -> None:
        own, others = (
            (rows[:, _LAYER] == number) & (rows[:, _NUMBER] == layout.sites[number, site])
            for number in (layer, other)
        )
        assert own.sum() == others.sum() > 0
        rows[own, _A] = rows[others, _A]

    return _changed_places(change)


def transposed_b(layer: int, site: str) -> Plant:
    """B [N, R] of one site is taken for [R, N]."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        right = host_image._fill

        def wrong(image: Any, spec: AdapterSpec, *rest: Any) -> None:
            (index,) = (i for i, s in enumerate(spec.sites) if (s.layer, s.site) == (layer, site))
            put_b = image._put_b

            def put(at: int, scaled: np.ndarray) -> None:
                put_b(at, scaled.reshape(scaled.shape[::-1]).T if at == index else scaled)

            image._put_b = put
            right(image, spec, *rest)

        patch.setattr(host_image, "_fill", wrong)

    return plant


def _changed_image(change: Callable[[HostImage], HostImage]) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        right = host_image.build_image
        patch.setattr(transport, "build_image", lambda *given, **options: change(right(*given, **options)))

    return plant


def token_ids_off_by_one(token: int) -> Plant:
    """The row of a token that an adapter replaces is another token's."""

    def change(image: HostImage) -> HostImage:
        tokens = image.tokens.copy()
        assert (tokens[:, 0] == token).any()
        tokens[tokens[:, 0] == token, 0] += 1
        return replace(image, tokens=tokens)

    return _changed_image(change)


def token_tiles_off_by_one(kind: int) -> Plant:
    """Tiles of this kind of `HostImage.rows` begin a granule late."""

    def change(image: HostImage) -> HostImage:
        rows = image.rows.copy()
        assert (rows[:, 0] == kind).any()
        rows[rows[:, 0] == kind, 2] += 1
        return replace(image, rows=rows)

    return _changed_image(change)


def rows_of_the_head_ignored(patch: pytest.MonkeyPatch) -> None:
    """Rows are replaced in the embedding alone."""

    def change(image: HostImage) -> HostImage:
        tokens = image.tokens.copy()
        tokens[:, 1] &= host_image.IN_EMBEDDING
        return replace(image, tokens=tokens)

    _changed_image(change)(patch)


def ignored_magnitudes(patch: pytest.MonkeyPatch) -> None:
    """DoRA is served as plain LoRA."""

    def none(magnitude: np.ndarray, *_: Any) -> tuple[np.ndarray, np.ndarray]:
        return np.ones_like(magnitude), np.zeros_like(magnitude)

    patch.setattr(host_image, "dora_vectors", none)
