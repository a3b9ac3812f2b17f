"""Prefixes that the device's pool forgot come back from host memory with the same bits, and only for their owner."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.engine import device_parts
from loraplex.engine.execution.kv_cache import KVMemoryTooSmall
from loraplex.engine.kv import prefix_keys
from loraplex.engine.kv.cache import KVCache, block_bytes
from loraplex.engine.kv.host_blocks import HostBlocks
from loraplex.engine.kv.host_tier import HostTier
from loraplex.engine.kv.layers import CacheKind
from loraplex.engine.types import BlockCopy, BlockKey, EngineRequest, Namespace
from support.adapters.tiny_adapters import ADAPTERS, save_adapters
from support.counted_copies import CountedCopies
from support.engine.local_engine import LocalEngine
from support.engine.same_bits import Asked, Question, questions_of_owners
from support.models.checkpoints import VOCAB, save_tiny

pytestmark = pytest.mark.usefixtures("one_torch_thread")
LLAMA = {
    "model_type": "llama", "hidden_size": 96, "num_attention_heads": 6, "head_dim": 16,
    "max_position_embeddings": 2048,
}  # fmt: skip
DEVICE_BLOCKS = 16
HOST_BLOCKS = 400


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> CountedCopies:
    return CountedCopies(monkeypatch)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("host") / "base", LLAMA)


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_adapters(
        base, tmp_path_factory.mktemp("adapters"), {name: ADAPTERS[name] for name in ("all", "some")}
    )


@pytest.fixture
def make_asked(base: Path, adapters: dict[str, Path], tmp_path: Path) -> Iterator[Callable[..., Asked]]:
    made: list[Asked] = []

    def make(kv_cache_dtype: str, device_blocks: int, host_blocks: int, **settings: Any) -> Asked:
        kept = torch.int8 if kv_cache_dtype == "int8" else torch.float32
        one = block_bytes((CacheKind(2, 16),) * 3, kept)
        asked = Asked(
            base, tmp_path / str(len(made)), adapters, kernels="numba", dtype="float32",
            kv_cache_dtype=kv_cache_dtype, kv_cache_memory=device_blocks * one,
            kv_host_memory=host_blocks * one, adapter_memory=8 << 20, adapter_cpu_memory=8 << 20,
            max_num_seqs=6, num_threads=1, max_model_len=16 * min(device_blocks, 15), **settings,
        )  # fmt: skip
        made.append(asked)
        return asked

    yield make
    for asked in made:
        asked.close()


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_restored_prefixes_have_the_same_bits(
    make_asked: Callable[..., Asked],
    copied: CountedCopies,
    kv_cache_dtype: str,
    lookahead: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step restores one block beside others' work: long prefixes take several."""
    monkeypatch.setattr(device_parts, "_MOST_RESTORED", 1)
    rng = random.Random(f"{kv_cache_dtype} {lookahead}")
    lone = make_asked(kv_cache_dtype, 400, 0)
    expected = lone.each_alone(questions_of_owners(rng, 12))
    assert not copied.blocks
    crowd = make_asked(kv_cache_dtype, DEVICE_BLOCKS, HOST_BLOCKS, lookahead=lookahead)
    assert crowd.wrong_among_neighbours(expected, rng, 120) == []
    assert copied.blocks[False] > 100
    assert crowd.engine.core.stats().prefix_cache_hits > 16 * 100


def test_an_adapter_left_out_of_the_key_would_show(
    make_asked: Callable[..., Asked], monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_tenant_alone(request: EngineRequest) -> Namespace:
        return request.tenant_id, None

    rng = random.Random(1)
    lone = make_asked("auto", 400, 0)
    expected = lone.each_alone(questions_of_owners(rng, 12))
    monkeypatch.setattr(prefix_keys, "namespace", of_tenant_alone)
    crowd = make_asked("auto", DEVICE_BLOCKS, HOST_BLOCKS)
    assert crowd.wrong_among_neighbours(expected, rng, 100)


@pytest.mark.parametrize("is_erased", [False, True])
def test_blocks_of_a_deleted_version_are_not_found(
    make_asked: Callable[..., Asked], copied: CountedCopies, is_erased: bool
) -> None:
    asked = make_asked("auto", DEVICE_BLOCKS, HOST_BLOCKS)
    rng = random.Random(2)
    first, *others = (
        Question(tuple(rng.randrange(3, VOCAB) for _ in range(100)), "all", {"max_tokens": 1})
        for _ in range(6)
    )
    asked.alone("first", first)
    for number, other in enumerate(others):
        asked.alone(str(number), Question(other.prompt, None, other.sampling))
    assert copied.blocks[True] >= 6
    before = asked.engine.core.stats().prefix_cache_hits
    if is_erased:
        asked.engine.core.drop(asked._refs["all"].digest)
    asked.alone("again", first)
    assert copied.blocks[False] == (0 if is_erased else 6)
    assert asked.engine.core.stats().prefix_cache_hits - before == (0 if is_erased else 96)


def test_what_a_request_computes_on_a_version_that_was_deleted_stays_off_the_host(
    make_asked: Callable[..., Asked], copied: CountedCopies
) -> None:
    asked = make_asked("auto", DEVICE_BLOCKS, HOST_BLOCKS, max_num_batched_tokens=8)  # no block yet
    rng = random.Random(3)
    running = Question(tuple(rng.randrange(3, VOCAB) for _ in range(100)), "all", {"max_tokens": 3})
    asked.add("running", running)
    while not asked.engine.core.stats().num_running:
        asked.engine.step()
    asked.engine.core.drop(asked._refs["all"].digest)
    asked.engine.run()
    copied.blocks.clear()
    for number in range(2):
        prompt = tuple(rng.randrange(3, VOCAB) for _ in range(200))
        asked.alone(str(number), Question(prompt, None, {"max_tokens": 1}))
    asked.alone("again", running)
    assert copied.blocks[False] == 0


def test_every_copy_marks_the_heartbeat() -> None:
    """However long the copies of a step take, no watchdog takes them for a step that hangs."""
    kv, marks = KVCache((CacheKind(2, 16),), 4, torch.float32, torch.device("cpu")), list[int]()
    blocks = HostBlocks(kv, 3, lambda: marks.append(len(marks)))
    blocks.copy(
        [BlockCopy(0, 1, to_host=True), BlockCopy(2, 1, to_host=False), BlockCopy(3, 2, to_host=True)]
    )
    assert len(marks) == 3


def test_memory_for_no_block_is_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(KVMemoryTooSmall, match="--kv-host-memory of 100 bytes holds no block"):
        LocalEngine(base, tmp_path, kernels="numba", kv_host_memory=100)


def key(tenant: str, digest: str | None, number: int) -> BlockKey:
    return (tenant, digest), number.to_bytes(32, "little")


WEIGHTS = {"a": 1.0, "b": 1.0, "c": 3.0}


class Model:
    """The keys of a `HostTier` in the order in which they are looked at for a victim, and when each was used last. It
    has `size` slots, and a state takes `state_slots`."""

    def __init__(self, size: int, state_slots: int) -> None:
        self.size = size
        self.state_slots = state_slots
        self.keys: list[BlockKey] = []
        self.used: dict[BlockKey, int] = {}

    def use(self, key: BlockKey) -> None:
        self.keys = [*(other for other in self.keys if other != key), key]
        self.used[key] = max(self.used.values(), default=0) + 1

    def remove(self, key: BlockKey) -> None:
        self.keys.remove(key)
        del self.used[key]

    def oldest(self, tenant: str) -> BlockKey:
        return min((key for key in self.keys if key[0][0] == tenant), key=self.used.__getitem__)

    def slots_of(self, key: BlockKey) -> int:
        return self.state_slots if prefix_keys.is_of_state(key) else 1

    def held(self) -> Counter[str]:
        """Slots by tenant."""
        found: Counter[str] = Counter()
        for key in self.keys:
            found[key[0][0]] += self.slots_of(key)
        return found

    def make_room(self, key: BlockKey) -> bool:
        """A tenant with as much as one may take loses its own; of a full pool goes what was used least recently of the
        first tenant with more than its share, and those before that come last. False where no tenant has more, or one
        may never take so much."""
        tenant, count, most = key[0][0], self.slots_of(key), max(1, self.size // 2)
        if count > most:
            return False
        while self.held()[tenant] + count > most:
            self.remove(self.oldest(tenant))
        while self.held().total() + count > self.size:
            held = self.held()
            own = {*held}
            held[tenant] += count
            unit = self.size / sum(WEIGHTS[each] for each in held)
            over = {each for each in own if held[each] > unit * WEIGHTS[each]}
            if not over:
                return False
            place = next(place for place, key in enumerate(self.keys) if key[0][0] in over)
            victim = self.oldest(self.keys[place][0][0])
            self.keys = [*self.keys[place:], *self.keys[:place]]
            self.remove(victim)
        return True


def test_the_index_finds_what_was_written_and_loses_the_least_recently_used() -> None:
    rng = random.Random(4)
    refused = 0
    for _ in range(300):
        size, state_slots = rng.choice((1, 2, 5, 12)), rng.choice((1, 2, 3))
        tier, model = HostTier(size, state_slots), Model(size, state_slots)
        slots: dict[BlockKey, tuple[int, ...]] = {}
        for tenant, weight in WEIGHTS.items():
            tier.set_weight(tenant, weight)
        for _ in range(60):
            one = key(rng.choice("abc"), rng.choice((None, "d", "e")), rng.randrange(6))
            if rng.random() < 0.3:
                one = prefix_keys.of_state(one)
            action, is_here = rng.random(), one in model.keys
            if action < 0.1:
                tier.erase("d")
                for other in [other for other in model.keys if other[0][1] == "d"]:
                    model.remove(other)
            elif action < 0.4:
                assert tier.read(one) == (slots[one] if is_here else ())
                if is_here:
                    model.use(one)
            else:
                found = tier.write(one)
                if is_here or model.make_room(one):
                    model.use(one)
                    assert len(found) == (0 if is_here else model.slots_of(one))
                    slots[one] = found or slots[one]
                else:
                    assert not found
                    refused += 1
            assert len(tier) == model.held().total()
            assert all(other in tier for other in model.keys)
            held = [slot for other in model.keys for slot in slots[other]]
            assert len({*held}) == len(held) == len(tier)
            assert all(0 <= slot < size for slot in held)
    assert refused > 100


def test_a_tenant_within_its_share_loses_nothing_to_a_flood() -> None:
    """Shares are by weight: of 40 blocks 30 are of one with three times the other's weight."""
    tier = HostTier(40)
    tier.set_weight("heavy", 3.0)
    mine = [key("heavy", "d", number) for number in range(15)]
    for one in mine:
        tier.write(one)
    for number in range(400):
        tier.write(key(f"flood {number % 3}", None, number))
    assert all(one in tier for one in mine)
    assert len(tier) == 40
    tier.set_weight("heavy", 0.1)
    for number in range(400, 800):
        tier.write(key(f"flood {number % 3}", None, number))
    assert len([one for one in mine if one in tier]) <= 2
