"""Every packed linear, by form and backend: rows that do not depend on others, what is refused, and its memory."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from loraplex.kernels.backend import make_kernels
from loraplex.kernels.bundle import Backend
from loraplex.kernels.linear.packed import PackedLinear
from loraplex.kernels.weight_form import FLOATS, WeightForm, served_form
from support.kernels.linears import drawn, floats, grouped
from support.kernels.poison import poison_new_memory

CPU = torch.device("cpu")
DEVICES: dict[Backend, torch.device] = {
    "torch": CPU,
    "numba": CPU,
    "triton": torch.device("cuda" if torch.cuda.is_available() else "cpu"),
}
DTYPES = [torch.float32, torch.bfloat16]
STORED = {
    "floats": FLOATS,
    "4 bits": WeightForm("groups", 4, 64, scale_bytes=4),
    "4 bits, zeros": WeightForm("groups", 4, 64, zeros="whole", scale_bytes=4),
    "4 bits, offsets": WeightForm("groups", 4, 64, zeros="floats", scale_bytes=4),
    "8 bits": WeightForm("groups", 8, 64),
    "8 bits, offsets": WeightForm("groups", 8, 64, zeros="floats"),
    "8 bits for int8": WeightForm("groups", 8, 64, "int8", scale_bytes=4),
    "8-bit floats, a scale a row": WeightForm("float8", 8, 0, "float8"),
    "8-bit floats in blocks": WeightForm("float8", 8, 64),
}
"""Forms by what is stored. Scales are drawn, so 16 bits do not hold those of 4 bits."""
CASES: list[Any] = [
    pytest.param(backend, name, id=f"{backend}, {name}")
    for backend in ("numba", "triton")
    for name, form in STORED.items()
    if served_form(form, backend, round_activations=True).codes == form.codes
]

pytestmark = pytest.mark.usefixtures("quick_interpreter")


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_memory(monkeypatch)


def weight_of(form: WeightForm, columns: int, inputs: int, dtype: torch.dtype) -> Any:
    if form.codes == "floats":
        return drawn(columns, inputs).to(dtype)
    if form.codes == "float8":
        return floats(columns, inputs, form.group or inputs, activations=form.activations != "")
    return grouped(columns, inputs, form.group, bits=form.bits, zeros=form.zeros)


def packed_of(
    backend: Backend, name: str, dtype: torch.dtype, columns: int = 96, inputs: int = 192
) -> PackedLinear:
    kernels = make_kernels(backend, DEVICES[backend], batch_invariant=True)
    form = served_form(STORED[name], backend, round_activations=True)
    weight = weight_of(STORED[name], columns, inputs, dtype)
    return kernels.ops.pack(weight.to(DEVICES[backend]) if name == "floats" else weight, form, dtype)


@pytest.mark.parametrize(("backend", "name"), CASES)
def test_it_takes_the_memory_that_its_form_says(backend: Backend, name: str) -> None:
    dtype = torch.float32
    packed = packed_of(backend, name, dtype)
    form = served_form(STORED[name], backend, round_activations=True)
    expected = packed.shape[0] * form.row_bytes(packed.shape[1], dtype.itemsize, backend)
    # Triton's kernels count arrived splits, and keep a number 1.
    assert expected <= packed.nbytes <= expected + 32
    assert packed.library == ""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("backend", "name"), CASES)
def test_a_row_has_the_same_bits_beside_any_others(backend: Backend, name: str, dtype: torch.dtype) -> None:
    if backend == "triton" and dtype is torch.bfloat16:
        dtype = torch.float16  # what the interpreter multiplies in
    rng, device = random.Random(0), DEVICES[backend]
    packed = packed_of(backend, name, dtype, columns=72)
    count_of = 400 if backend == "numba" else 40
    x, bias = (drawn(*shape, seed=3).to(device, dtype) for shape in ((count_of, 192), (72,)))
    whole = packed(x, bias)
    before_threads = torch.get_num_threads()
    try:
        for turn in range(24 if backend == "numba" else 5):
            torch.set_num_threads(1 + turn % 2)
            first = rng.randrange(count_of)
            count = rng.randint(1, min(count_of - first, 30 if turn % 3 else count_of))
            before, behind = (drawn(rng.randint(0, 70), 192, seed=rng.randrange(99)) for _ in "ab")
            behind[:] = float("nan")  # padding holds anything, and stays in its row
            rows = torch.cat((before.to(x), x[first : first + count], behind.to(x)))
            found = packed(rows, bias)
            assert (found.shape, found.dtype, found.is_contiguous()) == ((len(rows), 72), dtype, True)
            assert torch.equal(found[len(before) : len(before) + count], whole[first : first + count])
            assert not found[len(before) + count :].isfinite().any()
    finally:
        torch.set_num_threads(before_threads)


@pytest.mark.parametrize("name", [case.values[1] for case in CASES if case.values[0] == "numba"])
def test_rows_may_lie_apart_on_a_cpu(name: str) -> None:
    packed, wide = packed_of("numba", name, torch.float32, inputs=64), drawn(6, 192)
    for x in (wide[:, 64:128], wide[:, ::3], drawn(64, 6).T):
        assert torch.equal(packed(x), packed(x.contiguous()))


@pytest.mark.parametrize(("backend", "name"), CASES)
def test_what_does_not_fit_is_refused(backend: Backend, name: str) -> None:
    device = DEVICES[backend]
    packed = packed_of(backend, name, torch.float32)
    x = drawn(2, 192).to(device)
    for rows, bias in (
        (x[:, :96].contiguous(), None),
        (x.half(), None),
        (x, drawn(95).to(device)),
        (x, drawn(96).to(device).half()),
        *([(x[None], None), (x, drawn(192)[::2])] if backend == "numba" else [(x.T.contiguous().T, None)]),
    ):
        with pytest.raises(ValueError, match=r"does not fit a weight|no product of"):
            packed(rows, bias)


def test_a_packed_linear_is_chosen_by_the_form_alone() -> None:
    """The same codes: as they are, and with activations in 8 bits."""
    ops, exact = make_kernels("numba", CPU).ops, STORED["4 bits"]
    weight = weight_of(exact, 64, 128, torch.float32)
    kinds = [type(ops.pack(weight, replace(exact, activations=each), torch.float32)) for each in ("", "int8")]
    assert len(set(kinds)) == 2
