"""The same model in several forms, each in an engine of its own: weights in 16 bits, 4-bit codes and 8-bit floats, keys
and values in 8-bit codes. What it answers, beside 16 bits, and how fast.

All forms stand for the same weights: 4-bit codes times powers of two, which bfloat16 and e4m3 hold exactly."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from bench.gpu.engine.answers import Answer
from bench.gpu.engine.checkpoint import adapter_bytes, link, write_adapter, write_forms, write_variant
from bench.gpu.engine.scenes import Load, Row, ask, drive
from bench.gpu.models import LLAMA_8B, TINY
from loraplex.adapters.ref import AdapterRef
from support.engine.local_engine import LocalEngine
from support.engine.repeater import Repeater

REFERENCE = "16 bits"


@dataclass(frozen=True)
class Form:
    """A checkpoint of `write_forms` and settings of an engine over it. `error`: of its log probabilities, at most."""

    name: str
    checkpoint: str
    error: float
    settings: Mapping[str, Any] = field(default_factory=dict)


FORMS = (
    Form(REFERENCE, REFERENCE, 0.0),
    Form("int4", "int4", 0.1),
    Form("fp8", "fp8", 0.5),
    Form("int8 KV", REFERENCE, 0.3, {"kv_cache_dtype": "int8"}),
    Form("16 bits, again", REFERENCE, 0.1),
)
"""In the order of their run; the last one shows how far times drift. 4-bit codes differ by the order of sums alone, fp8
rounds the inputs of all linears too, and 8-bit keys and values those of attention. Logits of another model are off by
about 1.4."""


@dataclass(frozen=True)
class FormsShape:
    """`lengths` of the prompts whose answers of `output` tokens are compared, of the base and of an adapter; `loads`
    are timed, over `num_adapters` adapters of `rank`. `group`: inputs of a group of 4-bit codes."""

    options: Mapping[str, Any]
    dtype: torch.dtype
    group: int
    rank: int
    num_adapters: int
    lengths: tuple[int, ...]
    output: int
    loads: tuple[Load, ...]
    settings: Mapping[str, Any]

    def with_layers(self, layers: int | None) -> FormsShape:
        """This shape with that number of layers, where given."""
        options = dict(self.options) if layers is None else {**self.options, "num_hidden_layers": layers}
        return replace(self, options=options)


FULL = FormsShape(
    LLAMA_8B, torch.bfloat16, group=128, rank=16, num_adapters=8, lengths=(5, 130, 300, 517), output=32,
    loads=(Load(64, 512, 64, 64), Load(16, 512, 64, 16), Load(1, 512, 64, 1)),
    settings={"device": "cuda", "max_model_len": 1024, "max_num_seqs": 64, "kv_cache_memory": 10 << 30},
)  # fmt: skip
SMALL = FormsShape(
    LLAMA_8B | TINY | {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 128}, torch.float32, group=64,
    rank=8, num_adapters=2, lengths=(3, 18), output=2, loads=(Load(2, 3, 3, 2),),
    settings={
        "kernels": "triton", "num_threads": 1, "lookahead": 1, "max_model_len": 32, "max_num_seqs": 4,
        "max_num_batched_tokens": 24, "kv_cache_memory": 1 << 20, "adapter_memory": 2 << 20,
        "adapter_cpu_memory": 4 << 20,
    },
)  # fmt: skip


def run_forms(
    shape: FormsShape, device: torch.device, folder: Path, forms: Sequence[Form] = FORMS
) -> Iterator[Row]:
    """Rows of each form, with "form", "seconds" and "ok": its engine, its answers, and each load. Those behind the
    first form tell what they are of it. A form that fails is a row with a note, and the others go on."""
    begun = time.monotonic()
    bases = {name: folder / name for name in dict.fromkeys(form.checkpoint for form in FORMS)}
    write_forms(bases, shape.options, shape.dtype, device, shape.group)
    adapters = [folder / f"adapters/{number}" for number in range(shape.num_adapters)]
    write_adapter(adapters[0], shape.options, shape.rank, shape.dtype, device)
    for number, adapter in enumerate(adapters[1:], 1):
        write_variant(adapter, adapters[0], number)
    seconds = round(time.monotonic() - begun, 2)
    yield {"form": "all", "case": "checkpoints and adapters on the disk", "seconds": seconds, "ok": True}
    expected: _Found | None = None
    for number, form in enumerate(forms):
        begun = time.monotonic()
        try:
            found = _run(shape, form, bases[form.checkpoint], folder / f"engine {number}", adapters, device)
            rows = [found.engine, _compare(found, expected, form.error), *_beside(found.loads, expected)]
            expected = expected or found
        except Exception as error:  # of any kind: the forms behind it may be right
            traceback.print_exc()
            rows = [{"case": "failed", "note": f"{type(error).__name__}: {error}"[:500], "ok": False}]
        for row in rows:
            yield {"form": form.name, **row, "seconds": round(time.monotonic() - begun, 2)}


@dataclass(frozen=True)
class _Found:
    """A form's figures: rows of its engine and of each load, and its answers."""

    engine: Row
    loads: list[Row]
    answers: list[Answer]


def _run(
    shape: FormsShape, form: Form, base: Path, work: Path, adapters: Sequence[Path], device: torch.device
) -> _Found:
    one = adapter_bytes(shape.options, shape.rank, shape.dtype)
    memory = {
        "adapter_memory": shape.num_adapters * one * 21 // 20,
        "adapter_cpu_memory": 2 * shape.num_adapters * one,
    }
    engine = LocalEngine(
        base,
        work,
        recorder=None if device.type == "cuda" else Repeater(),
        dtype=str(shape.dtype).removeprefix("torch."),
        **{**memory, **shape.settings, **form.settings},
    )
    try:
        refs = [engine.publish(adapter, put=link) for adapter in adapters]
        asked = [(which, length) for length in shape.lengths for which in (None, adapters[0])]
        answers = ask(engine, {adapters[0]: refs[0]}, asked, shape.output)
        return _Found(_describe(engine), [_time(engine, refs, load) for load in shape.loads], answers)
    finally:
        engine.close()
        del engine
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _describe(engine: LocalEngine) -> Row:
    info = engine.built.info
    assert info.memory is not None
    return {
        "case": "engine",
        "stored": info.stored_codes,
        "kv_dtype": info.kv_cache_dtype,
        "library": info.four_bit_library,
        "weights_gib": info.memory.weights / (1 << 30),
        "kv_blocks": info.num_kv_blocks,
        "ok": info.decoder == "fused",
    }


def _time(engine: LocalEngine, refs: Sequence[AdapterRef], load: Load) -> Row:
    """Tokens a second, and the median time of a step, from one plan to the next."""
    drive(engine, refs, load, f"{load.beside} first")
    begun = time.perf_counter()
    times, errors = drive(engine, refs, load, f"{load.beside} timed")
    seconds = time.perf_counter() - begun
    return {
        "case": f"{load.beside} sequences of {load.prompt} + {load.output} tokens",
        "tokens_per_s": load.requests * load.output / seconds,
        "p50_ms": statistics.median(times) * 1e3,
        "errors": len(errors),
        "note": next(iter(errors), ""),
        "ok": not errors,
    }


def _beside(loads: Sequence[Row], expected: _Found | None) -> list[Row]:
    """Each load, with what its step is of that in 16 bits."""
    if expected is None:
        return list(loads)
    return [
        row | {"step_of_16_bits": row["p50_ms"] / reference["p50_ms"]}
        for row, reference in zip(loads, expected.loads, strict=True)
    ]


def _compare(found: _Found, expected: _Found | None, most: float) -> Row:
    """`error`: the root mean square of the differences of log probabilities, as a part of the standard deviation of the
    expected ones: of all tokens of the prompts, and of answers up to the first other token. `same_tokens`: the share of
    tokens before that. Without expected ones the answers are what is expected."""
    got: list[float] = []
    want: list[float] = []
    same = tokens = 0
    for one, other in zip(found.answers, (expected or found).answers, strict=True):
        equal = [a == b for a, b in zip(one.token_ids, other.token_ids, strict=True)]
        alike = len(list(itertools.takewhile(bool, equal)))
        same += alike
        tokens += len(equal)
        for values, answer in ((got, one), (want, other)):
            values += [own for own, _ in answer.prompt.rows()]
            values += [own for own, _ in itertools.islice(answer.output.rows(), alike)]
    difference = torch.tensor(got).double() - torch.tensor(want).double()
    error = float(difference.pow(2).mean().sqrt() / torch.tensor(want).double().std())
    told = {"case": "answers", "values": len(got), "error": error, "same_tokens": same / tokens}
    return told | {"ok": error <= most}
