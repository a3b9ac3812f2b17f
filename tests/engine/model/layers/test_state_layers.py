"""Layers that keep a state, on the real runner, cache and engine core: a recurrence that a test can compute by hand."""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, PretrainedConfig

from loraplex.engine.config import SchedulerConfig
from loraplex.engine.core.engine_core import EngineCore
from loraplex.engine.execution.batch import StepRows
from loraplex.engine.execution.executor import Executor
from loraplex.engine.execution.inputs import PlainInputs
from loraplex.engine.execution.kv_cache import KVMemoryTooSmall, KVSize, size_kv_cache
from loraplex.engine.execution.runner import ModelRunner
from loraplex.engine.kv.cache import KVCache, block_bytes
from loraplex.engine.kv.layers import CacheKind, layer_groups
from loraplex.engine.kv.states import slot_bytes
from loraplex.engine.model.base import ForwardBatch, ModelShape
from loraplex.engine.model.families import table
from loraplex.engine.model.families.rows import Family, LayerRow
from loraplex.engine.model.layer_kinds import MixerKind
from loraplex.engine.model.layers import mixers
from loraplex.engine.model.layers.adapted_linears import Linear
from loraplex.engine.model.layers.mixers import Mixer
from loraplex.engine.model.layers.tensors import LayerTensors
from loraplex.engine.types import EngineRequest, SamplingParams, ScheduledSequence, StepPlan
from loraplex.kernels.attention.torch_attention import TorchAttention
from loraplex.kernels.lora.site_groups import SiteGroup
from support.engine.fake_transport import FakeTransport, make_cache
from support.engine.local_engine import LocalEngine
from support.simulator.core_integrity import check_core

VOCAB = 61
CPU = torch.device("cpu")
CACHES = (CacheKind(1, 8, state_bytes=8), CacheKind(1, 8), CacheKind(0, 0, state_bytes=4))
"""A layer with blocks and a state, one with blocks, one with a state."""


def recur(state: int, x: int, layer: int) -> int:
    """s ← a·s + x, of a layer of its own a."""
    return ((5, 0, 3)[layer] * state + x) % 10_007


def alone(prompt: tuple[int, ...], count: int) -> list[int]:
    """The greedy answer to a prompt that nothing runs beside."""
    first = last = 0
    tokens = list(prompt)
    for place in range(len(prompt) + count - 1):
        first = recur(first, tokens[place], 0)
        last = recur(last, first, 2)
        if place >= len(prompt) - 1:
            tokens.append(last % VOCAB)
    return tokens[len(prompt) :]


class Scripted:
    """A model of CACHES whose next token is its last layer's state. `fails` are numbers of passes that end between its
    layers, for want of memory."""

    shape = ModelShape(CACHES, VOCAB, 512)
    num_layers, hidden_size, dtype, device = len(CACHES), None, torch.float32, CPU
    attention = TorchAttention(1, 8, torch.float32, CPU)
    site_groups, head_group, embedding_shape, num_weights, weight_bytes = (), None, None, 0, 0

    def __init__(self, fails: frozenset[int] = frozenset()) -> None:
        self._fails = fails
        self.num_passes = 0

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        self.num_passes += 1
        x = self._layer(0, torch.int64, batch, batch.token_ids)
        if self.num_passes in self._fails:
            raise torch.OutOfMemoryError("the device is out of memory")
        x = self._layer(2, torch.int32, batch, x)
        return torch.nn.functional.one_hot(x[batch.logits_rows] % VOCAB, VOCAB).float()

    def _layer(self, index: int, dtype: torch.dtype, batch: ForwardBatch, x: torch.Tensor) -> torch.Tensor:
        assert batch.states is not None
        rows, first = batch.states, 0
        states = batch.kv.state(index)[:, : CACHES[index].state_bytes].view(dtype)
        out = x.clone()
        for slot, end in zip(rows.slots.tolist(), rows.ends.tolist(), strict=True):
            for row in range(first, end):
                states[slot, 0] = out[row] = recur(int(states[slot, 0]), int(x[row]), index)
            first = end
        assert first == len(x)
        return out


@pytest.mark.parametrize("lookahead", [0, 1])
def test_answers_are_those_of_sequences_alone(lookahead: Literal[0, 1]) -> None:
    """On few blocks and slots full of what others left, with preemption, aborts and steps that fail half-way."""
    num_blocks, num_states = 14, 5
    model = Scripted(frozenset({9, 10, 40, 75, 120}))
    kv = KVCache(CACHES, num_blocks, torch.float32, CPU, num_states)
    kv.states.fill_(0xA5)
    runner = ModelRunner(model, kv, Executor(), eos_ids=frozenset())
    config = SchedulerConfig(num_blocks, 200, 8, 40, 100, lookahead, num_states=num_states)
    core = EngineCore(
        config,
        runner,
        make_cache(FakeTransport(time.monotonic, 1)),
        eos_ids=frozenset(),
        clock=time.monotonic,
    )
    rng = random.Random(lookahead)
    start = tuple(rng.randrange(VOCAB) for _ in range(35))
    asked = {
        f"r{number}": (*start[: rng.choice((0, 16, 35))], *(rng.randrange(VOCAB) for _ in range(9)))
        for number in range(14)
    }
    for number, (name, prompt) in enumerate(asked.items()):
        sampling = SamplingParams(40, temperature=0.0)
        core.add_request(EngineRequest(name, f"t{number % 3}", prompt, sampling))
    answers: dict[str, list[int]] = {name: [] for name in asked}
    ended: dict[str, Any] = {}
    while core.has_work:
        for event in core.step():
            answers[event.request_id] += event.token_ids
            ended[event.request_id] = event.finish_reason
        check_core(core)
        for name in ("r3", "r7"):
            if len(answers[name]) >= 5:
                core.abort(name)
    runner.close()
    assert core.stats().num_preemptions > 0
    assert core.stats().num_out_of_memory >= 3
    assert core.stats().prefix_cache_hits == core.stats().num_states_used == 0
    for name, prompt in asked.items():
        assert answers[name] == alone(prompt, 40)[: len(answers[name])], name
        assert ended[name] == ("abort" if name in ("r3", "r7") else "length"), name


def test_a_layer_has_its_part_of_each_slot_and_blocks_where_it_keeps_keys() -> None:
    kv = KVCache(CACHES, 3, torch.float32, CPU, num_states=4)
    assert [tuple(kv.state(index).shape) for index in range(3)] == [(4, 64), (4, 0), (4, 64)]
    assert layer_groups(CACHES)[0].layers == (0, 1)
    assert kv.num_bytes == 3 * block_bytes(CACHES, torch.float32) + 4 * slot_bytes(CACHES)
    kv.state(0).fill_(1)
    kv.state(2).fill_(2)
    kv.clear_states(torch.tensor([1, 3]))
    assert kv.states.sum(1).tolist() == [64 * 3, 0, 64 * 3, 0]
    assert KVCache(CACHES[1:2], 3, torch.float32, CPU).states.numel() == 0


def test_slots_are_sized_beside_the_blocks() -> None:
    shape = ModelShape((CacheKind(2, 8), CacheKind(0, 0, state_bytes=1 << 20)), VOCAB, 1 << 15)
    block, slot = 16 * 2 * 2 * 8 * 4, 1 << 20
    assert (block_bytes(shape.caches, torch.float32), slot_bytes(shape.caches)) == (block, slot)

    def size(memory: int, **asked: int) -> tuple[int, int, int]:
        found = size_kv_cache(
            shape, torch.float32, CPU, kv_cache_memory=memory, max_num_seqs=8, most_ahead=64, **asked
        )
        assert found.num_bytes == found.num_blocks * block + found.num_states * slot <= memory
        return found.num_states, found.num_blocks, found.max_model_len

    assert size(100 << 20) == (8, 8 * (1 << 15) // 16, 1 << 15)
    assert size(8 << 20) == (4, (4 << 20) // block, 1 << 15)  # not more than half
    assert size(2 << 20) == (1, (1 << 20) // block, 16 * ((1 << 20) // block))
    need = 1024 // 16 * block + slot
    assert size(need, max_model_len=1024) == (1, 64, 1024)
    with pytest.raises(KVMemoryTooSmall, match=f"a sequence of 1024 needs {need / (1 << 20):.1f} MiB"):
        size(need - 1, max_model_len=1024)
    with pytest.raises(KVMemoryTooSmall, match="room for 0 tokens"):
        size(slot - 1)


def test_windows_and_snapshots_are_sized_beside_the_blocks() -> None:
    shape = ModelShape(
        (CacheKind(2, 8), CacheKind(0, 0, state_bytes=1 << 20, window_bytes=64)), VOCAB, 1 << 10
    )

    def size(state_cache: int) -> KVSize:
        return size_kv_cache(
            shape, torch.float32, CPU, kv_cache_memory=40 << 20, state_cache=state_cache, max_num_seqs=8,
            max_model_len=1024, most_ahead=64,
        )  # fmt: skip

    for asked, snapshots in ((1, 1), (5 << 20, 5), (1 << 40, 31)):
        assert size(asked).num_states == 8 + snapshots, asked
    found = size(0)
    block = block_bytes(shape.caches, torch.float32)
    assert (found.num_windows, found.num_states) == (8, 8 + 7)  # a quarter of what is left
    assert found.num_bytes == found.num_blocks * block + 15 * (1 << 20) + 8 * 64 <= 40 << 20
    kv = KVCache(shape.caches, 3, torch.float32, CPU, found.num_states, found.num_windows)
    assert (kv.state(1).shape, kv.window(1).shape) == ((15, 1 << 20), (8, 64))
    assert kv.num_bytes == 3 * block + 15 * (1 << 20) + 8 * 64


def test_two_slices_of_a_sequence_are_one_unit() -> None:
    def part(
        name: str, start: int, count: int, slot: int, state: int, targets: tuple[int, ...]
    ) -> ScheduledSequence:
        request = EngineRequest(name, "t", (1,) * 40, SamplingParams(4))
        return ScheduledSequence(
            request, 0, 0, start, count, (1,) * count, (0, 1, 2), slot, False, False, 0,
            state_slot=ord(name) - ord("a"), state=state, state_targets=targets,
        )  # fmt: skip

    plan = StepPlan(
        1, (part("a", 0, 18, -1, 4, (5,)), part("b", 20, 1, -1, 2, ()), part("a", 18, 15, 0, 5, (6,)))
    )
    inputs = PlainInputs(CPU, TorchAttention(1, 8, torch.float32, CPU), NoAdapters())
    recurrent = StepRows(plan, VOCAB).send(inputs).recurrent
    assert recurrent is not None
    first, second = recurrent.units
    assert (first.rows, first.start, first.window, first.state) == ((*range(18), *range(19, 34)), 0, 0, 4)
    assert (tuple(first.targets), list(second.rows), second.start) == ((5, 6), [18], 20)


class NoAdapters:
    """An arena without an adapter."""

    def lora_pass(self, segments: Any, num_rows: int) -> None:
        return None

    head_pass = lora_pass

    def token_pass(self, *given: Any) -> None:
        return None


class Decay(MixerKind, frozen=True):
    """A mixer of a family: s ← a·s + W x, channel by channel."""

    a: float


class DecayWeights(NamedTuple):
    x: Linear
    o: Linear


SEEN: list[tuple[torch.Tensor, torch.Tensor]] = []
"""What each call of the mixer read and gave."""


def decay_groups(kind: Decay, hidden: int) -> tuple[SiteGroup, SiteGroup]:
    return SiteGroup("in", ("in_proj",), hidden, (hidden,)), SiteGroup("o", ("out_proj",), hidden, (hidden,))


def read_decay(
    kind: Decay, tensors: LayerTensors, prefix: str, layer: int, x: SiteGroup, o: SiteGroup
) -> DecayWeights:
    return DecayWeights(*(tensors.linear(f"{prefix}decay.", layer, group, bias=False) for group in (x, o)))


def run_decay(
    kind: Decay,
    weights: DecayWeights,
    x: torch.Tensor,
    cos_sin: Any,
    batch: ForwardBatch,
    linears: Any,
    kernel: Any,
    scaling: Any,
) -> torch.Tensor:
    y = linears.apply(weights.x, x, batch)
    states, rows, first = batch.kv.state(weights.x.layer).view(torch.float32), batch.states, 0
    assert rows is not None
    out = torch.empty_like(y)
    for slot, end in zip(rows.slots.tolist(), rows.ends.tolist(), strict=True):
        for row in range(first, end):
            out[row] = states[slot, : y.shape[1]] = kind.a * states[slot, : y.shape[1]] + y[row]
        first = end
    SEEN.append((y, out))
    return out


HIDDEN = 16
CONFIG = {
    "model_type": "decays", "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 3,
    "layer_types": ["decay", "full_attention", "decay"], "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 8, "intermediate_size": 24, "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 256,
    "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
}  # fmt: skip


class DecaysConfig(PretrainedConfig):  # type: ignore[misc]
    model_type = "decays"


@pytest.fixture
def decays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of a family that is one row, with a mixer of its own."""
    plain = LayerRow(qkv_bias=False, o_bias=False, mlp_bias=False)
    own = replace(plain, mixer=lambda config: Decay(CacheKind(0, 0, state_bytes=4 * HIDDEN), 0.5))
    monkeypatch.setitem(table.FAMILIES, "decays", Family({"full_attention": plain, "decay": own}))  # type: ignore[arg-type]
    monkeypatch.setitem(mixers.MIXERS, Decay, Mixer(decay_groups, read_decay, run_decay))  # type: ignore[arg-type]
    AutoConfig.register("decays", DecaysConfig, exist_ok=True)
    shapes = {"model.embed_tokens": (VOCAB, HIDDEN), "model.norm": (HIDDEN,)}
    for index, kind in enumerate(CONFIG["layer_types"]):  # type: ignore[arg-type]
        mixer = {"decay.in_proj": (HIDDEN, HIDDEN), "decay.out_proj": (HIDDEN, HIDDEN)}
        if kind == "full_attention":
            heads = {"q": (16, HIDDEN), "k": (8, HIDDEN), "v": (8, HIDDEN), "o": (HIDDEN, 16)}
            mixer = {f"self_attn.{name}_proj": shape for name, shape in heads.items()}
        mlp = {"mlp.gate_proj": (24, HIDDEN), "mlp.up_proj": (24, HIDDEN), "mlp.down_proj": (HIDDEN, 24)}
        norms = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (HIDDEN,))
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in (mixer | mlp | norms).items()}
    generator = torch.Generator().manual_seed(0)
    weights = {
        f"{name}.weight": torch.randn(shape, generator=generator) * 0.4 + (len(shape) == 1)
        for name, shape in shapes.items()
    }
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_a_family_with_a_layer_that_keeps_a_state(decays: Path, tmp_path: Path) -> None:
    """As a start builds it: one row of the table and one mixer, and nothing else knows of it. Sizes, the warm-up and
    the reports count its states; answers are those of sequences alone."""
    settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 96, "num_threads": 1, "max_step_ms": -1}
    settings |= {"adapter_memory": 1 << 20, "adapter_cpu_memory": 1 << 20, "speculation": "auto"}
    rng = random.Random(7)
    asked = {f"r{i}": [rng.randrange(VOCAB) for _ in range(rng.choice((2, 9, 40)))] for i in range(8)}
    memory = 16 * 2 * 8 * 4 * 14 + 4 * 128
    few = LocalEngine(
        decays,
        tmp_path / "few",
        max_num_seqs=4,
        max_num_batched_tokens=24,
        kv_cache_memory=memory,
        **settings,
    )
    info = few.built.info
    assert (info.num_states, info.num_kv_blocks, info.kv_bytes) == (4, 14, memory)
    assert "rejected token" in info.speculation_reason
    for name, prompt in asked.items():
        few.add(name, prompt, max_tokens=40)
    few.run()
    stats = few.core.stats()
    assert stats.num_preemptions > 0
    assert stats.prefix_cache_hits == stats.num_states_used == 0
    few.close()
    alone = LocalEngine(decays, tmp_path / "alone", max_num_seqs=1, kv_cache_memory=1 << 20, **settings)
    for name, prompt in asked.items():
        SEEN.clear()
        alone.add(name, prompt, max_tokens=40)
        alone.run()
        assert few.tokens(name) == alone.tokens(name), name
        for layer in range(2):
            read, gave = (torch.cat(parts) for parts in zip(*SEEN[layer::2], strict=True))
            state = torch.zeros(HIDDEN)
            for row in range(len(read)):
                state = 0.5 * state + read[row]
                assert torch.equal(gave[row], state)
    alone.close()
