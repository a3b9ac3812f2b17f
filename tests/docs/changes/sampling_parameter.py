"""`max_gap`, a new sampling parameter, from a request's body to the draws of all three samplers."""

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from loraplex.api.openai.parsing import parse_request
from loraplex.api.openai.schemas import ChatRequest
from loraplex.engine.execution.inputs import PlainInputs
from loraplex.engine.sampling.sampled_row import SampledRow
from loraplex.engine.sampling.sampler import make_sampler
from loraplex.engine.types import EngineRequest, SamplingParams, ScheduledSequence
from loraplex.kernels.backend import make_kernels

CPU = torch.device("cpu")
asked = parse_request(
    ChatRequest, {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_gap": 1.5, "seed": 1}
)
SLICE = (0, 0, 0, 1, (0,), (0,), -1, True, False)


def drawn(backend: str, params: list[SamplingParams]) -> set[int]:
    rows = [
        SampledRow(ScheduledSequence(EngineRequest(str(n), "t", (1,), each), *SLICE, output_index=n))
        for n, each in enumerate(params)
    ]
    sampler = make_sampler(make_kernels(backend, CPU), vocab_size=4, max_rows=len(rows))
    batch = sampler.plan(rows, eos_ids=frozenset(), upload=PlainInputs(CPU))
    logits = torch.tensor([[0.0, 2.0, 1.0, 0.4]] * len(rows))
    return set(sampler.sample(logits, batch, torch.zeros(len(rows), dtype=torch.int64))[0].tolist())


for backend in ("torch", "numba", "triton"):
    assert drawn(backend, [asked.sampling(max_tokens=64)] * 64) == {1, 2}, backend
    assert drawn(backend, [SamplingParams(64, seed=1)] * 64) == {0, 1, 2, 3}, backend
assert SamplingParams.every_option(1).max_gap
