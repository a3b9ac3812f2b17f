"""Calls of kernels that are recorded once and repeated."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from loraplex.kernels.layers.numba_norm import add_rms_norm, rms_norm
from loraplex.kernels.numba_runtime.recording import LayerMemory, NotRecordable, Recording, StepValue
from loraplex.kernels.numba_runtime.thread_team import Kernel, take_unit
from loraplex.kernels.numba_runtime.vectors import fetch_add, read_int64


def _append(team, arguments):
    """Appends a number to a list that begins with its length: one unit."""
    if take_unit(team, 1) == 0:
        numbers, number = read_int64(arguments), read_int64(arguments + 8)
        length = fetch_add(numbers, 1)
        fetch_add(numbers + 8 + length * 8, number)


append = Kernel(_append, "qq")


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_calls_are_made_in_their_order_with_the_values_of_each_step(threads: int) -> None:
    numbers = np.zeros(401, np.int64)
    with Recording(LayerMemory()) as recording:
        for number in range(400):
            value = StepValue("odd") if number % 2 else number
            append.run((), numbers.ctypes.data, value)
    calls = recording.call_list(numbers)
    assert not numbers.any(), "recording computes nothing"
    for odd in (-5, 7):
        numbers[:] = 0
        calls.run({"odd": odd, "another": 3})
        assert numbers.tolist() == [400, *(odd if n % 2 else n for n in range(400))]


def test_layers_share_memory_but_not_with_the_next_one(threads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.rand(96, generator=generator)
    start = torch.randn(5, 96, generator=generator)
    x, total = torch.zeros(5, 96), torch.zeros(5, 96)
    used = []
    with Recording(LayerMemory()) as recording:
        y = rms_norm(x, weight, 1e-5)
        for layer in range(6):
            recording.enter_layer(layer)
            y = add_rms_norm(rms_norm(y, weight, 1e-5), total, weight, 1e-5)
            used.append(y.data_ptr())
    calls = recording.call_list(x, total, weight)
    assert len(set(used[2:])) == 2
    for turn in range(2):
        x.copy_(start * (turn + 1) - turn)
        total.zero_()
        calls.run({})
        want, sums = rms_norm(x, weight, 1e-5), torch.zeros(5, 96)
        for _ in range(6):
            want = add_rms_norm(rms_norm(want, weight, 1e-5), sums, weight, 1e-5)
        assert torch.equal(y, want)
        assert torch.equal(total, sums)


@pytest.mark.parametrize(
    "operation",
    [lambda x: x + 1, lambda x: x.zero_(), lambda x: x.t().contiguous(), lambda x: torch.zeros_like(x)],
)
def test_what_a_list_of_calls_would_not_repeat_is_refused(operation) -> None:
    x = torch.ones(3, 4)
    with pytest.raises(NotRecordable), Recording(LayerMemory()):
        operation(x[:2].view(4, 2))
    assert x.eq(1).all()
