"""A plan for people."""

from __future__ import annotations

from collections.abc import Mapping

from loraplex.app.output import Output
from loraplex.app.plan.devices import MIB, PlannedDevice
from loraplex.app.plan.expert_forms import EXPERT_FORMS, ExpertPlan
from loraplex.app.plan.memory import MemoryPlan
from loraplex.app.plan.speed import FORMULA, Speed

_ESTIMATE = "an estimate: bytes over the device's bandwidth, without launches, host and sampling."
_MEASURED = "One H100 took 1.2 times the estimate for the base, 1.5 to 1.9 times with adapters."


def print_plan(
    out: Output,
    device: PlannedDevice,
    settings: Mapping[str, object],
    plan: MemoryPlan,
    speeds: tuple[Speed, ...],
) -> None:
    """Memory by use, places, speed, settings."""
    wanted = plan.wanted
    whose = "free here" if device.kind == "cpu" else "in all"
    out.line(f"{settings['model']} on {device.name}: {_size(device.memory)} {whose}\n")
    reserve = "processes and libraries" if device.kind == "cpu" else "CUDA context, libraries, CUDA graphs"
    groups = len(plan.needs.windows)
    of_groups = f" in one of {groups} groups of layers" if groups > 1 else ""
    states = f"; {plan.states} states, {_size(plan.state)} each" if plan.states else ""
    if plan.windows:
        states += f", {plan.states - plan.windows} of them for prefixes; "
        states += f"{plan.windows} windows, {_size(plan.window)} each"
    tables = f"; {_size(plan.arena_tables)} of tables of those on experts" if plan.arena_tables else ""
    of_state = f", or states, {plan.kv_host_state} blocks each" if plan.kv_host_state else ""
    prefixes = wanted.kv_host_memory, f"{plan.kv_host_blocks} blocks of 16 tokens more{of_state}"
    rows = [
        ("weights", plan.weights, ""),
        ("adapters", plan.arena, f"{plan.arena_pages} pages of {_size(plan.page)}{tables}"),
        (
            "KV cache",
            plan.kv,
            f"{plan.kv_blocks} blocks of 16 tokens{of_groups}, {_size(plan.block)} each{states}{_bound(plan)}",
        ),
        *([("prefixes in host memory", *prefixes)] if prefixes[0] and device.kind == "cpu" else []),
        ("activations, logits", plan.activations, "estimated"),
        (reserve, plan.reserve, "an allowance"),
        ("free", plan.free, ""),
    ]
    for name, num_bytes, note in rows:
        out.line(f"  {name:<38}{_size(num_bytes):>11}  {note}".rstrip())
    too = "" if wanted.experts == "none" else f", and on routed experts ({wanted.experts})"
    out.line(f"\nadapters: {_size(plan.adapter)} each at rank {wanted.rank} on {', '.join(plan.sites)}{too}")
    on_device = wanted.adapters - plan.waiting
    out.line(f"  {on_device:>5} on the device: {_size(on_device * plan.adapter)}")
    out.line(f"  {plan.waiting:>5} wait in host memory: {_size(plan.waiting * plan.adapter)}")
    if plan.host:
        must = f", which {device.name}'s host must have free" if device.kind == "cuda" else ""
        out.line(f"  host memory for copies of both: {_size(plan.host)} ({plan.in_host} adapters){must}")
    if prefixes[0] and device.kind == "cuda":
        out.line(
            f"prefixes in host memory: {_size(prefixes[0])}, {prefixes[1]}; {device.name}'s host must have it free"
        )
    if plan.experts is not None:
        _print_experts(out, plan.experts, wanted.rank)
    out.line(f"longest sequence: {plan.max_model_len} tokens\nsequences at once, each of")
    for length, places in plan.places:
        out.line(f"  {length:>7} tokens: {places:>4}")
    _print_speed(out, device, speeds)
    out.line("\nsettings to start with:\n")
    for name, value in settings.items():
        out.line(f"LORAPLEX_{name.upper()}={value}")
    out.line("\nas values of the chart:\n")
    if device.kind == "cuda":
        out.line("gpu:\n  enabled: true")
    out.line("settings:")
    for name, value in settings.items():
        out.line(f"  {name}: {value}")


def _bound(plan: MemoryPlan) -> str:
    """The setting, where not all of it is taken: there are never more blocks than the sequences can use."""
    if plan.kv_setting - plan.kv < MIB:
        return ""
    return f"; {plan.wanted.max_num_seqs} sequences use no more of the {_size(plan.kv_setting)} that are set"


def _print_experts(out: Output, experts: ExpertPlan, rank: int) -> None:
    of_all = (
        f"{experts.count} routed experts in {experts.layers} layers: {_size(experts.weights)} of the weights"
    )
    if experts.obstacle:
        out.line(f"{of_all}; {experts.obstacle}")
        return
    out.line(of_all)
    out.line(
        f"  an adapter of rank {rank} on them too (--experts), and how many fit into the memory for adapters"
    )
    for form in experts.forms:
        out.line(f"  {form.name:<8}{_size(form.adapter):>11}{form.resident:>6}  {EXPERT_FORMS[form.name]}")


def _print_speed(out: Output, device: PlannedDevice, speeds: tuple[Speed, ...]) -> None:
    if not speeds:
        out.line("\nspeed: not estimated, since the bandwidth is not known; give --bandwidth in GB/s")
        return
    out.line(f"\ndecoding, {_ESTIMATE}{' ' + _MEASURED if device.kind == 'cuda' else ''}")
    out.line(f"  {FORMULA}   (docs/performance.md)")
    for speed in speeds:
        out.line(
            f"  {speed.rows:>4} sequences at {speed.context} tokens, {speed.adapters:>3} adapters: "
            f"{speed.step_s * 1e3:8.2f} ms a step, {speed.tokens_per_s:8.0f} tokens/s"
        )


def _size(num_bytes: int) -> str:
    if abs(num_bytes) >= 1 << 30:
        return f"{num_bytes / (1 << 30):.2f} GiB"
    return f"{num_bytes / (1 << 20):.1f} MiB" if abs(num_bytes) >= 1 << 20 else f"{num_bytes / 1024:.0f} KiB"


def print_replicas(out: Output, replicas: int, plan: MemoryPlan, ray: int) -> None:
    """Several engines: the above is each one's."""
    out.line(f"\n{replicas} engines, the above for each:")
    out.line(f"  {'sequences at once, at most':<38}{replicas * plan.wanted.max_num_seqs:>11}")
    out.line(
        f"  {'weights, adapters and KV of all':<38}{_size(replicas * (plan.weights + plan.arena + plan.kv)):>11}"
    )
    out.line(f"  {'Ray, in host memory':<38}{_size(ray):>11}  none without it")
