"""Large memory on the host: zeros at a line's beginning, in huge pages where they are large."""

from __future__ import annotations

import gc
import mmap
import re
from pathlib import Path

import pytest
import torch

from loraplex.kernels.host_memory import HugePagePool, untouched_zeros


@pytest.mark.parametrize("sizes", [(), (0,), (3, 5), (1 << 20,), (1 << 20, 3), (7, 1 << 19)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_memory_is_writable_zeros(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = untouched_zeros(sizes, dtype)
    assert (tuple(tensor.shape), tensor.dtype, tensor.is_contiguous()) == (sizes, dtype, True)
    assert tensor.numel() == 0 or tensor.data_ptr() % 64 == 0
    assert not tensor.any()
    tensor.fill_(1)
    gc.collect()
    assert tensor.all()


def test_two_do_not_share_memory() -> None:
    one, other = untouched_zeros((1 << 21,), torch.uint8), untouched_zeros((1 << 21,), torch.uint8)
    one.fill_(7)
    assert not other.any()


def test_memory_that_nobody_has_is_said_so() -> None:
    with pytest.raises(MemoryError, match="the system has no"):
        untouched_zeros((1 << 60,), torch.uint8)


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="needs Linux's huge pages")
def test_large_memory_asks_for_huge_pages() -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this kernel has no transparent huge pages")
    tensor = untouched_zeros((16 << 20,), torch.uint8)
    assert tensor.data_ptr() % (2 << 20) == 0
    middle = tensor.data_ptr() + (8 << 20)
    flags, access = None, ""
    for mapping in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", mapping)
        if bounds and int(bounds[1], 16) <= middle < int(bounds[2], 16):
            flags, access = mapping.partition("VmFlags:")[2].split(), mapping.split()[1]
    assert flags is not None
    assert "hg" in flags
    assert access == "rw-p"  # what is shared gets none, whatever it asks for, by the usual settings


def test_tensors_of_a_pool_lie_side_by_side_and_share_nothing() -> None:
    pool = HugePagePool()
    made = [
        pool.zeros(sizes, torch.bfloat16) for sizes in [(3, 5), (1 << 19,), (0,), (7, 1 << 20), (1 << 25,)]
    ]
    for number, tensor in enumerate(made, start=1):
        assert not tensor.any()
        assert tensor.numel() == 0 or tensor.data_ptr() % 64 == 0
        tensor.fill_(number)
    assert made[1].data_ptr() - made[0].data_ptr() == 64
    del pool
    gc.collect()
    assert all(bool((tensor == number).all()) for number, tensor in enumerate(made, start=1))
