"""What a start chooses where no setting says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from loraplex.adapters.device.layout import ArenaLayout
from loraplex.engine.config import MAX_RECORDED_ROWS
from loraplex.engine.execution.cuda_graphs import graph_sizes
from loraplex.engine.sizing import (
    REFERENCE_LAYERS,
    REFERENCE_WEIGHTS,
    adapter_pages,
    most_recorded_rows,
    most_sequences,
    most_tokens,
    row_bytes,
)
from loraplex.kernels.lora.dispatch import CHUNK
from loraplex.kernels.lora.site_groups import SiteGroup

GIB = 1 << 30
LLAMA_8B = (
    SiteGroup("qkv", ("q_proj", "k_proj", "v_proj"), 4096, (4096, 1024, 1024)),
    SiteGroup("o", ("o_proj",), 4096, (4096,)),
    SiteGroup("gate_up", ("gate_proj", "up_proj"), 4096, (14336, 14336)),
    SiteGroup("down", ("down_proj",), 14336, (4096,)),
)


def test_a_setting_counts_whatever_the_device() -> None:
    for device in ("cpu", "cuda"):
        assert most_sequences(7, device) == 7
        assert most_tokens(100, device, 1, GIB) == 100


def test_sequences_go_by_the_device() -> None:
    assert (most_sequences(0, "cpu"), most_sequences(0, "cuda")) == (64, 256)


@pytest.mark.parametrize(("memory", "tokens"), [(16, 2048), (24, 2048), (48, 4096), (80, 8192), (141, 8192)])
def test_tokens_of_an_8b_model_go_by_the_memory(memory: int, tokens: int) -> None:
    assert most_tokens(0, "cuda", row_bytes(LLAMA_8B, 2), memory * GIB) == tokens


def test_tokens_go_by_the_model_and_are_few_on_a_cpu() -> None:
    row = row_bytes(LLAMA_8B, 2)
    assert row == 2 * (4096 + 6144 + 4096 + 4096 + 4096 + 28672 + 14336 + 4096)
    assert most_tokens(0, "cuda", 8 * row, 141 * GIB) == 2048
    assert most_tokens(0, "cuda", row // 8, 24 * GIB) == 8192
    assert most_tokens(0, "cpu", row, 141 * GIB) == 256


def test_a_row_is_as_wide_as_the_widest_layer_alone() -> None:
    """Layers of two kinds don't add up."""
    qkv, o, gate_up, down = LLAMA_8B
    wide = SiteGroup("down.1", ("down_proj",), 2 * 14336, (4096,), layers=(0, 5))
    mixed = (qkv, o, gate_up, replace(down, layers=(1, 2, 3, 4)), wide)
    assert row_bytes(mixed, 2) - row_bytes(LLAMA_8B, 2) == 2 * 14336
    assert row_bytes(mixed, 2) == row_bytes((qkv, o, gate_up, replace(wide, layers=None)), 2)


def test_an_adapter_s_pages_count_a_site_where_it_is() -> None:
    """Layer 0 has no v_proj, layer 2 a wider down_proj."""
    groups = (
        SiteGroup("qk", ("q_proj", "k_proj"), 512, (512, 512), layers=(0,)),
        SiteGroup("qkv", ("q_proj", "k_proj", "v_proj"), 512, (512, 512, 512), layers=(1, 2)),
        SiteGroup("down", ("down_proj",), 512, (512,), layers=(0, 1)),
        SiteGroup("down.1", ("down_proj",), 1024, (512,), layers=(2,)),
    )
    tile = CHUNK * 512 * 2
    layout = ArenaLayout(groups, 3, torch.bfloat16, max_rank=8, page_bytes=2 * tile)
    assert adapter_pages(layout, 8, ("v_proj",)) == 2
    assert adapter_pages(layout, 8, ("down_proj",)) == 4  # the wide A takes a page of its own
    assert adapter_pages(layout, 8, layout.site_names) * layout.page_bytes == layout.smallest_full_bytes


def test_recorded_prompts_go_by_the_gpu_and_the_model() -> None:
    def rows(capability: tuple[int, int] | None, layers: int = REFERENCE_LAYERS, times: float = 1.0) -> int:
        return most_recorded_rows(-1, capability, layers, int(REFERENCE_WEIGHTS * times))

    assert [rows(found) for found in ((9, 0), (10, 0), (8, 0), (8, 9), None)] == [640, 640, 128, 0, 0]
    # A row takes longer by the weights; there are more launches by the layers. The nearest 64, up to 1,024.
    assert (rows((9, 0), times=1.001), rows((9, 0), times=0.999)) == (640, 640)
    assert (rows((9, 0), times=2), rows((9, 0), times=0.7), rows((9, 0), 16, 0.16)) == (
        320,
        896,
        MAX_RECORDED_ROWS,
    )
    assert (rows((9, 0), 2 * REFERENCE_LAYERS, 2), rows((8, 0), times=9)) == (640, 0)
    assert [most_recorded_rows(asked, None, 1, 1) for asked in (0, 100)] == [0, 100]


def test_decoding_is_recorded_every_16_rows_and_from_256_on_every_64() -> None:
    assert graph_sizes(3) == (1, 2, 3)
    assert graph_sizes(64) == (1, 2, 4, 8, 16, 32, 48, 64)
    large = graph_sizes(512)
    assert large[4:] == (*range(16, 256, 16), *range(256, 513, 64))
    assert graph_sizes(4096) == large
    assert graph_sizes(300)[-2:] == (256, 300)
