"""What the engine answered, beside transformers and PEFT over the same checkpoint and adapters.

The reference is given the engine's own tokens, so that one near tie does not make all that follows another text. The
yardstick is transformers in float32; the engine may be off by no more than half again of what transformers is in the
dtype that is served.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from loraplex.engine.logprobs import Logprobs

_WORSE_THAN_REFERENCE = 1.5
_FLOAT32_ERROR = 1e-3
"""What a log probability in float32 may be off, where the reference's own error is none."""


@dataclass(frozen=True)
class Answer:
    """`adapter`: the folder of its adapter, None for the base. `output` and `prompt`: log probabilities of the tokens
    of the answer, and of those of the prompt from the second on."""

    name: str
    adapter: Path | None
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    output: Logprobs
    prompt: Logprobs


def compare(
    base: Path, answers: Sequence[Answer], dtype: torch.dtype, device: torch.device
) -> list[dict[str, Any]]:
    """A row for each answer. `error` and `transformers_error`: root mean squares of the differences of all log
    probabilities that the engine gave from those in float32. `same_tokens`: the share of the tokens that are the
    likeliest in float32; `gap`: how much less likely, at most, the engine's token was."""
    exact = _reference(base, answers, torch.float32, device)
    served = exact if dtype is torch.float32 else _reference(base, answers, dtype, device)
    rows = []
    for answer, want, theirs in zip(answers, exact, served, strict=True):
        at, ids, values = _given(answer)
        error = _rms(values - want[at, ids])
        theirs_error = _rms(theirs[at, ids] - want[at, ids])
        allowed = _FLOAT32_ERROR if dtype is torch.float32 else _WORSE_THAN_REFERENCE * theirs_error
        chosen = want[len(answer.prompt_ids) - 1 :]
        tokens = torch.tensor(answer.token_ids)
        gap = chosen.max(-1).values - chosen[torch.arange(len(tokens)), tokens]
        rows.append(
            {
                "case": answer.name,
                "adapter": "base" if answer.adapter is None else answer.adapter.name,
                "values": len(values),
                "error": error,
                "transformers_error": theirs_error,
                "same_tokens": float((gap == 0).float().mean()),
                "gap": float(gap.max()),
                # A token that is not the likeliest may be chosen where the two differ by no more than rounding.
                "ok": error <= allowed and float(gap.max()) <= 10 * max(allowed, _FLOAT32_ERROR),
            }
        )
    return rows


def _given(answer: Answer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Position, token and value of every log probability that the engine gave; a position's is of the token behind."""
    ats: list[int] = []
    ids: list[int] = []
    values: list[float] = []
    last = len(answer.prompt_ids) - 1
    for first, tokens, scores in (
        (0, answer.prompt_ids[1:], answer.prompt),
        (last, answer.token_ids, answer.output),
    ):
        if len(scores) != len(tokens):
            raise RuntimeError(f"{answer.name}: {len(scores)} log probabilities of {len(tokens)} tokens")
        for position, token, (own, top) in zip(itertools.count(first), tokens, scores.rows(), strict=False):
            for other, value in ((token, own), *top):
                ats.append(position)
                ids.append(other)
                values.append(value)
    return torch.tensor(ats), torch.tensor(ids), torch.tensor(values)


def _rms(difference: torch.Tensor) -> float:
    """Infinity where something is not finite."""
    if not bool(difference.isfinite().all()):
        return float("inf")
    return float(difference.double().pow(2).mean().sqrt())


@torch.inference_mode()
def _reference(
    base: Path, answers: Sequence[Answer], dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """[P + O - 1, V] float32 on the host, for each answer: log probabilities behind each position."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=dtype, attn_implementation="eager").to(
        device
    )
    folders = list(dict.fromkeys(answer.adapter for answer in answers if answer.adapter is not None))
    found = {answer.name: _log_probabilities(model, answer) for answer in answers if answer.adapter is None}
    for number, folder in enumerate(folders):
        name = f"adapter{number}"
        if number:
            model.load_adapter(folder, name)
        else:
            model = PeftModel.from_pretrained(model, folder, adapter_name=name)
        model.eval()
        model.set_adapter(name)
        for answer in answers:
            if answer.adapter == folder:
                found[answer.name] = _log_probabilities(model, answer)
    del model
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return [found[answer.name] for answer in answers]


def _log_probabilities(model: Any, answer: Answer) -> torch.Tensor:
    ids = torch.tensor([[*answer.prompt_ids, *answer.token_ids[:-1]]], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits[0]
    return logits.float().log_softmax(-1).cpu()
