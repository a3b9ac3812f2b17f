"""The least time of a decoding step, as docs/performance.md has it, with the figures of a data sheet."""

from __future__ import annotations

from dataclasses import dataclass

from loraplex.app.plan.devices import PlannedDevice
from loraplex.app.plan.memory import MemoryPlan
from loraplex.engine.model.outline import ModelOutline

FORMULA = "t = max(W / BW, 2 P T / F) + T context KV / BW + A adapter / BW"
_ROWS = (1, 8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True, slots=True)
class Speed:
    """A step of `rows` sequences, each at `context` tokens, with `adapters` distinct ones: `step_s` seconds, and tokens
    a second of all sequences."""

    rows: int
    adapters: int
    context: int
    step_s: float
    tokens_per_s: float


def decode_speeds(model: ModelOutline, device: PlannedDevice, plan: MemoryPlan) -> tuple[Speed, ...]:
    """None where the device's bandwidth is not known. Launches, the host and the sampler are not in it."""
    if device.bandwidth is None:
        return ()
    context = min(plan.wanted.context, plan.max_model_len)
    most = next(
        places for length, places in reversed(plan.places) if length <= context or length == plan.places[0][0]
    )
    speeds = []
    for rows in sorted({*(rows for rows in _ROWS if rows < most), most}):
        adapters = min(rows, plan.wanted.adapters, plan.resident)
        weights = model.read_bytes(rows) / device.bandwidth
        products = 0.0
        if device.flops is not None:
            products = 2 * model.step_weights * rows / device.flops
        # A state is read and written at each position.
        kv = rows * (plan.needs.seen(context) * (plan.block / 16) + 2 * plan.state) / device.bandwidth
        # An adapter's rows go through some experts, and its part on others is not read.
        unread = plan.adapter_on_experts * (1 - model.chosen_share) ** (rows / adapters)
        loras = adapters * (plan.adapter - unread) / device.bandwidth
        step = max(weights, products) + kv + loras
        speeds.append(Speed(rows, adapters, context, step, rows / step))
    return tuple(speeds)
