"""Everything that a step may launch is compiled at the start: it takes seconds, which no request should wait for."""

from __future__ import annotations

from loraplex.engine.config import BLOCK_SIZE
from loraplex.engine.execution.packed_inputs import PackedSource
from loraplex.engine.execution.runner import ModelRunner
from loraplex.engine.types import EngineRequest, SamplingParams, ScheduledSequence, Sequence, StepPlan

_PROMPT = 17
"""Rows of a sequence that no list of decoding tiles takes, and no multiple of 16: Triton compiles for those apart."""
_RANDOM = SamplingParams(max_tokens=1, temperature=0.7, top_k=5, top_p=0.9, min_p=0.01)
_GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


def warm_up(runner: ModelRunner, source: PackedSource) -> None:
    """Run steps of made-up prompts, and launch the kernels that adapters may need. Decoding steps are
    recorded by then, and so compiled.

    For the start, before any other step: the first block of the KV cache is written to. Raises what a
    forward pass raises.
    """
    if source.lora is not None:
        source.lora.warm_up(source.dtype)
    limits = source.limits
    longest = min(_PROMPT, BLOCK_SIZE * limits.max_blocks, limits.max_rows)
    # A block may stand in a table twice: what is computed does not matter.
    table = (0,) * -(-longest // BLOCK_SIZE)
    beside = limits.max_rows > longest and limits.max_sequences > 1
    steps = [[(longest, True), (1, True)] if beside else [(longest, True)]]
    if longest >= BLOCK_SIZE:
        steps.append([(BLOCK_SIZE, True)])
    steps.append([(1, False)])
    for number, rows in enumerate(steps):
        plan = StepPlan(
            number,
            tuple(
                _slice(f"warm-up {number}.{at}", count, table, samples=samples, random=at == 0)
                for at, (count, samples) in enumerate(rows)
            ),
        )
        runner.collect(runner.submit(plan))


def _slice(
    name: str, count: int, table: tuple[int, ...], *, samples: bool, random: bool
) -> ScheduledSequence:
    tokens = (0,) * count
    request = EngineRequest(name, "", tokens, _RANDOM if random else _GREEDY)
    blocks = table[: -(-count // BLOCK_SIZE)]
    return ScheduledSequence(
        seq=Sequence(request, 0.0, 0, list(tokens)),
        epoch=0,
        start=0,
        num_tokens=count,
        token_ids=tokens,
        block_ids=blocks,
        slot=-1,
        samples=samples,
        pending_input=False,
        output_index=0,
    )
