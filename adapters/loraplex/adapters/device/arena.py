"""Device memory for adapters: equal pages, and tables that say where each adapter's tiles lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from loraplex.adapters.device.arrival import Arrival
from loraplex.adapters.device.device_copies import CopyQueue, HostQueue, PacedCopies, StreamQueue
from loraplex.adapters.device.device_lora import DeviceLora, effective_segments
from loraplex.adapters.device.expert_tables import ExpertTables
from loraplex.adapters.device.host_image import HostImage
from loraplex.adapters.device.host_slab import adjacent_runs
from loraplex.adapters.device.layout import ArenaLayout
from loraplex.adapters.device.placement import HEAD_LAYER
from loraplex.adapters.device.token_tables import describe_head, describe_tokens
from loraplex.kernels.bundle import Kernels
from loraplex.kernels.experts.lora_types import ExpertLoraPass, ExpertLoraWeights, begin_expert_pass
from loraplex.kernels.host_memory import untouched_zeros
from loraplex.kernels.lora.dispatch import GRANULE_BYTES, LoraPass, LoraWeights, Scratch, Segment, begin_pass
from loraplex.kernels.lora.site_groups import SiteGroup
from loraplex.kernels.lora.token_rows import (
    TokenRowPass,
    TokenTables,
    Upload,
    begin_token_rows,
    head_logits,
)
from loraplex.kernels.lora.triton_tiling import LoraTiling

_TILING = LoraTiling()


class AdapterArena:
    """`num_pages` pages of `layout.page_bytes`, for at most `num_slots` adapters at a time, on the device of `kernels`.

    It does not allocate pages to adapters, and does not guard them: `AdapterCache` does. `write` and `clear_slot`
    may run in another thread than `lora_pass`, for a slot and pages that no step in flight uses. One page more is
    allocated, of zeros, for tiles that an adapter lacks. Free pages may hold anything; nothing reads them.
    """

    def __init__(
        self,
        layout: ArenaLayout,
        num_pages: int,
        num_slots: int,
        kernels: Kernels,
        base_head: torch.Tensor | None = None,
        *,
        queue: CopyQueue | None = None,
    ) -> None:
        """`base_head` [labels, C + 1] float32: weights and biases of the head of a base that classifies. `queue` takes
        the copies to the device; None: the calling thread's current stream, and on a CPU nothing does."""
        self.layout = layout
        self.kernels = kernels
        self.device = device = kernels.device
        self._num_pages = num_pages
        head_bytes = 0 if base_head is None else len(base_head) * layout.head_row_bytes
        sizes = (num_pages + 1 + -(-head_bytes // layout.page_bytes), layout.page_bytes)
        if device.type == "cpu":
            self._pages = untouched_zeros(sizes, torch.uint8)
        else:
            self._pages = torch.empty(sizes, dtype=torch.uint8, device=device)
            self._pages[0].zero_()
        self._layers = self._empty_tables(layout.groups, layout.num_layers, num_slots)
        # The head is one group more, run once and for the sampled rows alone: a model of one layer, so to say.
        self._head = None if layout.head is None else self._empty_tables((layout.head,), 1, num_slots)
        self._experts = (
            None
            if layout.experts is None
            else ExpertTables(layout, num_pages, num_slots, self._layers.storage, kernels)
        )
        self._copies = PacedCopies(queue or (HostQueue() if device.type == "cpu" else StreamQueue()))
        self._filled = np.zeros(num_slots, np.bool_)
        self._touched = np.zeros(num_pages, np.bool_)
        if self._pages.numel() // GRANULE_BYTES >= 2**31:
            raise ValueError("an adapter arena can't be larger than 128 GiB")
        self._scratch = Scratch(device)
        self._tokens: dict[int, TokenTables] = {}
        self._heads: dict[int, NDArray[np.int64]] = {}
        self._base_head = None if base_head is None else self._keep_base_head(base_head)
        self._writes = [0] * num_slots
        self._arrivals: dict[int, Arrival] = {}
        self._last: tuple[object, LoraPass | None] = (None, None)
        self._last_head: tuple[object, LoraPass | None] = (None, None)
        self._last_experts: tuple[object, ExpertLoraPass | None] = (None, None)
        self._device_lora: DeviceLora | None = None

    @property
    def layers(self) -> LoraWeights:
        """Where the tiles of each slot lie, without the head's."""
        return self._layers

    @property
    def head(self) -> LoraWeights | None:
        """The same of the head, as a model of one layer. None where adapters can't change it."""
        return self._head

    @property
    def experts(self) -> ExpertLoraWeights | None:
        """The same of routed experts. None where adapters can't change them."""
        return None if self._experts is None else self._experts.weights

    @property
    def num_bytes(self) -> int:
        """Device memory that it takes: pages, and the tables of adapters on routed experts."""
        tables = 0 if self._experts is None else len(self._experts.weights.heights)
        return self._pages.numel() + tables * self.layout.expert_table_bytes

    def write(
        self,
        image: HostImage,
        slot: int,
        pages: tuple[int, ...],
        arrival: Arrival | None = None,
        arrived: Callable[[int], None] | None = None,
    ) -> None:
        """Describe an image in `slot`, and copy it into these pages, piece by piece. Returns when the device has its
        pages. `arrived` is told the pages of each piece that the device has got, and then the slot's tables are there
        too: steps may name the slot as far as `arrival` has come. For one thread at a time. Raises ValueError where the
        pages are not as many as the image's, or not the arena's.
        """
        if len(pages) != image.num_pages or not all(0 <= page < self._num_pages for page in pages):
            raise ValueError(f"an image of {image.num_pages} pages can't be written to pages {pages}")
        self._copies.forget()
        self._describe(image, slot, pages)
        if arrival is not None:
            self._arrivals[slot] = arrival
        done = 0
        for run in image.memory.runs:
            first = 0
            for start, end in adjacent_runs(pages[done : done + run.shape[0]]):
                part = run[first : first + end - start]
                # One further on the device, behind the page of zeros.
                self._copies.copy(part, self._pages[start + 1 : end + 1], arrived)
                first += end - start
            done += first
        self._copies.finish(arrived)
        self._touched[list(pages)] = True
        self._arrivals.pop(slot, None)

    def arrival(self, slot: int) -> Arrival | None:
        """The pages that a step which names `slot` has to wait for. None where all of its pages are there."""
        return self._arrivals.get(slot)

    def were_written(self, pages: Sequence[int]) -> bool:
        """Whether all of these pages were written to before. The first time, a CPU has yet to find their memory, which
        takes 20 times as long as the copy."""
        return bool(self._touched[list(pages)].all())

    def clear_slot(self, slot: int) -> None:
        """From now on a step that names `slot` is refused."""
        self._writes[slot] += 1
        self._filled[slot] = False
        self._arrivals.pop(slot, None)
        self._tokens.pop(slot, None)
        self._heads.pop(slot, None)
        if self._experts is not None:
            self._experts.clear(slot)

    def head_rows(self, slot: int) -> NDArray[np.int64] | None:
        """The granules at which the rows of the head in a slot begin, by label. The base's is that of slot -1, and of
        adapters that have none. None where there is no head."""
        return self._heads.get(slot, self._base_head)

    def head_logits(self, granules: torch.Tensor, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """See `loraplex.kernels.lora.token_rows.head_logits`."""
        return head_logits(self._pages.view(-1), granules, x, rows)

    def token_pass(
        self, segments: Sequence[Segment], logits_segments: Sequence[Segment], upload: Upload
    ) -> TokenRowPass | None:
        """Prepare what a step's adapters change of its embeddings, and of the logits of their own tokens: `segments`
        are over its rows, `logits_segments` over the rows of its logits. For every backend. None if no row has an
        adapter that does. Raises nothing: `lora_pass` finds empty slots."""
        if not self._tokens or self.layout.embedding is None:
            return None
        vocab_size, hidden_size = self.layout.embedding
        storage = self._layers.storage
        return begin_token_rows(
            storage, hidden_size, vocab_size, self._tokens, segments, logits_segments, upload
        )

    def token_tables(self, slot: int) -> TokenTables | None:
        """Where the rows lie that the adapter in a slot is looked up in by token. None where it has none."""
        return self._tokens.get(slot)

    def lora_pass(self, segments: Sequence[Segment], num_rows: int) -> LoraPass | None:
        """Prepare the layers of a step of `num_rows` rows: `segments` are (slot, first_row, num_rows), slot -1 for
        base rows, which may also be left out. None if no row has an adapter that changes a layer. Raises ValueError
        as `begin_pass` does, and for an empty slot. Not for kernels whose lists lie on the device: see `device_lora`.

        The last pass is kept: a step like the one before, as most are while all sequences decode, costs nothing.
        """
        key = (tuple(segments), num_rows, self._writes_to(segments))
        if self._last[0] != key:
            self._last = (key, self._begin(self._layers, segments, num_rows))
        return self._last[1]

    def head_pass(self, segments: Sequence[Segment], num_rows: int) -> LoraPass | None:
        """Prepare the head of a step in the same way, for its `num_rows` sampled rows: `segments` are of those. The
        pass's one group is HEAD, its one layer 0. None if no row has an adapter that changes the head."""
        if self._head is None:
            return None
        key = (tuple(segments), num_rows, self._writes_to(segments))
        if self._last_head[0] != key:
            self._last_head = (key, self._begin(self._head, segments, num_rows))
        return self._last_head[1]

    def expert_pass(self, segments: Sequence[Segment], num_rows: int) -> ExpertLoraPass | None:
        """Prepare the routed experts of a step, as `lora_pass` does the layers. None if no row has an adapter on
        them."""
        if self._experts is None:
            return None
        key = (tuple(segments), num_rows, self._writes_to(segments))
        if self._last_experts[0] != key:
            self._last_experts = key, self._begin_experts(self._experts.weights, segments, num_rows)
        return self._last_experts[1]

    def slot_pass(self, slot: int, num_rows: int, *, head: bool) -> LoraPass | None:
        """Prepare a pass of `num_rows` rows that all use the adapter in `slot`, beside a step's own: it is run by the
        thread that runs the steps, not while one runs. For every backend. None if the adapter changes nothing there.
        Raises ValueError for an empty slot."""
        weights = self._head if head else self._layers
        if weights is None:
            return None
        segments = [(slot, 0, num_rows)]
        if self._device_lora is not None:
            return self._device_lora.apart(segments, num_rows, head=head)
        return self._begin(weights, segments, num_rows)

    def slot_expert_pass(self, slot: int, num_rows: int) -> ExpertLoraPass | None:
        """Prepare a pass over routed experts as `slot_pass` does one over the layers. None if the adapter changes none
        of them."""
        if self._experts is None:
            return None
        segments = [(slot, 0, num_rows)]
        if self._device_lora is not None:
            return self._device_lora.experts_apart(segments, num_rows)
        return self._begin_experts(self._experts.weights, segments, num_rows)

    def device_lora(self, max_rows: int, max_sequences: int, tiling: LoraTiling = _TILING) -> DeviceLora:
        """Passes whose lists travel with a step's other inputs, for steps of up to `max_rows` rows of `max_sequences`
        sequences; with INVARIANT_TILING a row gets the same bits in every step. Call it once, in the thread that
        runs the steps, before the first `write`; for kernels whose lists lie on the device."""
        assert self._device_lora is None
        assert not self._filled.any()
        self._device_lora = DeviceLora(
            self._layers,
            self._head,
            self._experts,
            self._filled,
            self._tokens,
            self.token_pass,
            self._scratch,
            max_rows=max_rows,
            max_sequences=max_sequences,
            tiling=tiling,
        )
        return self._device_lora

    def _keep_base_head(self, rows: torch.Tensor) -> NDArray[np.int64]:
        """Write the base's head behind the pages. Returns the granules at which its rows begin."""
        step, first = self.layout.head_row_bytes, (self._num_pages + 1) * self.layout.page_bytes
        kept = self._pages.view(-1)[first : first + len(rows) * step].view(torch.float32)
        kept.view(len(rows), -1)[:, : rows.shape[1]] = rows.to(self.device)
        return (first + np.arange(len(rows), dtype=np.int64) * step) // GRANULE_BYTES

    def _begin(self, weights: LoraWeights, segments: Sequence[Segment], num_rows: int) -> LoraPass | None:
        assert self.kernels.lora_pass is not None
        chosen = effective_segments(segments, weights, self._filled)
        return begin_pass(self.kernels.lora_pass, weights, self._scratch, chosen, num_rows)

    def _begin_experts(
        self, weights: ExpertLoraWeights, segments: Sequence[Segment], num_rows: int
    ) -> ExpertLoraPass | None:
        assert self.kernels.expert_lora_pass is not None
        return begin_expert_pass(self.kernels.expert_lora_pass, weights, segments, num_rows)

    def _empty_tables(self, groups: tuple[SiteGroup, ...], num_layers: int, num_slots: int) -> LoraWeights:
        places = (num_layers, sum(len(group.sites) for group in groups))
        return LoraWeights(
            storage=self._pages.view(-1).view(self.layout.dtype),
            groups=groups,
            tables=np.zeros((num_slots, self.layout.max_chunks + 1, *places, 2), np.int32),
            num_chunks=np.zeros(num_slots, np.int32),
            present=np.zeros((num_slots, *places), np.bool_),
            vectors=np.zeros((num_slots, *places), np.int32),
        )

    def _writes_to(self, segments: Sequence[Segment]) -> tuple[int, ...]:
        """How often each slot has changed."""
        return tuple(self._writes[slot] for slot, _, _ in segments if 0 <= slot < len(self._writes))

    def _describe(self, image: HostImage, slot: int, pages: tuple[int, ...]) -> None:
        per_page = self.layout.granules_per_page
        # Page 0 of the storage is the one of zeros.
        starts = (np.array(pages, np.int64) + 1) * per_page

        def place(tile: NDArray[np.int32]) -> NDArray[np.int64]:
            return starts[tile // per_page] + tile % per_page

        self._writes[slot] += 1
        for weights, of_head in ((self._layers, False), (self._head, True)):
            sites = image.sites[(image.sites[:, 0] == HEAD_LAYER) == of_head]
            vectors = image.vectors[(image.vectors[:, 0] == HEAD_LAYER) == of_head]
            if weights is None:
                continue
            layers, numbers, chunks, *tiles = sites.T
            layers = np.zeros_like(layers) if of_head else layers
            table = np.zeros_like(weights.tables[slot])
            for kind, tile in enumerate(tiles):
                table[chunks, layers, numbers, kind] = place(tile)
            weights.tables[slot] = table
            weights.present[slot] = False
            weights.present[slot, layers, numbers] = True
            weights.num_chunks[slot] = chunks.max() + 1 if len(chunks) else 0
            layers, numbers, tile = vectors.T
            weights.vectors[slot] = 0
            weights.vectors[slot, np.zeros_like(layers) if of_head else layers, numbers] = place(tile)
        if self._experts is not None:
            self._experts.describe(image, slot, place)
        head = describe_head(image, place)
        if head is None:
            self._heads.pop(slot, None)
        else:
            self._heads[slot] = head
        found = describe_tokens(image, self.layout, place)
        if found is None:
            self._tokens.pop(slot, None)
        else:
            self._tokens[slot] = found
        self._filled[slot] = True
        if self._device_lora is not None:
            self._device_lora.write(slot)
