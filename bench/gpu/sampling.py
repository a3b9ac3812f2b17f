"""Sampling on a GPU: right against a sort, how near its floor, and beside the sampler of torch operations.

Each case function gives a dict. Without a GPU it runs interpreted, and gives no times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bench.gpu.timing import Ceilings, eager_ms, median_ms, relative_error
from loraplex.engine.execution.inputs import PlainInputs
from loraplex.engine.sampling.batch import RowMemory, build_sample_rows
from loraplex.engine.sampling.noise import uniform
from loraplex.engine.sampling.sampler import sample
from loraplex.engine.types import SamplingParams, ScheduledSequence
from loraplex.kernels.sampling.triton_logsumexp import log_sum_exp
from loraplex.kernels.sampling.triton_sampling import TritonSampling
from loraplex.kernels.sampling.types import TokenMasks
from support.engine.sampling import EOS, cuts, reference_weights, row

LLAMA, QWEN, GEMMA = 128256, 151936, 262144
_EDGE = 1e-5
"""How far beyond its share of [0, 1) a token may be drawn: what float32 weights leave open."""
_CHECKED = 32
"""Rows of a case that are compared with float64."""


@dataclass(frozen=True)
class SamplingCase:
    """`options` of SamplingParams, one set for each row in turn. `spread`: the logits' standard deviation; `peaked`:
    how many tokens of each row stand out, as a trained model's do. `history`: output tokens a row. `masked`: a grammar
    allows every second row one token of ten."""

    name: str
    rows: int
    vocab_size: int
    options: Sequence[dict[str, Any]] = field(default=({},))
    spread: float = 2.0
    peaked: int = 50
    history: int = 8
    masked: bool = False


def run_case(case: SamplingCase, device: torch.device, ceilings: Ceilings | None = None) -> dict[str, Any]:
    """`ok`: of up to 32 rows, each token is the one that the row's uniform number falls on in float64, and a second
    draw gives the same; `wrong` are not. With `ceilings` it is timed. `floor_ms`: one read of the logits. `torch_ms`:
    of the sampler of torch operations, launched one by one, with the copy of the logits that it spoils."""
    logits, rows = _logits(case), _rows(case)
    memory = RowMemory(case.vocab_size)
    options = build_sample_rows(
        rows, vocab_size=case.vocab_size, eos_ids=EOS, memory=memory, upload=PlainInputs(device)
    )
    x = logits.to(device)
    last = torch.zeros(case.rows, dtype=torch.int64, device=device)
    sampling = TritonSampling(case.rows, case.vocab_size, device)
    allowed = np.random.default_rng(2).random((case.rows, case.vocab_size)) < 0.1
    masks = (_masks(allowed, device),) if case.masked else ()
    tokens, ok = sampling.draw(x.clone(), options, last, *masks)
    wrong = 0
    for s in range(0, case.rows, -(-case.rows // _CHECKED)):
        mask = allowed[s] if case.masked and s % 2 else None
        wrong += not _is_right(logits[s].numpy(), rows[s], int(tokens[s]), mask)
    again, _ = sampling.draw(x.clone(), options, last, *masks)
    right = bool(ok.all()) and wrong == 0 and torch.equal(tokens, again)
    result: dict[str, Any] = {"case": case.name, "ok": right, "wrong": wrong}
    if ceilings is None:
        return result
    num_bytes = 4 * case.rows * case.vocab_size
    floor = ceilings.floor_ms(num_bytes)
    # Drawing again from what penalties and biases have changed takes as long.
    ms = median_ms(lambda: sampling.draw(x, options, last, *masks), device)
    result |= {"bytes": num_bytes, "floor_ms": floor, "graph_ms": ms}
    if ms is not None:
        result["times_floor"] = ms / floor
        result["torch_ms"] = eager_ms(lambda: sample(x.clone(), options, last), device)
    return result


def log_sum_exp_case(
    rows: int, vocab_size: int, device: torch.device, ceilings: Ceilings | None = None
) -> dict[str, Any]:
    """The normaliser of log probabilities, against float64 and torch's."""
    case = SamplingCase("", rows, vocab_size)
    x = _logits(case).to(device)
    error = relative_error(log_sum_exp(x), x.double().logsumexp(-1, keepdim=True))
    result: dict[str, Any] = {
        "case": f"log-sum-exp {rows} × {vocab_size}",
        "error": error,
        "ok": error <= 1e-6,
    }
    if ceilings is None:
        return result
    num_bytes = 4 * rows * vocab_size
    floor = ceilings.floor_ms(num_bytes)
    ms = median_ms(lambda: log_sum_exp(x), device)
    result |= {"bytes": num_bytes, "floor_ms": floor, "graph_ms": ms}
    if ms is not None:
        result["times_floor"] = ms / floor
        result["torch_ms"] = median_ms(lambda: x.logsumexp(-1, keepdim=True), device)
    return result


_GREEDY = {"temperature": 0.0}
_CHAT = {"temperature": 0.7, "top_p": 0.95}
_CHAT_K = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
_MIXED = (
    _GREEDY,
    {},
    _CHAT,
    _CHAT_K,
    {"min_p": 0.1},
    {"top_k": 1000, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"logit_bias": ((5, 3.0), (7, -100.0)), "min_tokens": 99},
)


def small_cases() -> list[SamplingCase]:
    """For the interpreter, and for a first look at a GPU."""
    return [
        SamplingCase("mixed, small", 7, 301, _MIXED, peaked=5),
        SamplingCase("a grammar's masks, small", 4, 301, _MIXED[:4], peaked=5, masked=True),
        SamplingCase("greedy, two tiles", 2, 4100, (_GREEDY,)),
        SamplingCase("flat, candidates do not fit", 2, 4500, ({"top_p": 0.97},), spread=0.1, peaked=0),
    ]


def full_cases() -> list[SamplingCase]:
    """In order of importance."""
    found = [
        SamplingCase(f"{name}, 64 × {LLAMA}", 64, LLAMA, options)
        for name, options in (
            ("greedy", (_GREEDY,)),
            ("top_p 0.95", (_CHAT,)),
            ("top_k 20, top_p 0.95", (_CHAT_K,)),
            ("plain", ({},)),
            ("mixed", _MIXED),
        )
    ]
    found += [
        SamplingCase(f"top_k 20, top_p 0.95, {rows} × {vocab_size}", rows, vocab_size, (_CHAT_K,))
        for rows, vocab_size in ((1, LLAMA), (256, LLAMA), (64, QWEN), (64, GEMMA), (512, 32000))
    ]
    flat = {"spread": 0.5, "peaked": 0}
    found += [
        SamplingCase(f"flat, top_p 0.95, 64 × {LLAMA}", 64, LLAMA, ({"top_p": 0.95},), **flat),
        SamplingCase(f"flat, top_k 9000, top_p 0.9, 8 × {LLAMA}", 8, LLAMA, ({"top_p": 0.9, "top_k": 9000},), **flat),
        SamplingCase(
            f"penalties after 4,096 tokens, 64 × {LLAMA}",
            64,
            LLAMA,
            (_CHAT | {"repetition_penalty": 1.1},),
            history=4096,
        ),
    ]  # fmt: skip
    return found


def _logits(case: SamplingCase) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(case.rows, case.vocab_size, generator=generator) * case.spread
    if case.peaked:
        at = torch.randint(case.vocab_size, (case.rows, case.peaked), generator=generator)
        lift = 12.0 + 3.0 * torch.randn(case.rows, case.peaked, generator=generator)
        x.scatter_(1, at, lift)
    return x


def _rows(case: SamplingCase) -> list[ScheduledSequence]:
    rng = np.random.default_rng(1)
    found = []
    for s in range(case.rows):
        params = SamplingParams(1 << 20, seed=s, **case.options[s % len(case.options)])
        output = tuple(rng.integers(0, case.vocab_size, case.history).tolist())
        found.append(row(str(s), params, output=output))
    return found


def _masks(allowed: NDArray[np.bool_], device: torch.device) -> TokenMasks:
    """`allowed` [S, V], of every second row."""
    masked = np.arange(1, len(allowed), 2)
    places = np.full(len(allowed), -1)
    places[masked] = np.arange(len(masked))
    padded = np.pad(allowed[masked], ((0, 0), (0, -allowed.shape[1] % 32)))
    bits = np.packbits(padded, axis=1, bitorder="little").view(np.int32)
    return TokenMasks(*(torch.from_numpy(part).to(device) for part in (masked, places, bits)))


def _is_right(
    logits: NDArray[np.float32],
    item: ScheduledSequence,
    token: int,
    allowed: NDArray[np.bool_] | None = None,
) -> bool:
    params = item.request.sampling
    drawn = params.temperature > 0
    u = uniform(params.seed, params.choice, item.output_index) if drawn else 0.5
    weights = reference_weights(logits, item, None, allowed)
    edges = cuts(weights)
    return bool(weights[token] > 0 and edges[token] - _EDGE <= u <= edges[token + 1] + _EDGE)
