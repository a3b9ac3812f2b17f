"""The KV cache's size on a device: what the largest step and the recordings leave."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.engine.execution.device_errors import DeviceOutOfMemory
from loraplex.engine.execution.device_memory import MIN_HEADROOM, headroom
from loraplex.engine.execution.kv_cache import KVMemoryTooSmall
from loraplex.engine.execution.step_preparation import StepTooLarge
from loraplex.engine.kv.cache import block_bytes
from loraplex.engine.kv.layers import CacheKind
from support.adapters.tiny_adapters import save_adapters
from support.engine.local_engine import LocalEngine
from support.models.checkpoints import save_tiny

pytestmark = pytest.mark.usefixtures("one_torch_thread", "quick_interpreter")

MIB = 1 << 20
TOTAL = 1000 * MIB
OTHERS = 50 * MIB
BLOCK = block_bytes((CacheKind(2, 8),), torch.float32)
PER_ROW, PER_LOGIT, PER_RECORDING = 1 * MIB, 2 * MIB, 8 * MIB
ROWS, SEQUENCES = 32, 3
SETTINGS: dict[str, Any] = {
    "kernels": "triton",
    "dtype": "float32",
    "max_num_seqs": SEQUENCES,
    "max_num_batched_tokens": ROWS,
    "adapter_memory": 1 << 20,
    "adapter_cpu_memory": 1 << 20,
    "num_threads": 1,
}


class FakeDevice:
    """A device's memory, its recorder, and the model on it. A pass takes memory by its rows and its logits, which torch
    keeps; a recording keeps some for as long as it is there."""

    def __init__(self, *, left: int = 0, limit: int | None = None) -> None:
        self.left, self.limit = left, limit
        self.kept = self.recordings = 0
        self.largest = (0, 0, False)
        self.log: list[str] = []

    def wrap(self, model: Any) -> Any:
        device = self

        class Model:
            def __getattr__(self, name: str) -> Any:
                return getattr(model, name)

            def forward(self, batch: Any) -> torch.Tensor:
                rows, logits = batch.token_ids.shape[0], batch.logits_rows.shape[0]
                device.log.append(f"pass of {rows} over {batch.kv.num_blocks} blocks")
                device.largest = max(device.largest, (rows, logits, batch.lora is not None))
                device.kept = max(device.kept, rows * PER_ROW + logits * PER_LOGIT)
                if device.limit is not None and rows > device.limit:
                    raise DeviceOutOfMemory("no memory")
                return model.forward(batch)

        return Model()

    def record(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        work()
        self.recordings += 1
        return work

    def forget(self) -> None:
        self.log.append("forget")
        self.recordings = 0

    def total(self) -> int:
        return TOTAL

    def free(self) -> int:
        return TOTAL - OTHERS - self.left - self.kept - self.recordings * PER_RECORDING

    def give_back(self) -> None:
        self.log.append("give back")
        self.kept = 0


def start(base: Path, work: Path, device: FakeDevice, **settings: Any) -> LocalEngine:
    return LocalEngine(
        base, work, wrap_model=device.wrap, recorder=device, memory=device, **SETTINGS | settings
    )


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "base", {"model_type": "llama", "num_hidden_layers": 1})


@pytest.mark.slow
def test_the_cache_gets_what_the_largest_step_and_the_recordings_leave(base: Path, tmp_path: Path) -> None:
    # Recordings of 1, 2 and 3 rows, and of a whole step with prompt chunks, without adapters and with. In a step
    # prompts are scored beside three samples.
    num_logits = SEQUENCES + ROWS - SEQUENCES
    workspace = 8 * PER_RECORDING + ROWS * PER_ROW + num_logits * PER_LOGIT
    rest = 20 * BLOCK + 5
    room = (
        TOTAL - OTHERS - workspace - headroom(TOTAL) - rest + 2 * BLOCK
    )  # the trial's own blocks are no workspace
    device = FakeDevice(left=room)
    engine = start(base, tmp_path / "work", device, recorded_prompt_rows=2 * ROWS)
    info = engine.built.info
    assert device.largest == (ROWS, num_logits, True)
    assert device.recordings == 8
    assert (info.recorded_decodes, info.recorded_prompts) == ((1, 2, 3), (ROWS,))
    assert info.memory is not None
    assert info.memory.workspace == workspace - 2 * BLOCK
    assert (info.num_kv_blocks, info.kv_bytes) == (20, 20 * BLOCK)
    assert info.max_model_len == 20 * 16
    assert (info.memory.kv, info.memory.total) == (20 * BLOCK, TOTAL)
    assert info.memory.others == OTHERS + room
    assert info.memory.weights > 0
    # The largest step runs in the end as well: what it takes is taken.
    assert info.memory.free == device.free() == headroom(TOTAL) + rest - 2 * BLOCK
    again = device.log[device.log.index("forget") :]
    assert again[1] == "give back"
    assert set(again[2:]) == {f"pass of {rows} over 20 blocks" for rows in (1, 2, 3, ROWS)}
    # It serves, over the cache that the recordings read.
    adapters = save_adapters(base, tmp_path)
    ref = engine.publish(adapters["all"], name="all")
    engine.add("a", range(3, 40), max_tokens=6)
    engine.add("b", range(3, 40), ref, max_tokens=6)
    engine.run()
    plain = LocalEngine(base, tmp_path / "plain", **SETTINGS, kv_cache_memory=20 * BLOCK)
    plain.add("a", range(3, 40), max_tokens=6)
    plain.add("b", range(3, 40), plain.publish(adapters["all"], name="all"), max_tokens=6)
    plain.run()
    for name in "ab":
        assert engine.tokens(name) == plain.tokens(name)
    assert plain.built.info.memory is not None
    assert (plain.built.info.memory.free, plain.built.info.memory.workspace) == (None, None)
    assert plain.built.info.memory.weights == info.memory.weights
    engine.close()
    plain.close()


def test_a_cache_that_was_asked_for_has_its_size(base: Path, tmp_path: Path) -> None:
    engine = start(base, tmp_path / "work", FakeDevice(), kv_cache_memory=9 * BLOCK)
    assert engine.built.info.num_kv_blocks == 9
    engine.close()


@pytest.mark.parametrize(
    ("device", "error", "said"),
    [
        (FakeDevice(limit=ROWS - 1), StepTooLarge, "lower --max-num-batched-tokens"),
        (
            FakeDevice(left=TOTAL - OTHERS - MIN_HEADROOM),
            KVMemoryTooSmall,
            "free memory, or set kv_cache_memory",
        ),
    ],
)
def test_a_step_that_does_not_fit_ends_the_start(
    base: Path, tmp_path: Path, device: FakeDevice, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        start(base, tmp_path / "work", device)


def test_headroom_is_a_share_and_at_least_a_bit() -> None:
    assert headroom(24 << 30) == int(0.02 * (24 << 30))
    assert headroom(4 << 30) == MIN_HEADROOM
