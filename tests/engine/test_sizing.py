"""What a start chooses where no setting says."""

from __future__ import annotations

import pytest

from loraplex.engine.execution.cuda_graphs import graph_sizes
from loraplex.engine.sizing import most_sequences, most_tokens, row_bytes
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


def test_decoding_is_recorded_every_16_rows_and_from_256_on_every_64() -> None:
    assert graph_sizes(3) == (1, 2, 3)
    assert graph_sizes(64) == (1, 2, 4, 8, 16, 32, 48, 64)
    large = graph_sizes(512)
    assert large[4:] == (*range(16, 256, 16), *range(256, 513, 64))
    assert graph_sizes(4096) == large
    assert graph_sizes(300)[-2:] == (256, 300)
