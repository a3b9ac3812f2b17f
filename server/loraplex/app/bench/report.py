"""From outcomes to figures: means and percentiles, as a table and as JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from loraplex.app.bench.client import Outcome
from loraplex.app.bench.load import Run

LATENCIES = (
    ("time_to_first_token_s", "time to first token"),
    ("inter_token_latency_s", "inter-token latency"),
    ("time_per_output_token_s", "time per output token"),
    ("e2e_latency_s", "end to end"),
)


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0 … 100) of sorted `values`, by linear interpolation between closest ranks."""
    position = (len(values) - 1) * q / 100
    low = math.floor(position)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (position - low)


def summary(values: Iterable[float]) -> dict[str, float] | None:
    """count, mean, median, p95, p99 and max; None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    return {
        "count": len(ordered),
        "mean": math.fsum(ordered) / len(ordered),
        "median": percentile(ordered, 50),
        "p95": percentile(ordered, 95),
        "p99": percentile(ordered, 99),
        "max": ordered[-1],
    }


def report(run: Run) -> dict[str, Any]:
    """Only answers that came whole are in the latencies and the token counts; the others are counted in
    `errors` by code. Latencies run from the due time. `inter_token_latency_s` is the time between two pieces of
    text as they reached this client (a piece may hold several tokens, and none is 0 unless they came together);
    `time_per_output_token_s` is, a request, (end of text − first piece) / (tokens − 1). `send_delay_s` is how late
    this client was itself."""
    done = [o for o in run.outcomes if o.error is None]
    failed = [o for o in run.outcomes if o.error is not None]
    output = sum(o.output_tokens for o in done)
    prompt = sum(o.prompt_tokens for o in done)
    wall = run.wall_s or math.inf
    figures: dict[str, Any] = {
        "requests": len(run.outcomes),
        "completed": len(done),
        "failed": len(failed),
        "errors": dict(Counter(str(o.error) for o in failed).most_common()),
        "error_examples": {str(o.error): o.error_message for o in failed if o.error_message},
        "wall_s": run.wall_s,
        "prompt_tokens": prompt,
        "cached_tokens": sum(o.cached_tokens for o in done),
        "output_tokens": output,
        "requests_per_s": len(done) / wall,
        "output_tokens_per_s": output / wall,
        "total_tokens_per_s": (output + prompt) / wall,
        "send_delay_s": summary(o.sent - o.due for o in run.outcomes),
    }
    figures |= _latencies(done)
    figures["by_model"] = {
        model: _model_figures([o for o in run.outcomes if o.model == model], wall)
        for model in sorted({o.model for o in run.outcomes})
    }
    return figures


def _latencies(done: list[Outcome]) -> dict[str, Any]:
    return {
        "time_to_first_token_s": summary(o.arrivals[0] - o.due for o in done),
        "inter_token_latency_s": summary(
            later - earlier for o in done for earlier, later in zip(o.arrivals, o.arrivals[1:], strict=False)
        ),
        "time_per_output_token_s": summary(
            (o.arrivals[-1] - o.arrivals[0]) / (o.output_tokens - 1) for o in done if o.output_tokens > 1
        ),
        "e2e_latency_s": summary(o.done - o.due for o in done),
    }


def _model_figures(outcomes: list[Outcome], wall: float) -> dict[str, Any]:
    done = [o for o in outcomes if o.error is None]
    output = sum(o.output_tokens for o in done)
    return {
        "requests": len(outcomes),
        "completed": len(done),
        "output_tokens": output,
        "output_tokens_per_s": output / wall,
        "time_to_first_token_s": summary(o.arrivals[0] - o.due for o in done),
        "e2e_latency_s": summary(o.done - o.due for o in done),
    }


def tables(figures: dict[str, Any]) -> list[Table]:
    """The same for people: totals, latencies in milliseconds, and one line a model where there are several."""
    totals = Table("requests", "failed", "wall s", "requests/s", "output tokens/s", "total tokens/s")
    totals.add_row(
        str(figures["requests"]),
        str(figures["failed"]),
        f"{figures['wall_s']:.2f}",
        f"{figures['requests_per_s']:.2f}",
        f"{figures['output_tokens_per_s']:.1f}",
        f"{figures['total_tokens_per_s']:.1f}",
    )
    latencies = Table("milliseconds", "mean", "median", "p95", "p99", "max", "samples")
    for key, label in LATENCIES:
        if (row := figures[key]) is not None:
            shown = [f"{row[name] * 1000:.1f}" for name in ("mean", "median", "p95", "p99", "max")]
            latencies.add_row(label, *shown, str(row["count"]))
    made = [totals, latencies]
    if len(figures["by_model"]) > 1:
        made.append(_by_model(figures["by_model"]))
    if figures["errors"]:
        errors = Table("error", "requests", "for example")
        for code, count in figures["errors"].items():
            errors.add_row(escape(code), str(count), escape(figures["error_examples"].get(code, ""))[:200])
        made.append(errors)
    return made


def _by_model(models: dict[str, Any]) -> Table:
    table = Table("model", "requests", "completed", "tokens/s", "first token p50 ms", "end to end p50 ms")
    for name, row in models.items():
        first, whole = row["time_to_first_token_s"], row["e2e_latency_s"]
        table.add_row(
            escape(name),
            str(row["requests"]),
            str(row["completed"]),
            f"{row['output_tokens_per_s']:.1f}",
            "-" if first is None else f"{first['median'] * 1000:.1f}",
            "-" if whole is None else f"{whole['median'] * 1000:.1f}",
        )
    return table
