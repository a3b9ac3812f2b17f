"""What follows from the first ten minutes on a GPU: for each question the figure, the outcomes, and which one it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from bench.gpu.decoding.simulator import LAYERS
from bench.gpu.ten_minutes.cases import AS_IT_IS, NEW, PROMPT_FORMS, ROWS_A, STRIPS

Results = Mapping[str, Mapping[str, Any]]
"""Of the suite, by case."""
_WIDEST = "gate_up, 64 rows of 64, rank 16"
_PROMPT = "2048 rows, rank 16"


@dataclass(frozen=True)
class Decision:
    """`measure` gives the figure, or None where something of it is missing. `outcomes`: (below, what to do), in
    ascending order, the last one without a bound."""

    question: str
    measure: Callable[[Results], float | None]
    outcomes: Sequence[tuple[float, str]]


def of(results: Results, case: str, column: str, **wanted: str) -> float | None:
    """A number of the first row of a case with these values."""
    rows = results.get(case, {"rows": []})["rows"]
    row = next((row for row in rows if all(row.get(key) == value for key, value in wanted.items())), {})
    value = row.get(column)
    return float(value) if isinstance(value, int | float) else None


def ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def _kernel(form: str, column: str, cell: str = _WIDEST) -> Callable[[Results], float | None]:
    return lambda results: of(results, f"kernels/{cell}: {form}", column)


def _expand_us(results: Results) -> float | None:
    ms = _kernel(NEW, "expand_ms")(results)
    return None if ms is None else ms * 1e3


def _prompt(form: str, column: str) -> Callable[[Results], float | None]:
    return lambda results: of(results, f"strips/{_PROMPT}: {form}", column)


def _prompts(form: str, column: str, other: str, its: str) -> Callable[[Results], float | None]:
    """A time of one form of prompts as a part of a time of another."""
    return lambda results: ratio(_prompt(form, column)(results), _prompt(other, its)(results))


def _against(form: str, other: str, column: str, cell: str = _WIDEST) -> Callable[[Results], float | None]:
    """The time of one form as a part of another's."""
    one, two = _kernel(form, column, cell), _kernel(other, column, cell)
    return lambda results: ratio(one(results), two(results))


def _fastest(results: Results) -> float | None:
    forms = [NEW, *(NEW.replace("12", number) for number in ("8", "16"))]
    return _to_fastest([_kernel(form, "expand_ms")(results) for form in forms])


def _fastest_strips(results: Results) -> float | None:
    others = [form for form in PROMPT_FORMS if form not in (AS_IT_IS, STRIPS)]
    return _to_fastest([_prompt(form, "expand_ms")(results) for form in (STRIPS, *others)])


def _to_fastest(times: Sequence[float | None]) -> float | None:
    """The first of them, as a multiple of the least."""
    return ratio(times[0], min((time for time in times if time is not None), default=None))


def _step(switch: str, rows: int, adapters: int, one: str, other: str) -> Callable[[Results], float | None]:
    """A time of a step as a part of another time of it."""
    case = f"ab/{switch}: {rows} rows, {adapters} adapters, rank 16"
    return lambda results: ratio(of(results, case, one), of(results, case, other))


def _early_us(results: Results) -> float | None:
    """The time that early A sides take from a layer."""
    case = "ab/early: 64 rows, 8 adapters, rank 16"
    late, early = of(results, case, "a_ms"), of(results, case, "b_ms")
    return None if late is None or early is None else (late - early) * 1e3 / LAYERS


def _peer(package: str) -> Callable[[Results], float | None]:
    """Both sides by rows as a part of the fastest kernels of a package."""

    def measure(results: Results) -> float | None:
        case = f"peers/{_WIDEST}"
        rows = results.get(case, {"rows": []})["rows"]
        theirs = [row["both_us"] for row in rows if row["contender"].startswith(package) and "both_us" in row]
        ours = of(results, case, "both_us", contender="by rows and by strips")
        return ratio(ours, min(theirs, default=None))

    return measure


def _aim(words: str, switch: str, rows: int, adapters: int, least: float) -> Decision:
    return Decision(
        f"LoRA ÷ base {words}",
        _step(switch, rows, adapters, "base_ms", "b_ms"),
        ((least, "not reached: the kernels above say where"), (inf, "reached")),
    )


DECISIONS = (
    Decision(
        "B side of gate_up by rows, 64 of 64, µs",
        _expand_us,
        (
            (25.0, "B sides by rows become the only form of decoding; tensor cores leave recorded B sides"),
            (
                50.0,
                "the counters say which: waits for memory: load both sites' records at once, an item ahead; else "
                "fewer planes",
            ),
            (inf, "one program an item, as SGLang has it, on a grid of all; compare before more work"),
        ),
    ),
    Decision(
        "12 programs by rows ÷ the fastest of 8, 12 and 16",
        _fastest,
        ((1.03, "12 stay"), (inf, "take the fastest number")),
    ),
    Decision(
        "B side with 128 registers ÷ as it is, 64 of 64",
        _against("B sides with 128 registers", AS_IT_IS, "expand_ms"),
        ((0.95, "4 programs, should B sides by rows lose"), (inf, "3 programs stay")),
    ),
    Decision(
        "step by rows ÷ as it is, 256 rows of 8",
        _step("gemv", 256, 8, "b_ms", "a_ms"),
        (
            (1.0, "pieces of four rows serve every step"),
            (inf, "keep tiles for pieces of more than 4 rows, in a second recording"),
        ),
    ),
    Decision(
        "A side by rows ÷ as it is, gate_up, 64 of 64",
        _against(ROWS_A, AS_IT_IS, "shrink_ms"),
        (
            (0.97, "A sides by rows, for pieces of one and of two rows"),
            (inf, "A sides keep tensor cores: code by rows goes"),
        ),
    ),
    Decision(
        "µs that early A sides take from a layer, 64 rows of 8",
        _early_us,
        ((3.0, "A sides begin when x is there: simpler"), (inf, "A sides begin early")),
    ),
    *(
        Decision(
            f"A and B side by rows ÷ {package}'s, gate_up, 64 of 64",
            _peer(package),
            ((1.0, "ours are faster"), (inf, "theirs are faster: A alone and B alone say in which side")),
        )
        for package in ("vllm", "sglang")
    ),
    Decision(
        "B sides of a prompt of 2,048 by strips ÷ as it is",
        _prompts(STRIPS, "expand_ms", AS_IT_IS, "expand_ms"),
        (
            (0.8, "strips become the only form of prompts"),
            (inf, "a library's products into y's columns, for runs of 256 rows and more"),
        ),
    ),
    Decision(
        "strips with 3 stages ÷ the fastest strips",
        _fastest_strips,
        ((1.03, "3 stages of 128 columns stay"), (inf, "take the fastest ones")),
    ),
    Decision(
        "a library's products ÷ A and B side by strips, a prompt of 2,048",
        _prompts(STRIPS, "torch_ms", STRIPS, "graph_ms"),
        ((1.0, "the library is faster even so: runs of 256 rows and more go to it"), (inf, "no library")),
    ),
    _aim("by rows, 64 rows of 8", "gemv", 64, 8, 0.88),
    _aim("by rows, 64 rows of 64", "gemv", 64, 64, 0.76),
    _aim("by rows, 256 rows of 64", "gemv", 256, 64, 0.82),
    _aim("by strips, a prompt of 2,048", "strips", 64, 1, 0.88),
)


def table(results: Results) -> list[str]:
    """Markdown, a line for each outcome; an arrow stands at those that were measured."""
    lines = ["| question | measured | below | then |", "|---|---|---|---|"]
    for decision in DECISIONS:
        value = decision.measure(results)
        shown = "not measured" if value is None else f"{value:.3g}"
        taken = next(
            (words for bound, words in decision.outcomes if value is not None and value < bound), None
        )
        for at, (bound, words) in enumerate(decision.outcomes):
            first = (decision.question, shown) if at == 0 else ("", "")
            below = "" if bound == inf else f"{bound:g}"
            lines.append(f"| {first[0]} | {first[1]} | {below} | {'→ ' if words is taken else ''}{words} |")
    return lines
