"""What an engine is refused for before it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loraplex.adapters.errors import LoraplexError
from loraplex.engine import device_parts
from support.engine.local_engine import LocalEngine
from support.models.checkpoints import save_tiny

SIZES = {"kv_cache_memory": 1 << 20, "adapter_memory": 4 << 20, "adapter_cpu_memory": 4 << 20}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "base", {"model_type": "llama", "num_hidden_layers": 1})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"adapter_memory": 4 << 10}, r"--adapter-memory: .* at least \d+ MiB are needed"),
        ({"adapter_cpu_memory": 4 << 10}, r"--adapter-cpu-memory: .* at least \d+ MiB are needed"),
        ({"kv_cache_memory": 1 << 10}, "raise kv_cache_memory"),
        ({"kv_cache_memory": 10 << 10, "max_model_len": 500}, "raise kv_cache_memory or lower max_model_len"),
        ({"max_model_len": 10_000_000}, "512 positions"),
    ],
)
def test_sizes_that_do_not_suffice_are_named(
    base: Path, tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(LoraplexError, match=words):
        LocalEngine(base, tmp_path, num_threads=1, **{**SIZES, **settings})


@pytest.mark.parametrize("field", [{"hidden_size": "wide"}, {"num_hidden_layers": -1}, {"vocab_size": None}])
def test_a_config_of_nonsense_is_refused_with_the_field(
    base: Path, tmp_path: Path, field: dict[str, Any]
) -> None:
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | field))
    with pytest.raises(LoraplexError, match=next(iter(field))):
        LocalEngine(base, tmp_path, num_threads=1, **SIZES)


@pytest.mark.parametrize(("asked", "tokens"), [(0, 256), (48, 48)])
def test_a_step_has_256_tokens_on_a_cpu_where_nothing_else_is_asked(
    base: Path, tmp_path: Path, asked: int, tokens: int
) -> None:
    engine = LocalEngine(base, tmp_path, num_threads=1, max_num_batched_tokens=asked, **SIZES)
    assert engine.built.info.max_num_batched_tokens == tokens
    engine.add("long", [5] * 300)
    engine.step()
    assert engine.core.stats().num_kv_blocks_used == -(-tokens // 16)


@pytest.mark.parametrize(("free", "is_told"), [(6 << 20, True), (64 << 20, False)])
def test_pools_beyond_the_free_memory_are_warned_of(
    base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    free: int,
    is_told: bool,
) -> None:
    """Nothing fails at the start: the pools fill up later."""
    monkeypatch.setattr(device_parts, "free_host_memory", lambda: free)
    LocalEngine(base, tmp_path, num_threads=1, **SIZES)
    told = [record.getMessage() for record in caplog.records if "the pools want" in record.getMessage()]
    assert bool(told) is is_told
    for text in told:
        assert "--kv-cache-memory 0.0 GiB, --adapter-memory 0.0 GiB, --adapter-cpu-memory 0.0 GiB" in text
