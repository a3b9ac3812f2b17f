"""The form of a linear's weight: what a backend makes of what is stored, and the memory that it takes."""

from __future__ import annotations

import pytest

from loraplex.kernels.weight_form import FLOATS, WeightForm, served_form

GPTQ = WeightForm("groups", 4, 128)
MADE_FOR_INT8 = WeightForm("groups", 8, 0, "int8")
FLOAT8 = WeightForm("float8", 8, 0, "float8")


@pytest.mark.parametrize(
    ("stored", "backend", "round_activations", "activations"),
    [
        (GPTQ, "numba", True, "int8"),
        (GPTQ, "numba", False, ""),
        (GPTQ, "torch", True, ""),
        (GPTQ, "triton", True, ""),
        (WeightForm("groups", 4, 16), "numba", True, ""),
        (WeightForm("groups", 8, 64), "numba", True, ""),
        (MADE_FOR_INT8, "numba", True, "int8"),
        (MADE_FOR_INT8, "triton", True, ""),
    ],
)
def test_activations_are_rounded_where_it_is_faster_or_the_checkpoint_is_made_for_it(
    stored: WeightForm, backend: str, round_activations: bool, activations: str
) -> None:
    served = served_form(stored, backend, round_activations=round_activations)
    assert (served.codes, served.bits, served.activations) == ("groups", stored.bits, activations)


def test_8_bit_floats_are_multiplied_by_triton_alone() -> None:
    assert served_form(FLOAT8, "triton", round_activations=False) == FLOAT8
    for backend in ("torch", "numba"):
        assert served_form(FLOAT8, backend, round_activations=True) == FLOATS


@pytest.mark.parametrize(
    ("stored", "backend", "row_bytes"),
    [
        (FLOATS, "numba", 512),
        (FLOAT8, "triton", 256 + 4),
        (WeightForm("float8", 8, 96), "triton", 512),  # a tile of 64 inputs would have two scales
        (GPTQ, "torch", 256 + 2 * 4),
        (GPTQ, "triton", 128 + 2 * 2),
        (WeightForm("groups", 4, 128, zeros="whole"), "triton", 128 + 2 * 3),
        (WeightForm("groups", 4, 128, zeros="floats", scale_bytes=4), "triton", 128 + 2 * 8),
        (WeightForm("groups", 4, 8), "triton", 256 + 32 * 4),  # no plane of 16 inputs is part of a group
        (WeightForm("groups", 4, 128, zeros="whole"), "torch", 256 + 2 * 4),
        (WeightForm("groups", 8, 128, zeros="whole"), "triton", 256 + 2 * 8),
        (GPTQ, "numba", 128 + 2 * 2 * 2),
        (WeightForm("groups", 4, 128, zeros="whole"), "numba", 128 + 2 * 2 * 4),
        (MADE_FOR_INT8, "numba", 256 + 2),
        (WeightForm("groups", 8, 64, "int8", zeros="whole"), "numba", 256 + 4 * 8),
    ],
)
def test_memory_of_an_output_with_256_inputs(stored: WeightForm, backend: str, row_bytes: int) -> None:
    served = served_form(stored, backend, round_activations=True)
    assert served.row_bytes(256, 2, backend) == row_bytes
