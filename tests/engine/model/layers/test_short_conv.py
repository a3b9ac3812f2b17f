"""Short convolutions, whose last rows lie in blocks like keys: the formula, the same bits, and what they take."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import conv1d

from loraplex.engine.devices import kernels_elsewhere
from loraplex.engine.kv.layers import block_needs, layer_groups
from loraplex.engine.model.base import ModelUnsupported
from loraplex.engine.model.fused import attention_needs
from loraplex.engine.model.model_plan import ModelSettings, make_plan
from loraplex.kernels.attention.previous import previous_slots
from loraplex.kernels.layers.short_conv import short_conv
from support.models.checkpoints import FAMILIES, VOCAB, PagedRun, edit_config, save_tiny
from support.models.loading import load_model, plan_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def test_places_before_each_row_are_those_of_its_sequence() -> None:
    """Two sequences, rows 15 … 17 of the first, row 0 and 1 of the second."""
    found = previous_slots([3, 2], [18, 2], [0, 2], [7, 4, 9], 2)
    last, first = 7 * 16, 4 * 16
    assert found.tolist() == [
        [last + 13, last + 14], [last + 14, last + 15], [last + 15, first], [-1, -1], [-1, 9 * 16],
    ]  # fmt: skip


@pytest.mark.parametrize("with_bias", [False, True])
def test_short_conv_is_a_causal_convolution_of_gated_rows(with_bias: bool) -> None:
    torch.manual_seed(0)
    channels, width, count = 6, 4, 20
    gates, weight = torch.randn(count, 3 * channels), torch.randn(width, channels)
    bias = torch.randn(channels) if with_bias else None
    cache = torch.full((3, 16, 2, 1, channels // 2), float("nan"))
    table, out = [2, 0], []
    for start, end in ((0, 1), (1, 9), (9, 20)):
        slots = torch.tensor([table[p // 16] * 16 + p % 16 for p in range(start, end)])
        previous = torch.from_numpy(previous_slots([end - start], [end], [0], table, width - 1))
        out.append(short_conv(gates[start:end], cache, slots, previous, weight, bias))
    b, c, x = gates.chunk(3, 1)
    mixed = conv1d((b * x).T[None], weight.T[:, None], bias, padding=width - 1, groups=channels)[0, :, :count]
    torch.testing.assert_close(torch.cat(out), c * mixed.T)


@pytest.mark.parametrize(
    ("family", "dtype"), [("lfm2", "float32"), ("lfm2", "bfloat16"), ("lfm3", "bfloat16")]
)
def test_a_row_has_the_same_bits_whoever_rides_along(family: str, dtype: str, tmp_path: Path) -> None:
    """In any slices beside any others, in blocks full of NaN."""
    model = load_model(
        save_tiny(tmp_path, FAMILIES[family]), "cpu", dtype, kernels="numba", batch_invariant=True
    )
    rng = random.Random(dtype)
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in (1, 2, 18, 40, 40)]
    alone = []
    for prompt in prompts:
        run = PagedRun(model, [prompt])
        run.step({0: len(prompt)}, None)
        alone.append(run.result(0))
    run = PagedRun(model, prompts)
    while left := [i for i, prompt in enumerate(prompts) if run.done[i] < len(prompt)]:
        chosen = rng.sample(left, rng.randint(1, len(left)))
        run.step({i: min(rng.choice([1, 1, 5, 16]), len(prompts[i]) - run.done[i]) for i in chosen}, None)
    for index, want in enumerate(alone):
        assert torch.equal(run.result(index), want), index


def test_convolutions_keep_the_rows_that_they_read(tmp_path: Path) -> None:
    options = FAMILIES["lfm2"] | {
        "num_hidden_layers": 6,
        "layer_types": ["conv", "conv", "full_attention"] * 2,
    }
    caches = plan_model(save_tiny(tmp_path, options)).shape.caches
    assert [group.window for group in layer_groups(caches)] == [3, 3, None]
    assert block_needs(caches, 16).of(4096, 1) == 256 + 2 * 2


def refusal(path: Path, **settings: Any) -> str:
    with pytest.raises(ModelUnsupported) as caught:
        plan_model(path, **settings)
    return str(caught.value)


def test_what_short_convolutions_do_not_do_is_refused(tmp_path: Path) -> None:
    path = save_tiny(tmp_path, FAMILIES["lfm2"])
    assert "short convolutions of lfm2 keep their rows" in refusal(path, kv_codes=True)
    for name, size in (
        ("block_ff_dim", 0), ("block_ff_dim", 10**400), ("block_multiple_of", 0), ("block_multiple_of", 1 << 60),
    ):  # fmt: skip
        edit_config(path, **{"block_ff_dim": 48, "block_multiple_of": 16, name: size})
        assert f"the config's {name} is" in refusal(path)
    edit_config(path, block_ff_dim=48, block_multiple_of=16, conv_L_cache=1)
    assert "rows are 2 to 64" in refusal(path)
    edit_config(path, conv_L_cache=3, layer_types=["conv"] * 3)
    assert "none of its layers has attention (lfm2)" in refusal(path)


def test_a_plan_for_a_gpu_has_room_for_the_places_before_rows(tmp_path: Path) -> None:
    path = save_tiny(tmp_path, FAMILIES["lfm2"])
    plan = make_plan(path, ModelSettings(), kernels_elsewhere(torch.device("cuda")))
    assert plan.shape == plan_model(path).shape
    assert plan.spec is not None
    assert attention_needs(plan.spec).previous == (2, 2, 0)
