"""The outputs of an adapter's sites for fixed inputs, from the pages that serve it: see `loraplex.adapters.numerics`.

A step measures one of MEASURE_STEPS parts of a MeasureRequest at most. Each part has a share of the layers, the last
one the head too, and the one before it what the adapter changes by token. So the time that a step takes for it is
bounded, and the rows of other requests are not touched.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from loraplex.adapters.device.arena import AdapterArena
from loraplex.adapters.numerics import EMBEDDING_ROWS, HEAD_ROWS, PROBE_ROWS, SKETCH_SUMS
from loraplex.adapters.numerics.probes import column_signs, probe_inputs
from loraplex.engine.execution.inputs import PlainInputs
from loraplex.engine.execution.riders.expert_probe import ExpertSums, measure_experts
from loraplex.engine.execution.torch_errors import as_device_fault
from loraplex.engine.types import MEASURE_STEPS, MeasuredPart
from loraplex.kernels.lora.site_groups import EMBEDDING, HEAD
from loraplex.kernels.lora.token_rows import TokenRowPass
from loraplex.kernels.lora.types import LoraPass

_log = logging.getLogger(__name__)
_TOKENS = 8192
"""Tokens of the vocabulary that are looked up at a time."""


@dataclass(frozen=True, slots=True)
class SiteSums:
    """The measurement of a part: `sums` [sites, PROBE_ROWS, SKETCH_SUMS] float32 and `finite` [sites] bool."""

    sites: tuple[tuple[int, str], ...]
    sums: torch.Tensor
    finite: torch.Tensor
    experts: ExpertSums


class SiteProbe:
    """Belongs to the worker, which runs it between two forward passes. `dtype`: what the model is served in, by name
    once it is made."""

    def __init__(self, arena: AdapterArena, dtype: torch.dtype, device: torch.device) -> None:
        self._arena = arena
        self._dtype = dtype
        self.dtype = str(dtype).removeprefix("torch.")
        self._device = device
        self._signs: dict[int, torch.Tensor] = {}

    def measure(self, asked: MeasuredPart) -> SiteSums | None:
        """Runs under inference mode. Raises what makes a DeviceOutOfMemory or a DeviceLost; any other failure is the
        part's alone, which is None then."""
        try:
            return self._measure(asked)
        except Exception as error:
            if as_device_fault(error, self._device) is not error:
                raise
            _log.exception("the sites of the adapter in slot %d could not be measured", asked.slot)
            return None

    def _measure(self, asked: MeasuredPart) -> SiteSums:
        sites: list[tuple[int, str]] = []
        sums = []
        finite = []
        for layer, site, rows in self._site_rows(asked):
            exact = rows.float()
            sites.append((layer, site))
            sums.append(self._sketch(exact))
            finite.append(exact.isfinite().all())
        experts = measure_experts(self._arena, asked.slot, self._layers_of(asked), self._dtype, self._device)
        if not sites:
            empty = torch.empty(0, PROBE_ROWS, SKETCH_SUMS, device=self._device)
            return SiteSums((), empty, empty.bool(), experts)
        return SiteSums(tuple(sites), torch.stack(sums), torch.stack(finite), experts)

    def _layers_of(self, asked: MeasuredPart) -> range:
        num_layers = self._arena.layers.present.shape[1]
        return range(*(num_layers * part // MEASURE_STEPS for part in (asked.start, asked.start + 1)))

    def _site_rows(self, asked: MeasuredPart) -> Iterator[tuple[int, str, torch.Tensor]]:
        """(layer, site, its outputs [PROBE_ROWS, N]) in the served dtype."""
        weights = self._arena.layers
        lora = self._arena.slot_pass(asked.slot, PROBE_ROWS, head=False)
        number = 0
        for group in weights.groups:
            ends = list(accumulate(group.out_features))
            for layer in self._layers_of(asked):
                present = weights.present[asked.slot, layer, number : number + len(group.sites)]
                if lora is None or not present.any():
                    continue
                y = self._apply(lora, layer, group.key, group.in_features, ends[-1])
                for site, start, end, is_there in zip(group.sites, [0, *ends], ends, present, strict=False):
                    if is_there:
                        yield layer, site, y[:, start:end]
            number += len(group.sites)
        embedding = self._arena.layout.embedding
        if asked.start == MEASURE_STEPS - 2 and embedding is not None:
            yield from _TokenProbe(self._arena, asked.slot, embedding, self._dtype, self._device).rows()
        head = self._arena.head
        if asked.start < MEASURE_STEPS - 1 or head is None or not head.present[asked.slot].any():
            return
        lora = self._arena.slot_pass(asked.slot, PROBE_ROWS, head=True)
        assert lora is not None
        (group,) = head.groups
        yield 0, HEAD, self._apply(lora, 0, group.key, group.in_features, sum(group.out_features))

    def _apply(
        self, lora: LoraPass, layer: int, group: str, in_features: int, out_features: int
    ) -> torch.Tensor:
        x = torch.from_numpy(probe_inputs(layer, in_features).copy()).to(
            self._device, self._dtype, non_blocking=True
        )
        y = torch.zeros(PROBE_ROWS, out_features, dtype=self._dtype, device=self._device)
        y[-1] = 1
        lora.apply(layer, group, x, y)
        return y

    def _sketch(self, rows: torch.Tensor) -> torch.Tensor:
        """[PROBE_ROWS, N] float32 → [PROBE_ROWS, SKETCH_SUMS]: see `loraplex.adapters.numerics.probes`."""
        width = rows.shape[1]
        signs = self._signs.get(width)
        if signs is None:
            signs = self._signs[width] = torch.from_numpy(column_signs(width).copy()).to(self._device)
        signed = torch.nn.functional.pad(rows * signs, (0, -width % SKETCH_SUMS))
        return signed.view(PROBE_ROWS, -1, SKETCH_SUMS).sum(1)


class _TokenProbe:
    """Measures what one adapter, in `slot`, changes by token, through the passes that serve it. `shape`: (vocabulary,
    hidden size)."""

    def __init__(
        self, arena: AdapterArena, slot: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._arena = arena
        self._slot = slot
        self._vocab_size, self._hidden_size = shape
        self._dtype = dtype
        self._device = device

    def rows(self) -> Iterator[tuple[int, str, torch.Tensor]]:
        """(0, site, its outputs [PROBE_ROWS, N]) in the served dtype."""
        tables = self._arena.token_tables(self._slot)
        if tables is None:
            return
        if len(tables.b_tiles):
            yield 0, EMBEDDING, self._lora()
        if len(tables.embedding.ids):
            yield 0, EMBEDDING_ROWS, self._replaced(tables.embedding.ids)
        if len(tables.head.ids):
            yield 0, HEAD_ROWS, self._head()

    def _lora(self) -> torch.Tensor:
        x = self._inputs(self._vocab_size).float()
        sums = None
        for first in range(0, self._vocab_size, _TOKENS):
            last = min(first + _TOKENS, self._vocab_size)
            tokens = torch.arange(first, last, device=self._device)
            part = self._pass(last - first).hidden_sums(tokens, x[:, first:last])
            sums = part if sums is None else sums + part
        assert sums is not None
        y = self._outputs(self._hidden_size)
        return y.float().add_(self._pass(PROBE_ROWS).expand(sums)).to(self._dtype)

    def _replaced(self, ids: np.ndarray) -> torch.Tensor:
        behind = np.setdiff1d(ids + 1, ids)
        tokens = torch.from_numpy(np.concatenate((ids, behind[behind < self._vocab_size]))).to(self._device)
        found = torch.ones(len(tokens), self._hidden_size, dtype=self._dtype, device=self._device)
        self._pass(len(tokens)).replace_embeddings(tokens, found)
        y = self._outputs(self._hidden_size)
        y[:-1] = (
            self._inputs(self._vocab_size)[:-1, tokens[: len(ids)]].float() @ found[: len(ids)].float()
        ).to(self._dtype)
        if len(tokens) > len(ids):
            y[-1] = found[len(ids) :].float().mean(0).to(self._dtype)
        return y

    def _head(self) -> torch.Tensor:
        y = self._outputs(self._vocab_size)
        self._pass(PROBE_ROWS).replace_logits(self._inputs(self._hidden_size), y)
        return y

    def _pass(self, num_rows: int) -> TokenRowPass:
        segments = [(self._slot, 0, num_rows)]
        found = self._arena.token_pass(segments, segments, PlainInputs(self._device))
        assert found is not None
        return found

    def _inputs(self, in_features: int) -> torch.Tensor:
        x = torch.from_numpy(probe_inputs(0, in_features).copy())
        return x.to(self._device, self._dtype, non_blocking=True)

    def _outputs(self, out_features: int) -> torch.Tensor:
        y = torch.zeros(PROBE_ROWS, out_features, dtype=self._dtype, device=self._device)
        y[-1] = 1
        return y
