"""The masks of a step's rows with a grammar, from the threads that fill them to the device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import torch

from loraplex.engine.execution.riders.rider import Rider
from loraplex.engine.execution.step_results import RowFailure, StepResult
from loraplex.engine.grammar.masks import MaskMaker, MaskRow
from loraplex.engine.host_to_device import HostToDevice
from loraplex.engine.logprobs import cut_scores
from loraplex.engine.sampling.sampled_row import SampledRow
from loraplex.kernels.sampling.types import TokenMasks


class GrammarMasks(Rider):
    """Masks that are being filled. `Tokens` waits for them in the worker, and samples by them; behind it `collect` lets
    the grammars follow the tokens."""

    def __init__(
        self,
        maker: MaskMaker,
        rows: Sequence[SampledRow],
        slices: Sequence[int],
        eos_ids: Collection[int],
        sources: Mapping[str, int],
        previous: Callable[[], Sequence[int | None] | None],
        inputs: HostToDevice,
    ) -> None:
        """`slices`: the index in the plan of each row's slice. See `MaskMaker` for the other arguments."""
        self._maker = maker
        self._slices = slices
        self._masked = maker.plan(rows, eos_ids, sources)
        numbers = [row.row for row in self._masked]
        places = np.full(len(rows), -1, dtype=np.int64)
        places[numbers] = np.arange(len(numbers))
        self._numbers, self._places = inputs.ints(numbers), inputs.ints(places)
        self._filled = maker.start(self._masked, previous)

    def wait(self) -> TokenMasks:
        """Wait in the worker, after the forward pass is queued, for the masks on the device."""
        bits = torch.from_numpy(self._filled.result().bits)
        device = self._numbers.device
        if device.type == "cuda":
            bits = bits.pin_memory().to(device, non_blocking=True)
        return TokenMasks(self._numbers, self._places, bits)

    def collect(self, result: StepResult) -> None:
        no_mask = self._filled.result().failed
        sampled = {index: result.rows[index].token_ids for index in self._slices}
        going_on: dict[int, MaskRow] = {}
        for row in self._masked:
            index = self._slices[row.row]
            found, tokens, offset = result.rows[index], sampled[index], row.sampled.offset
            if found.ended or found.failed is not None or offset >= len(tokens):
                continue  # of a draft that was not accepted so far, or of a row that failed
            if row.row in no_mask:
                found.failed = RowFailure(no_mask[row.row], "grammar")
                continue
            accepted = self._maker.accept(row, tokens[offset], is_last=offset == len(tokens) - 1)
            found.token_ids = (*tokens[:offset], *accepted.tokens)
            if accepted.error is not None:
                found.failed = RowFailure(accepted.error, "grammar")
            elif accepted.ends:
                found.ended = True
                found.scores = cut_scores(found.scores, 0, len(found.token_ids))
            else:
                going_on[index] = row
        rows = [(row, result.rows[index]) for index, row in going_on.items()]
        self._maker.begin_next([row for row, found in rows if not found.ended and found.failed is None])
