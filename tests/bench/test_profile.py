"""A step's time by part, where launches overlap."""

from __future__ import annotations

import pytest

from bench.gpu.decoding.profile import shares


def test_a_kernel_launched_early_counts_from_where_the_one_before_it_ends() -> None:
    """A B side waits for its A side at its first instruction: that time is the A side's."""
    found = shares([("B", 1.0, 6.0), ("A", 0.0, 4.0), ("norm", 8.0, 9.0)])
    assert found == {"A": [4.0], "B": [2.0], "norm": [1.0]}


def test_parts_add_up_to_the_union_of_the_launches() -> None:
    launches = [("A", 0.0, 3.0), ("B", 0.5, 2.0), ("A", 2.5, 7.0), ("B", 6.0, 6.5), ("C", 9.0, 10.0)]
    found = shares(launches)
    assert found == {"A": [3.0, 4.0], "B": [0.0, 0.0], "C": [1.0]}
    assert sum(map(sum, found.values())) == pytest.approx(8.0)
