"""Decisions after the first ten minutes on a GPU: for each question the figure, the outcomes, and which one it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from bench.gpu.decoding.simulator import LAYERS
from bench.gpu.ten_minutes.cases import AS_IT_IS, NEW, PROMPT_FORMS, ROWS_A, STRIPS

Results = Mapping[str, Mapping[str, Any]]
"""Results of the suite, by case."""
_BY_ROWS = ("by rows and by strips", "replays, by rows and by strips")
"""Beginnings of the names of the cases in `right` that check B and A sides by rows."""
_EARLY = ("A sides early", "replays, A sides early")
_BY_STRIPS = ("by rows and by strips", "prompts recorded, by rows and by strips")
_WIDEST = "gate_up, 64 rows of 64, rank 16"
_PROMPT = "2048 rows, rank 16"


@dataclass(frozen=True)
class Decision:
    """`measure` gives the figure, or None where something of it is missing or not right. `outcomes`: (below, what to
    do), in ascending order, the last one without a bound. `forms`: beginnings of the names of cases in `right`; where
    one of these is not right, the form is out, whatever its time."""

    question: str
    measure: Callable[[Results], float | None]
    outcomes: Sequence[tuple[float, str]]
    forms: tuple[str, ...] = ()

    def wrong(self, results: Results) -> list[str]:
        """The cases in `right` that tell against the form."""
        return [
            key
            for key, result in results.items()
            if key.startswith(tuple(f"right/{form}" for form in self.forms))
            and result["status"] in ("wrong", "failed", "lost")
        ]


def of(results: Results, case: str, column: str, **wanted: str) -> float | None:
    """A number of the first row of a case with these values that is right."""
    return next(
        (
            value
            for row, value in _right(results, case, column)
            if all(row.get(key) == text for key, text in wanted.items())
        ),
        None,
    )


def _right(results: Results, case: str, column: str) -> list[tuple[Mapping[str, Any], float]]:
    """The rows of a case that are right and have a number in the column, and that number."""
    rows = results.get(case, {"rows": []})["rows"]
    return [
        (row, float(row[column]))
        for row in rows
        if row.get("ok", True) and isinstance(row.get(column), int | float)
    ]


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
    """The ratio of a time of one form of prompts to a time of another."""
    return lambda results: ratio(_prompt(form, column)(results), _prompt(other, its)(results))


def _against(form: str, other: str, column: str, cell: str = _WIDEST) -> Callable[[Results], float | None]:
    """The ratio of the time of one form to another's."""
    one, two = _kernel(form, column, cell), _kernel(other, column, cell)
    return lambda results: ratio(one(results), two(results))


def _fastest(results: Results) -> float | None:
    forms = [NEW, *(NEW.replace("12", number) for number in ("8", "16"))]
    return _to_fastest([_kernel(form, "expand_ms")(results) for form in forms])


def _fastest_strips(results: Results) -> float | None:
    others = [form for form in PROMPT_FORMS if form not in (AS_IT_IS, STRIPS)]
    return _to_fastest([_prompt(form, "expand_ms")(results) for form in (STRIPS, *others)])


def _to_fastest(times: Sequence[float | None]) -> float | None:
    """The ratio of the first of them to the least."""
    return ratio(times[0], min((time for time in times if time is not None), default=None))


def _step(switch: str, rows: int, adapters: int, one: str, other: str) -> Callable[[Results], float | None]:
    """The ratio of a time of a step to another time of it."""
    case = f"ab/{switch}: {rows} rows, {adapters} adapters, rank 16"
    return lambda results: ratio(of(results, case, one), of(results, case, other))


def _early_us(results: Results) -> float | None:
    """The time that early A sides take from a layer."""
    case = "ab/early: 64 rows, 8 adapters, rank 16"
    late, early = of(results, case, "a_ms"), of(results, case, "b_ms")
    return None if late is None or early is None else (late - early) * 1e3 / LAYERS


def _peer(package: str) -> Callable[[Results], float | None]:
    """The ratio of both sides by rows to the fastest kernels of a package, of those that are right."""

    def measure(results: Results) -> float | None:
        case = f"peers/{_WIDEST}"
        rows = _right(results, case, "both_us")
        theirs = [us for row, us in rows if row["contender"].startswith(package)]
        ours = of(results, case, "both_us", contender="by rows and by strips")
        return ratio(ours, min(theirs, default=None))

    return measure


def _aim(
    words: str, switch: str, rows: int, adapters: int, least: float, forms: tuple[str, ...] = _BY_ROWS
) -> Decision:
    return Decision(
        f"LoRA ÷ base {words}",
        _step(switch, rows, adapters, "base_ms", "b_ms"),
        ((least, "not reached: the kernels above say where"), (inf, "reached")),
        forms,
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
        _BY_ROWS,
    ),
    Decision(
        "12 programs by rows ÷ the fastest of 8, 12 and 16",
        _fastest,
        ((1.03, "12 stay"), (inf, "take the fastest number")),
        _BY_ROWS,
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
        _BY_ROWS,
    ),
    Decision(
        "A side by rows ÷ as it is, gate_up, 64 of 64",
        _against(ROWS_A, AS_IT_IS, "shrink_ms"),
        (
            (0.97, "A sides by rows, for pieces of one and of two rows"),
            (inf, "A sides keep tensor cores: code by rows goes"),
        ),
        _BY_ROWS,
    ),
    Decision(
        "µs that early A sides take from a layer, 64 rows of 8",
        _early_us,
        ((3.0, "A sides begin when x is there: simpler"), (inf, "A sides begin early")),
        _EARLY,
    ),
    *(
        Decision(
            f"A and B side by rows ÷ {package}'s, gate_up, 64 of 64",
            _peer(package),
            ((1.0, "ours are faster"), (inf, "theirs are faster: A alone and B alone say in which side")),
            _BY_ROWS,
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
        _BY_STRIPS,
    ),
    Decision(
        "strips with 3 stages ÷ the fastest strips",
        _fastest_strips,
        ((1.03, "3 stages of 128 columns stay"), (inf, "take the fastest ones")),
        _BY_STRIPS,
    ),
    Decision(
        "a library's products ÷ A and B side by strips, a prompt of 2,048",
        _prompts(STRIPS, "torch_ms", STRIPS, "graph_ms"),
        ((1.0, "the library is faster even so: runs of 256 rows and more go to it"), (inf, "no library")),
        _BY_STRIPS,
    ),
    _aim("by rows, 64 rows of 8", "gemv", 64, 8, 0.88),
    _aim("by rows, 64 rows of 64", "gemv", 64, 64, 0.76),
    _aim("by rows, 256 rows of 64", "gemv", 256, 64, 0.82),
    _aim("by strips, a prompt of 2,048", "strips", 64, 1, 0.88, _BY_STRIPS),
)


def table(results: Results) -> list[str]:
    """Markdown, a line for each outcome. An arrow stands at those that were measured, or at a line more where the form
    is not right."""
    lines = ["| question | measured | below | then |", "|---|---|---|---|"]
    for decision in DECISIONS:
        value, wrong = decision.measure(results), decision.wrong(results)
        shown = "not measured" if value is None else f"{value:.3g}"
        if value is None or wrong:
            taken = None
        else:
            taken = next((words for bound, words in decision.outcomes if value < bound), None)
        for at, (bound, words) in enumerate(decision.outcomes):
            first = (decision.question, shown) if at == 0 else ("", "")
            below = "" if bound == inf else f"{bound:g}"
            lines.append(f"| {first[0]} | {first[1]} | {below} | {'→ ' if words is taken else ''}{words} |")
        if wrong:
            lines.append(f"|  |  |  | → not right, so out until it is: {'; '.join(wrong)} |")
    return lines
