"""The largest logit of each row and the draw of a token, by numba."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from loraplex.kernels.sampling.numba_argmax import largest
from loraplex.kernels.sampling.numba_logsumexp import log_sum_exp
from loraplex.kernels.sampling.numba_sampling import draw
from loraplex.kernels.sampling.types import Option, Options, TokenMasks

SHAPES = [(1, 1), (2, 15), (3, 16), (5, 17), (4, 1000), (16, 49152)]


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_greedy_token_is_the_first_of_the_largest(rows: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    for logits in (
        torch.randn(rows, columns, generator=generator),
        torch.randint(0, 3, (rows, columns), generator=generator).float(),
        torch.full((rows, columns), -3e38),
    ):
        tokens, ok = largest(logits)
        assert tokens.tolist() == [row.index(max(row)) for row in logits.tolist()]
        assert ok.all()


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_a_row_that_is_not_finite_is_told_apart(rows: int, columns: int, wrong: float) -> None:
    logits = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))
    for column in {0, columns // 2, columns - 1}:
        spoiled = logits.clone()
        spoiled[rows - 1, column] = wrong
        tokens, ok = largest(spoiled)
        assert ok.tolist() == [True] * (rows - 1) + [False]
        assert tokens[:-1].tolist() == logits[:-1].argmax(-1).tolist()


def test_no_rows() -> None:
    assert [part.tolist() for part in largest(torch.zeros(0, 5))] == [[], []]


@pytest.mark.parametrize(
    "logits", [torch.zeros(2, 0), torch.zeros(4, 2).T, torch.zeros(2, 2, dtype=torch.float64)]
)
def test_other_logits_are_refused(logits: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="contiguous rows of float32"):
        largest(logits)


def options_of(uniform: list[float]) -> Options:
    """Rows that are drawn with these numbers, and nothing else."""
    host = np.zeros((len(uniform), len(Option)))
    host[:, [Option.TEMPERATURE, Option.TOP_P]] = 1.0
    host[:, Option.UNIFORM] = uniform
    return Options(host, torch.from_numpy(host))


def test_a_row_that_is_not_ok_keeps_its_token_and_others_are_drawn() -> None:
    logits = torch.tensor([[0.0, float("nan"), 0.0], [0.0, 9.0, 0.0], [0.0, 0.0, 0.0]])
    tokens, ok = largest(logits)
    tokens[0] = 2
    draw(logits, tokens, ok, options_of([0.5, 0.5, 0.99]))
    assert tokens.tolist() == [2, 1, 2]


def test_only_the_named_rows_are_drawn_and_strided_logits_are_refused() -> None:
    logits = torch.zeros(2, 40)
    tokens, ok = largest(logits)
    options = options_of([0.5, 0.999])
    options.host[0, Option.TEMPERATURE] = 0.0
    draw(logits, tokens, ok, options)
    assert tokens.tolist() == [0, 39]
    with pytest.raises(ValueError, match="contiguous rows of float32"):
        draw(torch.zeros(40, 2).T, tokens, ok, options)


@pytest.mark.parametrize("columns", [1, 15, 16, 513, 49152])
def test_log_sum_exp_equals_float64_and_does_not_depend_on_the_other_rows(columns: int) -> None:
    logits = torch.randn(9, columns, generator=torch.Generator().manual_seed(columns)) * 8
    logits[3] -= 1000
    logits[4] += 1000
    got = log_sum_exp(logits)
    torch.testing.assert_close(
        got.double(), logits.double().logsumexp(-1, keepdim=True), rtol=3e-7, atol=3e-7
    )
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for first, end in ((0, 1), (4, 5), (2, 9)):
                assert torch.equal(log_sum_exp(logits[first:end]), got[first:end])
    finally:
        torch.set_num_threads(before)


def test_log_sum_exp_of_rows_that_are_not_finite() -> None:
    logits = torch.zeros(5, 40)
    logits[0, 3] = float("nan")
    logits[1, 39] = float("inf")
    logits[2] = float("-inf")
    logits[3, 7] = float("-inf")
    got = log_sum_exp(logits)[:, 0]
    assert not got[:3].isfinite().any()
    torch.testing.assert_close(got[3:], logits[3:].logsumexp(-1))
    assert log_sum_exp(logits[:0]).shape == (0, 1)
    with pytest.raises(ValueError, match="float32"):
        log_sum_exp(logits.double())


# Masks.


def masks_of(allowed: list[torch.Tensor | None], columns: int) -> TokenMasks:
    """`allowed`: [V] bool of each row, None for a row that may have any token. Bits beyond the vocabulary are set."""
    rows = [row for row, mask in enumerate(allowed) if mask is not None]
    places = torch.full((len(allowed),), -1)
    places[rows] = torch.arange(len(rows))
    bits = np.ones((len(rows), 32 * -(-columns // 32)), dtype=np.uint8)
    for place, row in enumerate(rows):
        bits[place, :columns] = allowed[row]
    packed = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    return TokenMasks(torch.tensor(rows), places, torch.tensor(packed))


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 1.0])
@pytest.mark.parametrize(("rows", "columns"), [*SHAPES, (3, 31), (3, 32), (3, 33), (3, 48)])
def test_the_largest_of_what_a_mask_allows(rows: int, columns: int, share: float) -> None:
    """Every other row has a mask. What is barred becomes -inf, and nothing else changes."""
    generator = torch.Generator().manual_seed(columns)
    logits = torch.randn(rows, columns, generator=generator)
    allowed = [
        torch.rand(columns, generator=generator) < share if row % 2 == 0 else None for row in range(rows)
    ]
    want = logits.clone()
    for row, mask in enumerate(allowed):
        if mask is not None:
            want[row, ~mask] = float("-inf")
    tokens, ok = largest(logits, masks_of(allowed, columns))
    assert torch.equal(logits, want)
    assert ok.tolist() == [mask is None or bool(mask.any()) for mask in allowed]
    assert tokens[ok].tolist() == want[ok].argmax(-1).tolist()


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_a_masked_row_that_is_not_finite_is_told_apart_though_it_is_barred(wrong: float) -> None:
    logits = torch.zeros(2, 40)
    logits[0, 3] = wrong
    allowed = torch.arange(40) != 3
    assert largest(logits, masks_of([allowed, allowed], 40))[1].tolist() == [False, True]


@pytest.mark.parametrize("wrong", ["rows", "words", "places", "kind"])
def test_masks_of_another_shape_are_refused(wrong: str) -> None:
    masks = masks_of([torch.ones(40, dtype=torch.bool)] * 2, 40)
    bits, places = masks.bits, masks.places
    other = {
        "rows": TokenMasks(masks.rows, places, bits[:1]),
        "words": TokenMasks(masks.rows, places, bits[:, :1].contiguous()),
        "places": TokenMasks(masks.rows, places[:1], bits),
        "kind": TokenMasks(masks.rows, places, bits.float()),
    }
    with pytest.raises(ValueError, match=r"bits|places"):
        largest(torch.zeros(2, 40), other[wrong])
