"""Prefixes of a drained engine process are found by another, with the same bits."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
import torch

from loraplex.engine.config import EngineConfig
from loraplex.engine.kv.cache import block_bytes
from loraplex.engine.kv.layers import CacheKind
from loraplex.engine.logprobs import join_scores
from loraplex.engine.types import EngineRequest, SamplingParams, TokenEvent
from loraplex.serving.engines.engines import Engines
from loraplex.serving.engines.local import LocalEngine
from loraplex.serving.engines.replica import Replica
from support.engine.fake_processes import until
from support.models.checkpoints import save_tiny

pytestmark = pytest.mark.slow
LLAMA = {
    "model_type": "llama", "hidden_size": 96, "num_attention_heads": 6, "head_dim": 16,
    "max_position_embeddings": 2048,
}  # fmt: skip
NUM_PROMPTS = 8
PROMPT_BLOCKS = 20


def request(name: str, number: int, tenant: str = "acme") -> EngineRequest:
    prompt = tuple(3 + (7 * number + 11 * place) % 90 for place in range(16 * PROMPT_BLOCKS + 3))
    sampling = SamplingParams(8, temperature=0.0, ignore_eos=True, logprobs=3)
    return EngineRequest(name, tenant, prompt, sampling)


async def answer(engine: LocalEngine, asked: EngineRequest) -> tuple[tuple[int, ...], bytes, int]:
    """Tokens, the bytes of their log probabilities, and the positions that were found."""
    (stream,) = engine.submit(asked)
    events: list[TokenEvent] = [event async for event in stream]
    usage = events[-1].usage
    assert usage is not None, events[-1].error
    scores = join_scores([event.scores for event in events if event.scores is not None]).output
    assert scores is not None
    tokens = tuple(token for event in events for token in event.token_ids)
    return tokens, repr(scores).encode(), usage.cached_tokens


async def start(base: Path, work: Path, kept: str) -> tuple[Engines, list[LocalEngine]]:
    one = block_bytes((CacheKind(2, 16),) * 3, torch.int8 if kept == "int8" else torch.float32)
    config = EngineConfig(
        str(base), str(work / "artifacts"), device="cpu", kernels="numba", dtype="float32",
        kv_cache_dtype=kept, kv_cache_memory=60 * one, kv_host_memory=1000 * one, adapter_memory=8 << 20,
        adapter_cpu_memory=8 << 20, max_num_seqs=4, num_threads=1, max_model_len=512, speculation="off",
    )  # fmt: skip
    sessions = [LocalEngine(config) for _ in range(2)]
    engines = Engines(Replica(name, each) for name, each in zip("ab", sessions, strict=True))
    await engines.start()
    return engines, sessions


@pytest.mark.parametrize("kept", ["auto", "int8"])
async def test_answers_behind_handed_prefixes_have_the_same_bits(kept: str, tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", LLAMA)
    engines, (one, two) = await start(base, tmp_path, kept)
    first = {n: await answer(one, request(f"first {n}", n)) for n in range(NUM_PROMPTS)}
    await answer(one, request("erased", 1, "erased"))
    engines.drain("a")
    await until(lambda: not one.hands_over)
    counts = engines.handing_over.counts
    assert counts.num_taken >= NUM_PROMPTS * PROMPT_BLOCKS
    assert counts.num_refused == 0
    await engines.forget_tenant("erased")
    for number, expected in first.items():
        tokens, scores, found = await answer(two, request(f"again {number}", number))
        assert (tokens, scores) == expected[:2]
        assert found == 16 * PROMPT_BLOCKS
    assert (await answer(two, request("stranger", 0, "stranger")))[2] == 0
    assert (await answer(two, request("erased", 1, "erased")))[2] == 0
    await engines.close()


@pytest.mark.parametrize("dies", ["drained", "taking"])
async def test_an_engine_that_dies_in_the_middle_leaves_nothing_wrong(dies: str, tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", LLAMA)
    engines, (one, two) = await start(base, tmp_path, "auto")
    first = {n: await answer(one, request(f"first {n}", n)) for n in range(NUM_PROMPTS)}
    engines.drain("a")
    await until(lambda: engines.handing_over.counts.num_taken > 0 or not one.hands_over)
    victim = one if dies == "drained" else two
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    await asyncio.wait_for(until(lambda: not one.hands_over), 20)
    left = two if dies == "drained" else one
    for number, expected in first.items():
        assert (await answer(left, request(f"again {number}", number)))[:2] == expected[:2]
    await engines.close()
