"""Each kernel once in bfloat16, with the engine's own tilings and in Llama-3.1-8B's shapes, against float64: right or
wrong, in less than a minute.

    PYTHONPATH=tests:server:adapters:kernels python3 -m bench.gpu.smoke

All in one process, nothing recorded, nothing timed. The first thing to run on a GPU that the kernels have not seen.
`--small` runs tiny shapes in float16, interpreted, without a GPU; `--tiny` only two LoRA and two attention cases of
tiny shapes, for compute-sanitizer. The exit status is 0 if all is right, else 1.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Check = tuple[str, Callable[[], dict[str, Any]]]
"""A kernel, and what compares it: a row with "case", "ok" and, where there is one, "error"."""


def checks(device: torch.device, *, small: bool, tiny: bool = False) -> Iterator[Check]:
    """Of every kernel of the engine; `tiny`: LoRA and attention alone, in tilings for tiny shapes."""
    # Triton decides as it is imported whether it interprets.
    import torch

    from bench.gpu import attention, fused, lora, sampling
    from bench.gpu.decoding import readers

    for case in lora.small_cases() if tiny else lora.engine_cases(small=small):
        yield "LoRA, shrink and expand", partial(lora.run_case, case, device, recorded=False)
    if not small and not tiny:
        head = lora.LoraCase("the head, 64 adapters", lora.LLAMA_8B_HEAD, (16,) * 64, lora.distinct(64, 64))
        yield "LoRA, shrink and expand", partial(lora.run_case, head, device, recorded=False)
    for step in attention.small_cases() if tiny else attention.engine_cases(small=small):
        yield "attention", partial(attention.run_case, step, device, recorded=False)
    if tiny:
        return
    for library, step in attention.library_cases(small=small):
        yield f"attention by {library}", partial(attention.run_library, library, step, device)
    for read in readers.cases(small=small):
        yield "LoRA, in its readers", partial(readers.run_case, read, device, small=small)
    dtype = torch.float16 if small else torch.bfloat16
    hidden, inner, heads = (48, 80, (4, 2, 16)) if small else (4096, 14336, (32, 8, 128))
    for rows in (1, 5) if small else (1, 64, 2048):
        for weight in (False, True):
            yield (
                "residual and RMSNorm",
                partial(fused.norm_case, rows, hidden, device, dtype=dtype, float32_weight=weight),
            )
        for gelu in (False, True):
            yield "activation", partial(fused.activation_case, rows, inner, device, dtype=dtype, gelu=gelu)
        for norm in (False, True):
            yield "RoPE and KV write", partial(fused.rope_case, rows, *heads, device, dtype=dtype, norm=norm)
    vocab_size = 4100 if small else sampling.LLAMA
    cases = sampling.small_cases() if small else sampling.smoke_cases()
    for draw in cases:
        yield "masks" if draw.masked else "sampling", partial(sampling.run_case, draw, device)
    yield "log-sum-exp", partial(sampling.log_sum_exp_case, 3 if small else 64, vocab_size, device)
    yield "log probabilities", partial(sampling.score_case, 3 if small else 64, vocab_size, device)


def run(device: torch.device, *, small: bool, tiny: bool = False, say: Callable[[str], None] = print) -> bool:
    """Whether all were right. Tells each check, and each kernel with its largest error."""
    found: dict[str, list[dict[str, Any]]] = {}
    for kernel, compare in checks(device, small=small, tiny=tiny):
        begun = time.monotonic()
        try:
            row = compare()
        except Exception as error:  # of any kind: the other kernels are to be checked too
            traceback.print_exc()
            row = {"case": f"{type(error).__name__}: {error}"[:200], "ok": False}
        found.setdefault(kernel, []).append(row)
        say(
            f"{_word(row['ok']):6}{_shown(row.get('error')):>9}{time.monotonic() - begun:7.1f} s  {row['case']}"
        )
    say("")
    for kernel, rows in found.items():
        errors = [row["error"] for row in rows if row.get("error") is not None]
        right = all(row["ok"] for row in rows)
        say(f"{_word(right):6}{_shown(max(errors, default=None)):>9}  {kernel}")
    return all(row["ok"] for rows in found.values() for row in rows)


def _word(right: bool) -> str:
    return "right" if right else "WRONG"


def _shown(error: float | None) -> str:
    return "" if error is None else f"{error:.1e}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.gpu.smoke", description=__doc__.split("\n")[0])
    parser.add_argument("--small", action="store_true", help="tiny shapes, interpreted, without a GPU")
    parser.add_argument(
        "--tiny", action="store_true", help="two LoRA and two attention cases, for compute-sanitizer"
    )
    given = parser.parse_args(arguments)
    if given.small:
        os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    import torch
    import triton

    if not given.small and not torch.cuda.is_available():
        print("torch finds no CUDA device here; --small runs without one", file=sys.stderr)
        return 1
    device = torch.device("cpu" if given.small else "cuda")
    name = "interpreted" if given.small else torch.cuda.get_device_name(device)
    begun = time.monotonic()
    print(f"{name}, torch {torch.__version__}, triton {triton.__version__}")
    right = run(device, small=given.small, tiny=given.tiny)
    print(f"\n{'all is right' if right else 'something is wrong'}, {time.monotonic() - begun:.0f} s")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
