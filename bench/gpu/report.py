"""The suite's results as JSON and as Markdown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Column = tuple[str, str, str]
"""(heading, key of the row, format)."""

_SIZES: list[Column] = [("rows", "rows", "d"), ("adapters", "adapters", "d"), ("rank", "rank", "d")]
_KERNEL: list[Column] = [
    ("case", "case", "s"), ("dtype", "dtype", "s"), ("error", "error", ".1e"), ("ms", "graph_ms", ".4f"),
    ("MB", "bytes", "mb"), ("floor ms", "floor_ms", ".4f"), ("÷ floor", "times_floor", ".2f"),
    ("torch ms", "torch_ms", ".3f"),
]  # fmt: skip
_LORA: list[Column] = [
    *_KERNEL, ("A side ms", "shrink_ms", ".4f"), ("B side ms", "expand_ms", ".4f"), ("plan µs", "plan_us", ".0f"),
    ("right", "ok", "s"),
]  # fmt: skip
_CEILINGS: list[Column] = [
    ("copy TB/s", "copy_tb_per_s", ".2f"), ("bf16 product TFLOP/s", "product_tflop_per_s", ".0f"),
    ("a launch more in a recording µs", "launch_us", ".2f"),
]  # fmt: skip
_SECTIONS: dict[str, tuple[str, list[Column]]] = {
    "ceilings": ("What the device does at best", _CEILINGS),
    "steps": (
        "A decoding step, recorded",
        [*_SIZES, ("base ms", "base_ms", ".3f"), ("base floor ms", "base_floor_ms", ".3f"),
         ("base ÷ floor", "base_times_floor", ".2f"), ("with adapters ms", "lora_ms", ".3f"),
         ("floor ms", "floor_ms", ".3f"), ("÷ floor", "times_floor", ".2f"), ("GB", "bytes", "gb"),
         ("LoRA ÷ base", "lora_to_base", ".3f"), ("of the floors", "floor_ratio", ".3f")],
    ),
    "ab": (
        "Two ways of the same step, in turns",
        [*_SIZES, ("context", "context", "d"), ("a", "a", "s"), ("b", "b", "s"), ("base ms", "base_ms", ".3f"),
         ("a ms", "a_ms", ".3f"), ("b ms", "b_ms", ".3f"), ("a ÷ b", "a_to_b", ".3f"), ("difference", "error", ".1e"),
         ("right", "ok", "s")],
    ),
    "prefill": (
        "Attention to prompts by Triton (a) and by torch (b), in turns",
        [("rows", "case", "s"), ("b", "b", "s"), ("floor ms", "floor_ms", ".3f"), ("a ms", "a_ms", ".3f"),
         ("b ms", "b_ms", ".3f"), ("a ÷ b", "a_to_b", ".3f"), ("a TFLOP/s", "a_tflop_per_s", ".0f"),
         ("b TFLOP/s", "b_tflop_per_s", ".0f"), ("difference", "error", ".1e"), ("right", "ok", "s")],
    ),
    "codes": (
        "A linear over 8-bit codes beside 16 bits",
        [("case", "case", "s"), ("codes ms", "graph_ms", ".4f"), ("floor ms", "floor_ms", ".4f"),
         ("÷ floor", "times_floor", ".2f"), ("16 bits ms", "dense_ms", ".4f"),
         ("16 bits, invariant, ms", "invariant_ms", ".4f"), ("difference", "relative_error", ".1e"),
         ("right", "ok", "s")],
    ),
    "kv": (
        "Keys and values in the model's dtype (a) and in 8-bit codes (b), one layer",
        [*_KERNEL[:3], ("of the codes", "codes_error", ".1e"), ("steps of a code", "steps", ".2f"),
         ("a ms", "a_ms", ".4f"), ("b ms", "b_ms", ".4f"), ("a ÷ b", "a_to_b", ".3f"),
         ("b's floor ms", "floor_ms", ".4f"), ("b ÷ floor", "times_floor", ".2f"), ("right", "ok", "s")],
    ),
    "fp8": (
        "A linear over 8-bit floats: the tile that keeps a row's bits, and torch's product, which rounds x too",
        [("case", "case", "s"), ("tile ms", "tile_ms", ".4f"), ("scaled within ms", "within_ms", ".4f"),
         ("scaled behind ms", "behind_ms", ".4f"), ("fast sums ms", "fast_ms", ".4f"),
         ("rounding x ms", "round_ms", ".4f"), ("16 bits ms", "dense_ms", ".4f"), ("8-bit codes ms", "codes_ms", ".4f"),
         ("floor ms", "floor_ms", ".4f"), ("tile's difference", "error", ".1e"),
         ("torch's difference", "scaled_error", ".1e"), ("x's rounding", "rounding", ".1e"),
         ("torch's row alone", "scaled_alone", "s"), ("right", "ok", "s")],
    ),
    "humming": (
        "A linear over 4-bit codes by humming-kernels, and by Triton",
        [("case", "case", "s"), ("humming ms", "humming_ms", ".4f"), ("Triton ms", "nibbles_ms", ".4f"),
         ("16 bits ms", "dense_ms", ".4f"), ("floor ms", "floor_ms", ".4f"), ("difference", "error", ".1e"),
         ("a row alone", "alone", "s"), ("right", "ok", "s")],
    ),
    "invariant": (
        "--batch-invariant beside the fast path",
        [("case", "case", "s"), *_SIZES, ("base ms", "base_ms", ".3f"),
         ("invariant base ms", "base_invariant_ms", ".3f"), ("base left", "base_ratio", ".3f"),
         ("with adapters ms", "lora_ms", ".3f"), ("invariant with adapters ms", "lora_invariant_ms", ".3f"),
         ("with adapters left", "lora_ratio", ".3f"), ("differing", "differing", "d"), ("right", "ok", "s")],
    ),
    "parts": (
        "Where a step's time goes",
        [("rows", "rows", "d"), ("adapters", "adapters", "d"), ("part", "part", "s"), ("launches", "launches", "d"),
         ("ms", "ms", ".3f"), ("share", "share", ".3f")],
    ),
    "host": (
        "The host's side of a step",
        [*_SIZES, ("sampling", "sampling", "s"), ("submit µs", "submit_us", ".0f"), ("queue µs", "queue_us", ".0f"),
         ("alone ms", "alone_ms", ".3f"), ("one behind the other ms", "pipelined_ms", ".3f"),
         ("pass on the device ms", "device_ms", ".3f")],
    ),
    "prompts": (
        "A prompt",
        [("tokens", "tokens", "d"), ("rank", "rank", "d"), ("base ms", "base_ms", ".2f"),
         ("floor ms", "floor_ms", ".2f"), ("base ÷ floor", "base_times_floor", ".2f"),
         ("with adapter ms", "lora_ms", ".2f"), ("LoRA ÷ base", "lora_to_base", ".3f")],
    ),
    "activation": (
        "An adapter from pinned memory into the arena",
        [("case", "case", "s"), ("MB", "bytes", "mb"), ("ms", "ms", ".3f"), ("GB/s", "gb_per_s", ".1f")],
    ),
    "equality": (
        "The engine beside transformers",
        [("case", "case", "s"), ("dtype", "dtype", "s"), ("error", "error", ".1e"),
         ("transformers' error", "transformers_error", ".1e"), ("between the two", "between", ".1e"),
         ("recorded against not", "recorded_error", ".1e"), ("same bits", "same_bits", "s"), ("right", "ok", "s")],
    ),
    "checks": ("Kernels against float64, small", [*_KERNEL[:3], ("right", "ok", "s")]),
    "lora": ("Batched LoRA, one layer", _LORA),
    "compiled": ("Compiled", [("case", "case", "s"), ("seconds", "seconds", ".1f"), *_CEILINGS]),
    "right": ("Batched LoRA against float64", [*_KERNEL[:3], ("right", "ok", "s")]),
    "kernels": ("Forms of batched LoRA, one layer", _LORA),
    "counters": (
        "Counters of the device",
        [("case", "case", "s"), ("kernel", "kernel", "s"), ("of memory's bandwidth %", "dram_percent", ".1f"),
         ("warps there %", "warps_percent", ".1f"), ("waiting for memory", "scoreboard", ".2f"),
         ("waiting at barriers", "barrier", ".2f")],
    ),
    "strips": ("Forms of batched LoRA of prompts, one layer", _LORA),
    "peers": (
        "LoRA kernels of others beside those here, one layer's group, in turns",
        [("case", "case", "s"), ("kernels", "contender", "s"), ("A side µs", "a_us", ".1f"),
         ("B side µs", "b_us", ".1f"), ("both µs", "both_us", ".1f"), ("as it is ÷ this", "today", ".2f"),
         ("error", "error", ".1e"), ("right", "ok", "s"), ("note", "note", "s")],
    ),
    "sampling": ("Sampling", [*_KERNEL, ("right", "ok", "s")]),
    "attention": ("Paged attention, one layer", [*_KERNEL, ("right", "ok", "s")]),
    "recurrent": (
        "Gated delta nets, one layer",
        [*_KERNEL[:-1], ("convolution ms", "convolution_ms", ".4f"), ("gates ms", "gates_ms", ".4f"),
         ("norm ms", "norm_ms", ".4f"), ("same bits", "same_bits", "s"), ("right", "ok", "s")],
    ),
    "experts": (
        "Mixtures of experts with adapters, one layer",
        [*_KERNEL[:-1], ("routing ms", "routing_ms", ".4f"), ("LoRA ms", "lora_ms", ".4f"),
         ("LoRA's floor ms", "lora_floor_ms", ".4f"), ("layer ms", "layer_ms", ".4f"), ("right", "ok", "s")],
    ),
    "fused": ("Norms, activations, RoPE with the KV write", [*_KERNEL[:-1], ("right", "ok", "s")]),
}  # fmt: skip


@dataclass(frozen=True)
class _Aim:
    """A figure of the row `key` (of the case with that key, its first): at least, or at most, so much."""

    what: str
    case: str
    key: str
    least: float | None = None
    most: float | None = None

    def reached(self, value: float) -> bool:
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)


_AIMS = (
    _Aim(
        "LoRA ÷ base, 64 rows of 8 adapters", "steps/64 rows, 8 adapters, rank 16", "lora_to_base", least=0.95
    ),
    _Aim(
        "LoRA ÷ base, 64 rows of 64 adapters",
        "steps/64 rows, 64 adapters, rank 16",
        "lora_to_base",
        least=0.75,
    ),
    _Aim(
        "--batch-invariant ÷ fast path, 64 rows of 8 adapters",
        "invariant/64 rows, 8 adapters, rank 16",
        "lora_ratio",
        least=0.90,
    ),
    _Aim("base ÷ floor, 64 rows", "steps/64 rows, 8 adapters, rank 16", "base_times_floor", most=1.35),
    _Aim("activation of an adapter of rank 16, ms", "activation/rank 16", "ms", most=3.0),
)
"""On an H200, adapters on all seven linears of an 8B model."""


def write_report(
    out: Path, runs: Sequence[dict[str, Any]], keys: Sequence[str], results: dict[str, dict[str, Any]]
) -> None:
    """`results.json` and `results.md` in `out`, of the cases `keys` in their order, whether or not they have run."""
    ran = [results[key] for key in keys if key in results]
    missing = [key for key in keys if results.get(key, {"status": "cut"})["status"] == "cut"]
    whole = {"runs": list(runs), "results": ran, "not_run": missing}
    (out / "results.json").write_text(json.dumps(whole, indent=1) + "\n", "utf-8")
    (out / "results.md").write_text("\n".join(_markdown(runs, ran, missing)) + "\n", "utf-8")


def _markdown(runs: Sequence[dict[str, Any]], ran: list[dict[str, Any]], missing: Sequence[str]) -> list[str]:
    identity = runs[0]["identity"]
    lines = [f"# GPU suite: {identity['device']}", "", f"commit {identity['commit']}, {_facts(runs)}."]
    if "interpreted" in identity["device"]:
        lines += ["", "**Interpreted on a CPU: no time here says anything of a GPU.**"]
    lines += ["", *(f"- {run['started']}: `{run['command']}`" for run in runs), ""]
    counts = {
        status: sum(result["status"] == status for result in ran)
        for status in ("ok", "wrong", "failed", "lost", "skipped")
    }
    told = ", ".join(f"{count} {status}" for status, count in counts.items())
    lines += [f"{told}, {len(missing)} not run. What the columns mean: docs/lab/gpu.md."]
    lines += _aims({result["case"]: result for result in ran if result["rows"]})
    sections: dict[str, list[dict[str, Any]]] = {}
    for result in ran:
        sections.setdefault(result["case"].partition("/")[0], []).append(result)
    for section, found in sections.items():
        rows = [row for result in found for row in result["rows"]]
        if rows:
            title, columns = _SECTIONS[section]
            lines += ["", f"## {title}", "", *markdown_table(columns, rows)]
    troubles = [result for result in ran if result["status"] in ("failed", "lost")]
    if troubles:
        lines += ["", "## What went wrong", ""]
        lines += [
            f"- {result['case']}: {result['status']}, {_one_line(result['note'])}" for result in troubles
        ]
    skipped = [result for result in ran if result["status"] == "skipped"]
    if skipped:
        lines += ["", "## Skipped", "", *(f"- {result['case']}: {result['note']}" for result in skipped)]
    if missing:
        lines += ["", "## Not run, for want of time", "", *(f"- {key}" for key in missing)]
    return lines


def _facts(runs: Sequence[dict[str, Any]]) -> str:
    """The environment of the runs: where they differ, each of the values."""
    names = dict.fromkeys(name for run in runs for name in run["environment"] if name != "device")
    values = {name: dict.fromkeys(str(run["environment"].get(name)) for run in runs) for name in names}
    return ", ".join(f"{name} {' and '.join(found)}" for name, found in values.items())


def _aims(results: dict[str, dict[str, Any]]) -> list[str]:
    rows = []
    for aim in _AIMS:
        value = results.get(aim.case, {"rows": [{}]})["rows"][0].get(aim.key)
        if isinstance(value, float):
            bound = f"≥ {aim.least}" if aim.least is not None else f"≤ {aim.most}"
            rows.append({"what": aim.what, "bound": bound, "value": value, "reached": aim.reached(value)})
    columns = [
        ("", "what", "s"),
        ("aimed at", "bound", "s"),
        ("here", "value", ".3f"),
        ("reached", "reached", "s"),
    ]
    return ["", "## What is aimed at on an H200", "", *markdown_table(columns, rows)] if rows else []


def markdown_table(columns: Sequence[Column], rows: Sequence[dict[str, Any]]) -> list[str]:
    """Lines of a table; columns that no row has are left out."""
    shown = [column for column in columns if any(row.get(column[1]) is not None for row in rows)]
    return [
        "| " + " | ".join(heading for heading, _, _ in shown) + " |",
        "|" + "---|" * len(shown),
        *("| " + " | ".join(_cell(row.get(key), kind) for _, key, kind in shown) + " |" for row in rows),
    ]


def _cell(value: Any, kind: str) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    if isinstance(value, str) or kind == "s":
        return _one_line(str(value))
    if kind in ("mb", "gb"):
        return f"{value / (1e6 if kind == 'mb' else 1e9):.2f}"
    return format(value, kind)


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
