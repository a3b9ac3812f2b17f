"""Everything that a step may launch is compiled at the start: it takes seconds, which no request should wait for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loraplex.engine.execution.inputs import StepLimits
from loraplex.engine.execution.runner import ModelRunner
from loraplex.engine.kv.layers import blocks_for
from loraplex.engine.pooling import Pooling
from loraplex.engine.types import EngineRequest, SamplingParams, ScheduledSequence, StepPlan
from loraplex.kernels.attention import BLOCK_SIZE

if TYPE_CHECKING:
    from loraplex.engine.execution.packed_inputs import PackedSource

_PROMPT = 17
"""Rows of a sequence that no list of decoding tiles takes, and no multiple of 16: Triton compiles for those apart."""
_EVERY_OPTION = SamplingParams.every_option(max_tokens=1)
_RANDOM = SamplingParams(max_tokens=1)
_GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
_NOTHING = SamplingParams(max_tokens=0)
_GOLDEN = 0.6180339887498949
"""Multiples of the golden ratio, modulo 1, are spread evenly however many there are."""


def warm_up(runner: ModelRunner, source: PackedSource, *, pools: bool) -> None:
    """Run steps of made-up prompts, and launch the kernels that adapters may need. What is recorded is compiled by
    then; the steps here launch their kernels one by one, as steps do that no recording serves. The sampler has launched
    its kernels in all of their forms. The steps here also load what torch itself loads when it is first used: log
    probabilities, and with `pools` pooling.

    For the start, before any other step: the first block of the KV cache is written to. Raises what a
    forward pass raises.
    """
    if source.lora is not None:
        source.lora.warm_up(source.dtype)
    limits = source.limits
    longest = min(_PROMPT, BLOCK_SIZE * limits.max_blocks, limits.max_rows)
    beside = limits.max_rows > longest and limits.max_sequences > 1
    first = [made_up_slice(runner, longest, _EVERY_OPTION, num_scored=longest - 1)]
    pooled = [made_up_slice(runner, longest, _NOTHING, pooling="mean")]
    if beside:
        first.append(made_up_slice(runner, 1, _GREEDY, place=1))
        pooled.append(made_up_slice(runner, 1, _NOTHING, pooling="last", place=1))
    steps = [first]
    if longest >= BLOCK_SIZE:
        steps.append([made_up_slice(runner, BLOCK_SIZE, _RANDOM)])
    steps.append([made_up_slice(runner, 1, _GREEDY, samples=False)])
    if pools:
        steps.append(pooled)
    for number, slices in enumerate(steps):
        with source.unrecorded():
            step = runner.submit(StepPlan(number, tuple(slices)))
        runner.collect(step)


def run_largest_step(runner: ModelRunner, limits: StepLimits, *, max_scored: int, slot: int) -> None:
    """Run a step of as many rows and sequences as one may have, on the adapter in `slot`, each of them sampled with
    every option, and `max_scored` positions of prompts scored. One of them has the longest past that there is: some
    attention gathers it. Writes as `warm_up` does. Raises DeviceOutOfMemory where it does not fit."""
    longest = BLOCK_SIZE * limits.max_blocks
    num_sequences = min(limits.max_sequences, limits.max_rows)
    rest = limits.max_rows - num_sequences
    slices = []
    for number in range(num_sequences):
        more = min(rest, longest - 1)
        rest -= more
        scored = min(more, max_scored)
        max_scored -= scored
        slices.append(
            made_up_slice(
                runner,
                1 + more,
                _EVERY_OPTION,
                name=f"largest {number}",
                place=number,
                slot=slot,
                start=0 if number else longest - 1 - more,
                num_scored=scored,
            )
        )
    runner.collect(runner.submit(StepPlan(0, tuple(slices))))


def made_up_slice(
    runner: ModelRunner,
    count: int,
    sampling: SamplingParams,
    *,
    samples: bool = True,
    pooling: Pooling | None = None,
    name: str = "made up",
    place: int = 0,
    slot: int = -1,
    start: int = 0,
    num_scored: int = 0,
    drafted: int = 0,
    vocab_size: int = 1,
) -> ScheduledSequence:
    """A prompt of `count` tokens, spread evenly over a vocabulary of `vocab_size`, behind `start` others. `num_scored`
    positions of it are scored; its last `drafted` tokens are drafts. `place`: its own in the batch, where layers keep
    states."""
    ends = (start + count) // BLOCK_SIZE - start // BLOCK_SIZE
    place = place % runner.num_windows if runner.num_windows else -1
    tokens = tuple(int(index * _GOLDEN % 1.0 * vocab_size) for index in range(count))
    return ScheduledSequence(
        request=EngineRequest(name, "", tokens, sampling, pooling=pooling),
        order=0,
        epoch=0,
        start=start,
        num_tokens=count,
        token_ids=tokens,
        # A block may stand in a table twice: what is computed does not matter.
        block_ids=(0,) * (blocks_for(start + count) * runner.num_groups),
        slot=slot,
        samples=samples and pooling is None,
        pending_input=False,
        output_index=0,
        score_start=start,
        targets=tokens[:num_scored],
        pool_start=None if pooling is None else 0,
        drafted=tokens[count - drafted :],
        window_slot=place,
        state=place,
        state_targets=(place,) * ends if runner.num_windows else (),
    )
