"""4-bit codes by humming-kernels: what it gets, when it is chosen, and what is said where it cannot be."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from loraplex.kernels import triton_backend
from loraplex.kernels.linear import groups, humming, triton_groups
from loraplex.kernels.linear.stored import GroupedWeight
from loraplex.kernels.linear.triton_nibbles import PackedNibbles
from loraplex.kernels.weight_form import WeightForm
from support.kernels.fake_humming import install_fake
from support.models.quantised_formats import pack

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
GROUPS_OF_32 = WeightForm("groups", 4, 32)


def weight_of(columns: int = 64, inputs: int = 128, group: int = 32) -> GroupedWeight:
    """Signed codes of 4 bits, all of them, and scales that bfloat16 holds."""
    generator = torch.Generator().manual_seed(columns + inputs)
    codes = torch.randint(-8, 8, (columns, inputs), generator=generator, dtype=torch.int8)
    codes[0, :16] = torch.arange(-8, 8)
    scales = (torch.rand(columns, inputs // group, generator=generator) * 0.01).bfloat16().float()
    return GroupedWeight(codes, scales, None, group)


def packed_of(weight: GroupedWeight, dtype: torch.dtype = torch.bfloat16) -> humming.LibraryWeight:
    packed = humming.pack_codes(weight, dtype, device=CPU)
    assert packed is not None
    return packed


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    return install_fake(monkeypatch, tmp_path / "site")


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice is that on a GPU, and memory is the host's."""
    asked = humming.obstacle_to
    monkeypatch.setattr(
        humming,
        "obstacle_to",
        lambda device, *, batch_invariant: asked(CUDA, batch_invariant=batch_invariant),
    )


def test_the_library_gets_the_words_that_compressed_tensors_stores(library) -> None:
    weight = weight_of()
    packed = packed_of(weight)
    (layer,) = library.made
    stored = pack((weight.codes + 8).numpy().astype("uint64"), 4)
    assert torch.equal(layer.weight, stored)
    assert torch.equal(layer.weight_scale, weight.scales.bfloat16())
    assert packed.shape == (64, 128)
    assert packed.nbytes == 64 * 128 // 2 + 64 * 4 * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(64, 128, 32), (128, 256, 64), (64, 256, 128)], ids=str)
def test_the_product(library, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    weight = weight_of(*shape)
    weight = replace(weight, scales=weight.scales.to(dtype).float())
    packed = packed_of(weight, dtype)
    x, bias = torch.randn(2, 3, shape[1]).to(dtype), torch.randn(shape[0]).to(dtype)
    want = groups.linear(x.float(), weight)
    y = packed(x)
    assert (y.shape, y.dtype) == (want.shape, dtype)
    limit = 2 * torch.finfo(dtype).eps * want.abs().max()
    assert (y - want).abs().max() < limit
    assert (packed(x, bias) - want - bias).abs().max() < 2 * limit
    assert packed(x[:, :0]).shape == (2, 0, shape[0])


def test_products_of_other_shapes_are_refused(library) -> None:
    packed = packed_of(weight_of())
    for x in (torch.zeros(2, 64).bfloat16(), torch.zeros(2, 128), torch.zeros(128, 2).bfloat16().T):
        with pytest.raises(ValueError, match=r"no product of .* with codes \[64, 128\]"):
            packed(x)


def test_the_first_product_is_made_when_a_weight_is_packed(library) -> None:
    packed_of(weight_of())
    assert [layer.calls for layer in library.made] == [1]


OTHER_FORMS = {
    "offsets": {"offsets": torch.zeros(64, 4)},
    "codes beyond 7": {"codes": torch.full((64, 128), 8, dtype=torch.int8)},
    "codes below -8": {"codes": torch.full((64, 128), -9, dtype=torch.int8)},
    "scales of more digits": {"scales": torch.full((64, 4), 0.1)},
    "other groups": {"scales": torch.full((64, 8), 0.5), "group": 16},
    "columns": {"codes": torch.zeros(32, 128, dtype=torch.int8), "scales": torch.full((32, 4), 0.5)},
    "inputs": {"codes": torch.zeros(64, 96, dtype=torch.int8), "scales": torch.full((64, 3), 0.5)},
}


@pytest.mark.parametrize("change", OTHER_FORMS.values(), ids=OTHER_FORMS)
def test_weights_of_other_forms_go_to_triton(library, on_cuda, change) -> None:
    weight = replace(weight_of(), **change)
    assert humming.pack_codes(weight, torch.bfloat16, device=CPU) is None
    assert humming.pack_codes(weight_of(), torch.float32, device=CPU) is None
    packed = triton_backend.triton_ops(device=CPU).pack(weight, GROUPS_OF_32, torch.bfloat16)
    assert isinstance(packed, PackedNibbles | triton_groups.PackedCodes)
    assert not library.made


def test_which_codes_the_library_multiplies(library, on_cuda) -> None:
    ops = triton_backend.triton_ops(device=CPU)
    packed = ops.pack(weight_of(), GROUPS_OF_32, torch.bfloat16)
    assert isinstance(packed, humming.LibraryWeight)
    x = torch.randn(3, 128).bfloat16()
    assert torch.equal(packed(x), packed.layer(x))
    same_bits = triton_backend.triton_ops(device=CPU, batch_invariant=True)
    assert isinstance(same_bits.pack(weight_of(), GROUPS_OF_32, torch.bfloat16), PackedNibbles)


def test_without_the_library_triton_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(humming, "PACKAGE", "no-such-kernels")
    assert humming.obstacle_to(CUDA, batch_invariant=False) == "no-such-kernels is not installed"
    packed = triton_backend.triton_ops(device=CPU).pack(weight_of(), GROUPS_OF_32, torch.bfloat16)
    assert isinstance(packed, PackedNibbles)


def test_the_choice_and_its_reason(library, on_cuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def choose(group: int, dtype: torch.dtype, *, invariant: bool = False) -> tuple[str, str]:
        kernels = triton_backend.triton_kernels(CPU, batch_invariant=invariant)
        assert kernels.choose_four_bits is not None
        found = kernels.choose_four_bits(group, dtype)
        return found.library, found.reason

    name = "humming-kernels 0.1.19"
    for group in (32, 64, 128):
        assert choose(group, torch.bfloat16) == (name, "it is installed")
    assert choose(128, torch.float16)[0] == name
    for found, words in (
        (choose(128, torch.bfloat16, invariant=True), "does not keep a row's bits"),
        (choose(0, torch.bfloat16), "groups of 32, 64, 128 inputs"),
        (choose(128, torch.float32), "the model's dtype is float32"),
    ):
        assert found[0] == ""
        assert words in found[1]
    install_fake(monkeypatch, tmp_path / "newer", "0.2.0")
    assert choose(128, torch.bfloat16) == (
        "",
        "humming-kernels 0.2.0 is not 0.1.19, which was tried: pip install 'loraplex[humming]'",
    )


def test_on_a_cpu_it_is_not_chosen(library) -> None:
    assert humming.obstacle_to(CPU, batch_invariant=False) == "humming-kernels is for GPUs"


def test_a_library_that_is_missing_or_fails_is_named(library, monkeypatch: pytest.MonkeyPatch) -> None:
    library.fails = RuntimeError("nvrtc: no such file\nand more")
    with pytest.raises(humming.LibraryFailed) as caught:
        packed_of(weight_of())
    assert str(caught.value) == (
        "humming-kernels failed with RuntimeError: nvrtc: no such file (a linear of 128 inputs and 64 outputs in "
        "groups of 32); without the package Triton's kernels serve it: pip uninstall humming-kernels"
    )
    monkeypatch.setitem(sys.modules, "humming.layer", None)
    with pytest.raises(
        humming.LibraryFailed, match=r"humming-kernels failed .*pip install 'loraplex\[humming\]'"
    ):
        packed_of(weight_of())
    monkeypatch.delitem(sys.modules, "humming")
    monkeypatch.delitem(sys.modules, "humming.layer")
    with pytest.raises(humming.LibraryFailed, match=r"is not installed: pip install 'loraplex\[humming\]'"):
        packed_of(weight_of())
