"""`--batch-invariant` beside the fast path, in turns, and whether it keeps its promise on the device: bits are the same
whole and in chunks, alone and beside others, recorded and not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from bench.gpu.models import random_adapter
from bench.gpu.rig import Rig, RigSize
from bench.gpu.steps import FULL, SMALL, StepBench, StepsShape
from bench.gpu.stopwatch import Stopwatch
from bench.gpu.timing import Ceilings

FULL_INVARIANT = replace(
    FULL,
    size=RigSize(
        max_rows=2048, max_sequences=64, max_len=1040, sizes=(1, 16, 64), arena_bytes=6 << 30, slots=64, max_rank=16
    ),
)  # fmt: skip
"""Two models of it fit a GPU with 80 GB."""
SMALL_INVARIANT = replace(SMALL, size=replace(SMALL.size, max_sequences=4, sizes=(4,), slots=4))


@dataclass(frozen=True)
class _Text:
    """Tokens of one sequence, `prompt` of them its prompt; the rest is decoded."""

    tokens: list[int]
    prompt: int
    slot: int


class InvariantBench:
    """The same random model twice: as a server runs it without the setting, and with it."""

    def __init__(self, shape: StepsShape, device: torch.device, ceilings: Ceilings) -> None:
        self._watch = Stopwatch(device)
        self._fast = StepBench(shape, device, ceilings)
        self._invariant = StepBench(replace(shape, batch_invariant=True), device, ceilings)

    def decode(self, rows: int, adapters: int, rank: int) -> dict[str, Any]:
        """Times of one recorded step. `base_ratio`, `lora_ratio`: what is left of the fast path's speed."""
        return {"rows": rows, "adapters": adapters, "rank": rank} | self._compare(
            lambda bench: bench.decoding_runs(rows, adapters, rank), rounds=15, times=3
        )

    def prompt(self, tokens: int, rank: int) -> dict[str, Any]:
        """The same of a prompt by itself, launched one by one."""
        return {"rows": tokens, "adapters": int(rank > 0), "rank": rank} | self._compare(
            lambda bench: bench.prompt_runs(tokens, rank), rounds=7, times=1
        )

    def _compare(
        self, runs_of: Callable[[StepBench], list[Callable[[], torch.Tensor]]], *, rounds: int, times: int
    ) -> dict[str, Any]:
        fast, invariant = runs_of(self._fast), runs_of(self._invariant)
        with torch.inference_mode():
            taken = self._watch.interleaved_ms([*fast, *invariant], rounds=rounds, times=times)
        found: dict[str, Any] = {}
        for name, before, after in zip(("base", "lora"), taken, taken[len(fast) :], strict=False):
            found |= {f"{name}_ms": before, f"{name}_invariant_ms": after, f"{name}_ratio": before / after}
        return found

    def bits(self, prompt: int, decoded: int, rank: int) -> list[dict[str, Any]]:
        """A text of the base, and one of an adapter: alone, whole and not recorded; then in chunks, beside others, and
        recorded."""
        rig = self._invariant.rig
        device = self._invariant.device
        rig.fill([random_adapter(rig.layout, rank, device, seed=seed) for seed in (1, 2)])
        found = []
        for slot in (-1, 0):
            text = _Text([(7 * at + slot) % 97 + 5 for at in range(prompt + decoded)], prompt, slot)
            alone, beside = _alone(rig, text), _beside(rig, text)
            found.append(
                {
                    "case": "bits: base" if slot < 0 else f"bits: rank {rank}",
                    "differing": int((alone != beside).sum()),
                    "ok": torch.equal(alone, beside) and bool(alone.isfinite().all()),
                }
            )
        return found


def _alone(rig: Rig, text: _Text) -> torch.Tensor:
    """[1 + decoded, V]: logits at the end of the prompt and of each token behind it but the last."""
    steps = [rig.logits([rig.rows(0, 0, text.tokens[: text.prompt], text.slot)], eager=True)]
    for at in range(text.prompt, len(text.tokens)):
        steps.append(rig.logits([rig.rows(0, at, [text.tokens[at]], text.slot)], eager=True))
    return torch.cat(steps)


def _beside(rig: Rig, text: _Text) -> torch.Tensor:
    """The same in the second place of the cache, beside prompts and decodes of others in the first and the third."""
    place, cuts = 1, (0, text.prompt // 3, text.prompt // 3 + 1, text.prompt)
    steps = []
    for number, (first, last) in enumerate(itertools.pairwise(cuts)):
        ends = last == text.prompt
        others = [rig.rows(other, 3 * number, [9, 8, 7], other - 1, samples=ends) for other in (0, 2)]
        own = rig.rows(place, first, text.tokens[first:last], text.slot, samples=ends)
        logits = rig.logits([others[0], own, others[1]])
        if ends:
            steps.append(logits[1:2])
    for at in range(text.prompt, len(text.tokens)):
        others = [rig.rows(other, 9 + at - text.prompt, [6], other - 1) for other in (0, 2)]
        own = rig.rows(place, at, [text.tokens[at]], text.slot)
        steps.append(rig.logits([others[0], own, others[1]])[1:2])
    return torch.cat(steps)
