"""The real model: the bits of answers alone, and among random neighbours on other adapters, with drafts too."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.kernels.attention import BLOCK_SIZE
from loraplex.kernels.attention.numba_attention import SPAN
from loraplex.kernels.linear import numba_dense
from support.engine.same_bits import Answer, Asked, PlantedDrafter, Question
from support.servers.live_server import write_real_adapter

pytestmark = [pytest.mark.soak, pytest.mark.usefixtures("one_torch_thread")]

SITES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NUM_ADAPTERS, RANK = 4, 8


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("adapters")
    return {
        f"a{number}": write_real_adapter(
            out / f"a{number}", rank=RANK, targets=SITES, seed=number, scale=0.01
        )
        for number in range(NUM_ADAPTERS)
    }


@pytest.fixture
def made() -> Iterator[list[Asked]]:
    engines: list[Asked] = []
    yield engines
    for asked in engines:
        asked.close()


def test_all_have_the_same_bits(
    real_model_dir: Path, adapters: dict[str, Path], made: list[Asked], tmp_path: Path
) -> None:
    if not numba_dense.is_for(torch.bfloat16):
        pytest.skip("on this processor a library multiplies in bfloat16")
    rng = random.Random(0)
    names = [None, *adapters]

    def question(number: int) -> Question:
        prompt = tuple(rng.randrange(100, 40_000) for _ in range(rng.choice([3, 20, 64, 150])))
        options = {"temperature": 1.0, "seed": number} if number % 2 else {"logprobs": 2}
        return Question(prompt, names[number % len(names)], {"max_tokens": 12, **options})

    def engine(name: str, **settings: Any) -> Asked:
        common: dict[str, Any] = {
            "kernels": "numba",
            "num_threads": 1,
            "dtype": "bfloat16",
            "max_model_len": 512,
        }
        common |= {"kv_cache_memory": 128 << 20, "adapter_memory": 64 << 20}
        asked = Asked(real_model_dir, tmp_path / name, adapters, **(common | settings))
        made.append(asked)
        return asked

    count = 24
    probes = [question(number) for number in range(count)]
    others = [question(number) for number in range(count, 2 * count - 4)]
    lone = engine("lone", max_num_batched_tokens=512)
    expected = {probe: lone.alone(str(number), probe) for number, probe in enumerate(probes)}
    # Room for two adapters, so that they are evicted and loaded again.
    crowd = engine("crowd", max_num_batched_tokens=70, lookahead=1, adapter_memory=12 << 20)
    equal: dict[Question, bool] = {}

    def check(question: Question, answer: Answer) -> None:
        if question in expected:
            equal[question] = answer == expected[question]

    asked = [*probes, *others]
    rng.shuffle(asked)
    crowd.among_neighbours(asked, rng, check)
    assert sum(equal.values()) == len(equal) == count
    assert crowd.engine.core.stats().device_evictions > 0

    drafter = PlantedDrafter(rng, 40_000, span=SPAN, block=BLOCK_SIZE)
    drafting = engine("drafting", max_num_batched_tokens=70, drafter=drafter)
    drafter.plan({f"q{number}": expected[probe].tokens for number, probe in enumerate(probes)})
    equal.clear()
    drafting.among_neighbours(probes, rng, check)
    assert sum(equal.values()) == len(equal) == count
    assert set(+drafter.seen) >= {"drafted", "accepted", "rejected", "across blocks"}
