"""The engine beside transformers, weights and adapters random and the same: prompts in chunks, then decoding, base rows
and adapters in one batch, out of recordings and without.

The yardstick is transformers' model in float32. Ours, in the dtype that is served, may be off by no more than half
again of what transformers' own model in that dtype is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from bench.gpu.models import (
    GEMMA2_2B,
    GEMMA3_1B,
    GRANITE_4_H_1B,
    LLAMA_8B,
    QWEN3_0_6B,
    QWEN3_5_0_8B,
    TINY,
    Dense,
    StateTensors,
    decoder_of,
    make_config,
    random_adapter,
    random_reference,
    spec_of,
)
from bench.gpu.rig import Rig, RigSize

_WORSE_THAN_REFERENCE = 1.5
_FLOAT32_ERROR = 2e-4
"""What float32 may be off, where the reference's own error is none."""
_RECORDED_ERROR = 2e-2
"""What a recording may be off from the same step without one, in 16 bits: attention is cut otherwise."""


@dataclass(frozen=True)
class EqualityCase:
    """`changes` to the config `shape`: fewer layers, so that two models in float32 fit too; windows short enough to
    matter. Sequence i is slot `slots[i]`'s, with a prompt of `lengths[i]`."""

    name: str
    shape: Mapping[str, Any]
    changes: Mapping[str, Any]
    dtype: torch.dtype
    lengths: tuple[int, ...] = (5, 130, 300, 517)
    decoded: int = 6
    slots: tuple[int, ...] = (-1, 0, 1, 0)


def small_cases() -> list[EqualityCase]:
    short: dict[str, Any] = {"lengths": (3, 18, 5), "decoded": 1, "slots": (-1, 0, 1)}
    types = ["sliding_attention", "full_attention"]
    delta = {
        "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 32,
        "linear_value_head_dim": 32, "layer_types": ["linear_attention", "full_attention"],
    }  # fmt: skip
    return [
        EqualityCase("llama", LLAMA_8B, TINY | {"num_hidden_layers": 1}, torch.float32, **short),
        EqualityCase("qwen3_5", QWEN3_5_0_8B, TINY | delta, torch.float32, **short),
        EqualityCase(
            "gemma3", GEMMA3_1B, TINY | {"sliding_window": 9, "layer_types": types}, torch.float32, **short
        ),
    ]


def full_cases() -> list[EqualityCase]:
    window = {"num_hidden_layers": 4, "sliding_window": 128}
    types = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    mambas = {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 2 + ["full_attention", "linear_attention"],
    }
    return [
        EqualityCase("Llama-3.1-8B, 2 layers", LLAMA_8B, {"num_hidden_layers": 2}, torch.bfloat16),
        EqualityCase("Qwen3-0.6B, 4 layers", QWEN3_0_6B, {"num_hidden_layers": 4}, torch.bfloat16),
        EqualityCase("Gemma-2-2B, 4 layers, window 128", GEMMA2_2B, window, torch.bfloat16),
        EqualityCase(
            "Gemma-3-1B, 4 layers, window 128", GEMMA3_1B, window | {"layer_types": types}, torch.bfloat16
        ),
        EqualityCase("Qwen3.5-0.8B, 4 layers", QWEN3_5_0_8B, {"num_hidden_layers": 4}, torch.bfloat16),
        EqualityCase("Granite-4.0-H-1B, 4 layers", GRANITE_4_H_1B, mambas, torch.bfloat16),
        EqualityCase("Llama-3.1-8B, 2 layers, fp16", LLAMA_8B, {"num_hidden_layers": 2}, torch.float16),
        EqualityCase("Qwen3-0.6B, whole", QWEN3_0_6B, {}, torch.bfloat16),
    ]


@torch.inference_mode()
def run_case(case: EqualityCase, device: torch.device) -> list[dict[str, Any]]:
    """A row for the base alone, and one for base rows and adapters in one batch."""
    config = make_config({**case.shape, **case.changes})
    served, exact = random_reference(config, case.dtype, device)
    model = decoder_of(StateTensors(served.state_dict()), spec_of(config), case.dtype, device)
    count = len(case.lengths)
    rig = Rig(
        model,
        RigSize(
            max_rows=sum(case.lengths),
            max_sequences=count,
            max_len=max(case.lengths) + case.decoded,
            sizes=(count,),
            arena_bytes=(1 << 30) if device.type == "cuda" else (2 << 20),
            slots=2,
        ),
    )
    adapters = [
        random_adapter(rig.layout, 16, device, seed=1),
        random_adapter(rig.layout, 8, device, seed=2, sites=("q_proj", "v_proj")),
    ]
    rig.fill(adapters)
    tokens = _tokens(case, config.vocab_size)
    found = []
    for name, slots in (("base", (-1,) * count), ("base and adapters", case.slots)):
        ours, recorded, same_bits = _ours(rig, case, tokens, slots)
        errors = []
        for slot, ids, got in zip(slots, tokens, ours, strict=True):
            dense = {} if slot < 0 else adapters[slot].dense
            want = _reference(exact, ids, dense, case.decoded)
            theirs = _reference(served, ids, dense, case.decoded)
            errors.append((_error(got, want), _error(theirs, want), _error(got, theirs)))
        error, theirs_error, between = (max(column) for column in zip(*errors, strict=True))
        exact_dtype = case.dtype is torch.float32
        allowed = max(_FLOAT32_ERROR if exact_dtype else 0.0, _WORSE_THAN_REFERENCE * theirs_error)
        found.append(
            {
                "case": f"{case.name}: {name}",
                "dtype": str(case.dtype).removeprefix("torch."),
                "error": error,
                "transformers_error": theirs_error,
                "between": between,
                "recorded_error": recorded,
                "same_bits": same_bits,
                "ok": error <= allowed and recorded <= (_FLOAT32_ERROR if exact_dtype else _RECORDED_ERROR),
            }
        )
    return found


def _tokens(case: EqualityCase, vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [
        torch.randint(0, vocab_size, (length + case.decoded,), generator=generator).tolist()
        for length in case.lengths
    ]


def _ours(
    rig: Rig, case: EqualityCase, tokens: Sequence[Sequence[int]], slots: Sequence[int]
) -> tuple[list[torch.Tensor], float, bool]:
    """Logits [1 + decoded, V] a sequence; how far decoding out of a recording is from decoding without, at most; and
    whether it is the same bits."""
    halves = [(length + 1) // 2 for length in case.lengths]
    rig.logits([rig.rows(i, 0, tokens[i][:half], slots[i], samples=False) for i, half in enumerate(halves)])
    steps = [
        rig.logits(
            [
                rig.rows(i, half, tokens[i][half:length], slots[i])
                for i, (half, length) in enumerate(zip(halves, case.lengths, strict=True))
            ]
        )
    ]
    recorded, same_bits = 0.0, True
    for number in range(case.decoded):
        rows = [
            rig.rows(i, length + number, [tokens[i][length + number]], slots[i])
            for i, length in enumerate(case.lengths)
        ]
        eager = rig.logits(rows, eager=True)
        steps.append(rig.logits(rows))
        same_bits &= torch.equal(eager, steps[-1])
        recorded = max(recorded, _error(steps[-1], eager))
    return list(torch.stack(steps, dim=1)), recorded, same_bits


def _reference(model: Any, ids: Sequence[int], dense: Dense, decoded: int) -> torch.Tensor:
    """[1 + decoded, V] float32 of transformers, with PEFT's formula where there is an adapter."""
    device = next(model.parameters()).device
    with _adapted(model, dense):
        answer = model(torch.tensor([ids], device=device), use_cache=False, logits_to_keep=decoded + 1)
    return answer.logits[0].float()


@contextmanager
def _adapted(model: Any, dense: Dense) -> Iterator[None]:
    """While in it, linears add (x·Aᵀ)·Bᵀ·scaling, in the model's dtype."""
    handles = []
    for name, module in model.named_modules():
        parts = name.split(".")
        if "layers" not in parts or not isinstance(module, torch.nn.Linear):
            continue
        key = (int(parts[parts.index("layers") + 1]), parts[-1])
        if key in dense:
            a, b, scaling = dense[key]
            a, b = a.to(module.weight.dtype), b.to(module.weight.dtype)

            def add(_module: Any, args: Any, y: Any, a: Any = a, b: Any = b, scaling: float = scaling) -> Any:
                return y + (args[0] @ a.T) @ b.T * scaling

            handles.append(module.register_forward_hook(add))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    if len(handles) != len(dense):
        raise RuntimeError(f"{len(handles)} linears were adapted, of {len(dense)}")


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    """‖got − want‖ ÷ ‖want‖; infinity where something is not finite."""
    if not bool(got.isfinite().all()):
        return float("inf")
    return float((got.double() - want.double()).norm() / want.double().norm())
