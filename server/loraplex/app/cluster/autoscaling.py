"""The policy of `policy`, in the form that Ray Serve asks for.

Serve copies this module by value into its controller, and imports what it imports: so `policy` is a module of its own.
Its context is described here by the attributes that are used; `tests/app/cluster/test_autoscaling.py` compares it with
Serve's own, where that is installed.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Final, Protocol

from loraplex.app.cluster.policy import PRESSURES, ScaleBounds, Scaling, wanted_replicas

LOOK_BACK_S: Final = 5.0
"""Time over which Serve takes the mean of an engine's pressures. Five reports fall into it; how often they reach
its controller is RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S, 10 s by default."""
_STATE = "loraplex"
POLICY: Final = "loraplex.app.cluster.autoscaling:EngineScaling"
"""Import path of `EngineScaling`."""


class Context(Protocol):
    """The attributes of `ray.serve.config.AutoscalingContext` that are used."""

    target_num_replicas: int
    capacity_adjusted_min_replicas: int
    capacity_adjusted_max_replicas: int
    policy_state: dict[str, Any]
    current_time: float

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Hashable, float]]: ...


class EngineScaling:
    """A custom policy of Serve. It keeps the delays itself, so that Serve's own must be 0: see `autoscaling_config`."""

    def __init__(self, up_delay_s: float, down_delay_s: float) -> None:
        self._up_delay_s = up_delay_s
        self._down_delay_s = down_delay_s

    def __call__(self, context: Context) -> tuple[int, dict[str, Any]]:
        """The wanted number of replicas, and the state that Serve keeps until the next call."""
        bounds = ScaleBounds(
            context.capacity_adjusted_min_replicas,
            context.capacity_adjusted_max_replicas,
            self._up_delay_s,
            self._down_delay_s,
        )
        kept = Scaling(*context.policy_state.get(_STATE, (context.target_num_replicas,)))
        # A count that another hand has set since begins afresh.
        before = kept if kept.number == context.target_num_replicas else Scaling(context.target_num_replicas)
        decided = wanted_replicas(
            _by_replica(context.aggregated_metrics), bounds, before, context.current_time
        )
        return decided.number, {_STATE: tuple(decided)}


def autoscaling_config(minimum: int, maximum: int, up_delay_s: float, down_delay_s: float) -> dict[str, Any]:
    """Fields of `ray.serve.config.AutoscalingConfig`. Raises ValueError as `ScaleBounds` does."""
    ScaleBounds(minimum, maximum, up_delay_s, down_delay_s)
    return {
        "min_replicas": minimum,
        "max_replicas": maximum,
        "upscale_delay_s": 0.0,
        "downscale_delay_s": 0.0,
        "look_back_period_s": LOOK_BACK_S,
        "metrics_interval_s": LOOK_BACK_S / 5,  # used by handles alone, and must be below the other
        "policy": {
            "policy_function": POLICY,
            "policy_kwargs": {"up_delay_s": up_delay_s, "down_delay_s": down_delay_s},
        },
    }


def _by_replica(metrics: Mapping[str, Mapping[Hashable, float]]) -> list[dict[str, float]]:
    """Pressures of each replica that has told all of them."""
    told = [metrics.get(name, {}) for name in PRESSURES]
    everywhere = [replica for replica in told[0] if all(replica in each for each in told)]
    return [
        {name: each[replica] for name, each in zip(PRESSURES, told, strict=True)} for replica in everywhere
    ]
