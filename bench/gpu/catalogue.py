"""The cases of the suite, in order of importance: what runs first counts where the rest is cut off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from bench.gpu import attention, equality, experts, fused, lora, recurrent, sampling
from bench.gpu.case import Bench, Case, Row
from bench.gpu.decoding.switches import FULL_AB, FULL_KV, FULL_WEIGHTS, SMALL_AB, SwitchBench
from bench.gpu.invariant import FULL_INVARIANT, SMALL_INVARIANT, InvariantBench
from bench.gpu.kv import codes as kv_codes
from bench.gpu.linears import codes, fp8, humming
from bench.gpu.rig import GREEDY
from bench.gpu.steps import FULL, FULL_256, MIXED, SMALL, StepBench, StepsShape
from bench.gpu.stopwatch import launch_us


def small() -> list[Case]:
    """All kinds, on tiny shapes: for the interpreter."""
    return [
        Case("ceilings", "device", ceilings),
        *_checks(small=True),
        *_equality(equality.small_cases()),
        *_steps(
            SMALL,
            [("steps", "decode", (2, 2, 8)), ("steps", "decode", (1, 0, 0))],
        ),
        *_kv(small=True),
        *_invariant(SMALL_INVARIANT, bits=(10, 2, 8), steps=[(4, 2, 8)], prompts=[(18, 8)]),
        *_more(SMALL, hosts=[(2, 2, 8)], prompts=[(40, 8)], ranks=[16]),
    ]


def full() -> list[Case]:
    """For a GPU."""
    most = [
        (64, 8, 16), (64, 64, 16), (16, 8, 16), (256, 8, 16), (256, 64, 16),
        (256, 256, 16), (1, 1, 16), (64, 1, 16), (16, 1, 16), (256, 1, 16),
    ]  # fmt: skip
    other_ranks = [
        (rows, adapters, rank)
        for rank in (64, 8)
        for rows, adapters in (
            (64, 8),
            (64, 64),
            (16, 8),
            (256, 8),
            (256, 64),
            (1, 1),
            (64, 1),
            (16, 1),
            (256, 1),
        )
    ]
    return [
        Case("ceilings", "device", ceilings),
        *_checks(small=False),
        *_equality(equality.full_cases()[:4]),
        *_steps(FULL, [("steps", "decode", row) for row in most[:5]]),
        *_steps(FULL, [("parts", "profile", row) for row in ((64, 64, 16), (64, 8, 16), (64, 0, 0))]),
        *_invariant(
            FULL_INVARIANT,
            bits=(700, 6, 16),
            steps=[(64, 8, 16), (64, 64, 16), (16, 8, 16), (1, 1, 16)],
            prompts=[(512, 16), (2048, 16)],
        ),
        *_more(FULL, hosts=[(64, 8, 16)], prompts=[(2048, 16), (512, 16)], ranks=[16]),
        *_steps(FULL, [("steps", "decode", row) for row in [*most[5:], *other_ranks, (256, 256, 8)]]),
        *_more(FULL, hosts=[(64, 64, 16), (256, 64, 16), (1, 1, 16)], prompts=[(2048, 64)], ranks=[64, 8]),
        *(Case("codes", case.name, partial(_run, codes.run_case, case)) for case in codes.full_cases()),
        *_kv(small=False),
        *(Case("fp8", case.name, partial(_run, fp8.run_case, case)) for case in fp8.full_cases()),
        *(
            Case("humming", case.name, partial(_run, humming.run_case, case), 90)
            for case in humming.full_cases()
        ),
        *_sampling(sampling.full_cases()),
        *_lora(lora.full_cases()[:11]),
        *_attention(attention.full_cases()[:8]),
        *_lora(lora.full_cases()[11:]),
        *_attention(attention.full_cases()[8:]),
        *(
            Case("recurrent", case.name, partial(_run, recurrent.run_case, case))
            for case in recurrent.full_cases()
        ),
        *(Case("experts", case.name, partial(_run, experts.run_case, case)) for case in experts.full_cases()),
        Case("fused", "all", lambda bench: fused.full_cases(bench.device, bench.ceilings), 90),
        Case("sampling", "log of sums", _log_sum_exp),
        *_equality(equality.full_cases()[4:]),
        *_steps(FULL_256, [("steps", "decode", (256, 256, 64))]),
    ]


def small_ab(*names: str) -> list[Case]:
    """Both sides of these switches, on tiny shapes."""
    return [*_prefill(names, small=True), *switched([SMALL_AB], names, [(2, 2, 8)])]


def full_ab(*names: str) -> list[Case]:
    """The same for a GPU."""
    weights = [name for name in names if name in ("int4", "int8", "fp8", "humming")]
    others = [name for name in names if name != "kv-codes" and name not in weights]
    cases = switched([FULL_AB], others, [(64, 8, 16), (64, 64, 16), (256, 64, 16)])
    cases += switched([FULL_WEIGHTS], weights, [(1, 1, 16), (16, 8, 16), (64, 8, 16)])
    if "kv-codes" in names:
        cases += switched(FULL_KV, ["kv-codes"], [(64, 8, 16)])
    return [Case("ceilings", "device", ceilings), *_prefill(names, small=False), *cases]


def _prefill(names: Sequence[str], *, small: bool) -> list[Case]:
    if "prefill" not in names:
        return []
    return [
        Case(
            "prefill",
            f"torch: {case.name}",
            lambda bench, case=case: attention.compare_prefill(
                case, bench.device, bench.ceilings, bench.watch
            ),
        )
        for case in attention.prefill_cases(small=small)
    ]


def switched(
    shapes: Sequence[StepsShape], names: Sequence[str], steps: Sequence[tuple[int, int, int]]
) -> list[Case]:
    """Both sides of these switches, each for these (rows, adapters, rank)."""
    return [
        Case(
            "ab",
            f"{name}: {of[0]} rows, {of[1]} adapters, rank {of[2]}"
            + (f", context {shape.context:,}" if len(shapes) > 1 else ""),
            partial(_on_switch, shape, name, of),
            limit_s=150,
        )
        for name in names
        if name != "prefill"
        for shape in shapes
        for of in steps
    ]


def _kv(*, small: bool) -> list[Case]:
    runs: list[tuple[Any, Any]] = [
        *((case, kv_codes.run_attention) for case in kv_codes.attention_cases(small=small)),
        *((case, kv_codes.run_rope) for case in kv_codes.rope_cases(small=small)),
    ]
    return [Case("kv", case.name, partial(_run, run, case)) for case, run in runs]


def _on_switch(shape: StepsShape, name: str, of: tuple[int, int, int], bench: Bench) -> Row:
    if name == "humming":
        humming.check_device(bench.device)
    held = bench.hold(("ab", shape), lambda: SwitchBench(shape, bench.device, bench.ceilings))
    found: Row = held.compare(name, *of)
    return found


def ceilings(bench: Bench) -> Row:
    found = bench.ceilings
    return {
        "copy_tb_per_s": found.bytes_per_s / 1e12,
        "product_tflop_per_s": found.flops_per_s / 1e12,
        "launch_us": launch_us(bench.watch),
    }


def _log_sum_exp(bench: Bench) -> list[Row]:
    return [sampling.log_sum_exp_case(rows, 128256, bench.device, bench.ceilings) for rows in (64, 256)]


def _checks(*, small: bool) -> list[Case]:
    """Kernels against float64, on sizes that find mistakes rather than limits; LoRA and attention in the engine's own
    tilings too."""
    return [
        *(
            Case("checks", f"lora: {case.name}", partial(_check, lora.run_case, case), 120, alone=False)
            for case in lora.small_cases() + lora.engine_cases(small=small)
        ),
        *(
            Case(
                "checks",
                f"attention: {case.name}",
                partial(_check, attention.run_case, case),
                120,
                alone=False,
            )
            for case in attention.small_cases() + attention.engine_cases(small=small)
        ),
        *(
            Case(
                "checks",
                f"attention by torch: {case.name}",
                partial(_check, attention.run_torch, case),
                120,
                alone=False,
            )
            for case in attention.torch_cases(small=small)
        ),
        *(
            Case("checks", f"codes: {case.name}", partial(_check, codes.run_case, case), 120, alone=False)
            for case in codes.small_cases()
        ),
        *(
            Case("checks", f"fp8: {case.name}", partial(_check, fp8.run_case, case), 120, alone=False)
            for case in fp8.small_cases()
        ),
        *(
            Case("checks", f"humming: {case.name}", partial(_check, humming.run_case, case), 120, alone=False)
            for case in humming.small_cases()
        ),
        *(
            Case(
                "checks",
                f"recurrent: {case.name}",
                partial(_check, recurrent.run_case, case),
                120,
                alone=False,
            )
            for case in recurrent.small_cases()
        ),
        *(
            Case("checks", f"experts: {case.name}", partial(_check, experts.run_case, case), 120, alone=False)
            for case in experts.small_cases()
        ),
        Case("checks", "fused", lambda bench: fused.small_cases(bench.device), 120, alone=False),
        *(
            Case(
                "checks", f"sampling: {case.name}", partial(_check, sampling.run_case, case), 120, alone=False
            )
            for case in sampling.small_cases()
        ),
    ]


def _lora(cases: Sequence[lora.LoraCase]) -> list[Case]:
    return [Case("lora", case.name, partial(_run, lora.run_case, case)) for case in cases]


def _attention(cases: Sequence[attention.AttentionCase]) -> list[Case]:
    return [Case("attention", case.name, partial(_run, attention.run_case, case)) for case in cases]


def _check(run: Callable[..., Row], case: Any, bench: Bench) -> Row:
    return run(case, bench.device)  # not timed: other cases run beside it


def _sampling(cases: Sequence[sampling.SamplingCase]) -> list[Case]:
    return [Case("sampling", case.name, partial(_run, sampling.run_case, case)) for case in cases]


def _run(run: Callable[..., Row], case: Any, bench: Bench) -> Row:
    return run(case, bench.device, bench.ceilings)


def _equality(cases: Sequence[equality.EqualityCase]) -> list[Case]:
    return [
        Case(
            "equality",
            case.name,
            lambda bench, case=case: equality.run_case(case, bench.device),
            limit_s=120,
            alone=False,
        )
        for case in cases
    ]


def _steps(shape: StepsShape, rows: Sequence[tuple[str, str, tuple[int, int, int]]]) -> list[Case]:
    return [
        Case(
            section,
            f"{of[0]} rows, {of[1]} adapters, rank {of[2]}" if of[1] else f"{of[0]} rows, base",
            partial(_on_steps, shape, method, of),
            limit_s=150,
        )
        for section, method, of in rows
    ]


def _invariant(
    shape: StepsShape,
    *,
    bits: tuple[int, int, int],
    steps: Sequence[tuple[int, int, int]],
    prompts: Sequence[tuple[int, int]],
) -> list[Case]:
    def case(name: str, method: str, arguments: tuple[int, ...]) -> Case:
        return Case("invariant", name, partial(_on_invariant, shape, method, arguments), limit_s=150)

    return [
        case(f"bits of {bits[0]} tokens", "bits", bits),
        *(case(f"{of[0]} rows, {of[1]} adapters, rank {of[2]}", "decode", of) for of in steps),
        *(case(f"{of[0]} tokens, rank {of[1]}", "prompt", of) for of in prompts),
    ]


def _on_invariant(
    shape: StepsShape, method: str, arguments: tuple[int, ...], bench: Bench
) -> Row | list[Row]:
    held = bench.hold(("invariant", shape), lambda: InvariantBench(shape, bench.device, bench.ceilings))
    found: Row | list[Row] = getattr(held, method)(*arguments)
    return found


def _more(
    shape: StepsShape,
    *,
    hosts: Sequence[tuple[int, int, int]],
    prompts: Sequence[tuple[int, int]],
    ranks: Sequence[int],
) -> list[Case]:
    return [
        *(
            Case(
                "host",
                f"{of[0]} rows, {of[1]} adapters, {name}",
                partial(_on_steps, shape, "host", (*of, sampling)),
                limit_s=120,
            )
            for of in hosts
            for name, sampling in (("greedy", GREEDY), ("top-k and top-p", MIXED))
        ),
        *(
            Case(
                "prompts",
                f"{of[0]} tokens, rank {of[1]}",
                partial(_on_steps, shape, "prompt", of),
                limit_s=120,
            )
            for of in prompts
        ),
        *(
            Case("activation", f"rank {rank}", partial(_on_steps, shape, "activation", (rank,)), limit_s=120)
            for rank in ranks
        ),
    ]


def _on_steps(shape: StepsShape, method: str, arguments: tuple[Any, ...], bench: Bench) -> Row | list[Row]:
    steps = bench.hold(shape, lambda: StepBench(shape, bench.device, bench.ceilings))
    found: Row | list[Row] = getattr(steps, method)(*arguments)
    return found
