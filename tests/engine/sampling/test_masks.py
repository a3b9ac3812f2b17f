"""Masks of grammars in every sampler, against one row at a time in numpy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.engine.execution.inputs import PlainInputs
from loraplex.engine.sampling.noise import uniform
from loraplex.engine.sampling.sampled_row import SampledRow
from loraplex.engine.sampling.sampler import make_sampler
from loraplex.engine.types import SamplingParams
from loraplex.kernels.backend import make_kernels
from loraplex.kernels.bundle import Backend
from loraplex.kernels.sampling.types import TokenMasks
from support.engine.sampling import EOS, cuts, reference_weights, row
from support.engine.sampling_options import sampling_params

CPU = torch.device("cpu")
SIZES = (1, 31, 32, 33, 60, 70, 131)


def pack(allowed: list[np.ndarray | None]) -> TokenMasks | None:
    """The masks of a step; None for a row that may have any token."""
    rows = [s for s, mask in enumerate(allowed) if mask is not None]
    if not rows:
        return None
    places = np.full(len(allowed), -1, dtype=np.int64)
    places[rows] = range(len(rows))
    size = len(allowed[rows[0]])  # type: ignore[arg-type]
    # Bits beyond the vocabulary are set: nothing may read them.
    bits = np.ones((len(rows), 32 * -(-size // 32)), dtype=np.uint8)
    for place, s in enumerate(rows):
        bits[place, :size] = allowed[s]
    packed = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    return TokenMasks(torch.tensor(rows), torch.tensor(places), torch.tensor(packed))


@dataclass
class Drawer:
    """`draw(logits, rows, allowed)`: tokens, and whether each row is ok; `logits` are left as the sampler leaves
    them."""

    backend: Backend

    def __post_init__(self) -> None:
        self._samplers: dict[int, Any] = {}

    def draw(
        self, logits: Any, rows: list[SampledRow], allowed: list[np.ndarray | None]
    ) -> tuple[list[int], list[bool]]:
        x = torch.tensor(np.asarray(logits), dtype=torch.float32)
        size = x.shape[1]
        sampler = self._samplers.get(size)
        if sampler is None:
            sampler = self._samplers[size] = make_sampler(
                make_kernels(self.backend, CPU), vocab_size=size, max_rows=16
            )
        batch = sampler.plan(rows, eos_ids=EOS, upload=PlainInputs(CPU))
        last = torch.zeros(len(rows), dtype=torch.int64)
        tokens, ok = sampler.sample(x, batch, last, pack(allowed))
        return tokens.tolist(), ok.tolist()


@pytest.fixture(
    scope="module",
    params=["torch", "numba", pytest.param("triton", marks=pytest.mark.filterwarnings("ignore"))],
)
def drawer(request: pytest.FixtureRequest) -> Drawer:
    return Drawer(request.param)


@settings(max_examples=15)
@given(
    st.lists(st.tuples(sampling_params, st.sampled_from([None, 0.02, 0.5, 0.98])), min_size=1, max_size=4),
    st.sampled_from(SIZES),
    st.integers(0, 10**6),
)
def test_rows_equal_the_reference(drawer: Drawer, drawn, size, seed):
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (len(drawn), size)).astype(np.float32)
    rows, allowed = [], []
    for i, (params, share) in enumerate(drawn):
        # What ends too early is barred by the mask, and not beside it; other options name tokens that may not exist.
        options = replace(params, min_tokens=0, logit_bias=())
        rows.append(row(str(i), options, prompt=(0,), output=(0, 0)))
        mask = None if share is None else rng.random(size) < share
        if mask is not None:
            mask[rng.integers(size)] = True
        allowed.append(mask)
    tokens, ok = drawer.draw(logits, rows, allowed)
    assert all(ok)
    for i, item in enumerate(rows):
        w = reference_weights(logits[i], item, None, allowed[i])
        p = item.request.sampling
        u = uniform(p.seed, p.choice, item.output_index) if p.temperature else 0.5
        assert w[tokens[i]] > 0
        edges = cuts(w)
        if np.abs(edges - u).min() >= 1e-5:  # float32 may fall on either side
            assert tokens[i] == np.searchsorted(edges, u, side="right") - 1


def test_neighbours_change_nothing(drawer: Drawer):
    """Neither a masked row by the masks beside it, nor one without by being beside them."""
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 2, (6, 131)).astype(np.float32)
    rows = [row(str(i), SamplingParams(9, seed=i, top_p=0.9 if i % 2 else 1.0)) for i in range(6)]
    allowed = [None if i in (0, 3) else rng.random(131) < 0.2 for i in range(6)]
    together, _ = drawer.draw(logits, rows, allowed)
    assert together == [drawer.draw(logits[i : i + 1], [rows[i]], [allowed[i]])[0][0] for i in range(6)]
    order = [5, 2, 0, 3, 1, 4]
    shuffled = drawer.draw(logits[order], [rows[i] for i in order], [allowed[i] for i in order])[0]
    assert shuffled == [together[i] for i in order]


def test_one_token_alone_is_drawn_whatever_its_logit(drawer: Drawer):
    logits = np.zeros((3, 70), np.float32)
    logits[:, 69] = -3e38
    only = np.arange(70) == 69
    greedy, random = SamplingParams(9, temperature=0.0), SamplingParams(9, top_k=3, min_p=0.5)
    rows = [row("0", greedy), row("1", random), row("2", SamplingParams(9, temperature=0.0))]
    assert drawer.draw(logits, rows, [only, only, None]) == ([69, 69, 0], [True] * 3)


def test_a_row_fails_alone(drawer: Drawer):
    """With no token left, and with logits that are not finite, masked or not; a mask makes none of them good."""
    logits = np.zeros((5, 40), np.float32)
    logits[:, 7] = 1
    logits[2, 3] = np.nan
    logits[3, 3] = -np.inf
    rows = [row(str(i), SamplingParams(9, temperature=0.0)) for i in range(5)]
    most, none = np.arange(40) != 3, np.zeros(40, bool)
    tokens, ok = drawer.draw(logits, rows, [most, none, most, most, None])
    assert ok == [True, False, False, False, True]
    assert tokens == [7, 0, 0, 0, 7]


def test_a_batch_without_grammar_does_nothing_for_masks(monkeypatch: pytest.MonkeyPatch):
    def unwanted(*args: Any) -> None:
        pytest.fail("no row has a mask")

    drawer = Drawer("torch")
    rows = [row("0", SamplingParams(9))]
    want = drawer.draw([[0.0, 1.0, 2.0]], rows, [None])
    monkeypatch.setattr("loraplex.engine.sampling.sampler._bar_tokens", unwanted)
    assert drawer.draw([[0.0, 1.0, 2.0]], rows, [None]) == want


def test_masks_that_do_not_fit_are_refused(drawer: Drawer):
    if drawer.backend == "torch":
        return  # it indexes with them, and raises by itself
    rows = [row("0", SamplingParams(9))]
    for size in (65, 20):
        with pytest.raises(ValueError, match=r"do not fit|are not"):
            drawer.draw(np.zeros((1, 40)), rows, [np.ones(size, bool)])
