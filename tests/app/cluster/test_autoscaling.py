"""The policy as Ray Serve calls it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from loraplex.app.cluster.autoscaling import EngineScaling, autoscaling_config
from loraplex.app.cluster.policy import ADAPTERS, KV, PRESSURES, QUEUE


@dataclass
class Context:
    """The attributes of Serve's context that are used."""

    target_num_replicas: int
    aggregated_metrics: Mapping[str, Mapping[str, float]]
    current_time: float
    policy_state: dict[str, Any] = field(default_factory=dict)
    capacity_adjusted_min_replicas: int = 1
    capacity_adjusted_max_replicas: int = 8


def even(load: float, engines: int) -> dict[str, dict[str, float]]:
    replicas = [f"r{number}" for number in range(engines)]
    return {name: dict.fromkeys(replicas, load / engines) for name in PRESSURES} | {
        "ongoing_requests": dict.fromkeys(replicas, 0.0)
    }


def test_the_state_travels_from_call_to_call_in_serves_own_dictionary() -> None:
    count, state = 2, {"serves": "own"}
    for second in range(12):
        # Serve may keep a copy of the policy in another process: nothing is left in the object.
        policy = EngineScaling(up_delay_s=10.0, down_delay_s=60.0)
        count, state = policy(Context(count, even(3.0, 2), 100.0 + second, state))
        assert count == (2 if second < 10 else 4)


def test_a_count_that_another_hand_has_set_begins_afresh() -> None:
    policy = EngineScaling(up_delay_s=10.0, down_delay_s=60.0)
    _, state = policy(Context(2, even(3.0, 2), 0.0))
    count, _ = policy(Context(3, even(3.0, 3), 10.0, state))
    assert count == 3


def test_a_replica_that_has_not_told_everything_is_silent() -> None:
    metrics = {QUEUE: {"r0": 0.1, "r1": 0.1}, KV: {"r0": 0.1}, ADAPTERS: {"r0": 0.1, "r1": 0.1}}
    policy = EngineScaling(up_delay_s=0.0, down_delay_s=0.0)
    assert policy(Context(2, metrics, 0.0))[0] == 2
    assert policy(Context(2, metrics | {KV: {"r0": 0.1, "r1": 0.1}}, 0.0))[0] == 1
    assert policy(Context(2, {}, 0.0))[0] == 2


def test_a_configuration_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 3 and at most 2"):
        autoscaling_config(3, 2, 10.0, 300.0)


@pytest.mark.slow
def test_serve_takes_the_policy_and_its_context_has_what_is_used() -> None:
    config = pytest.importorskip(
        "ray.serve.config", reason="needs the extra: pip install 'loraplex[cluster]'"
    )
    ready = config.AutoscalingConfig(**autoscaling_config(1, 8, 0.0, 0.0))
    # The controller gets the policy pickled by value, and calls it with names.
    policy = ready.policy.get_policy()(**ready.policy.policy_kwargs)
    names = inspect.signature(config.AutoscalingContext.__init__).parameters.keys() - {"self"}
    replica = object()
    given = dict.fromkeys(names) | {
        "target_num_replicas": 2,
        "aggregated_metrics": lambda: {name: {"r0": 1.0, "r1": 1.0} for name in PRESSURES},
        "capacity_adjusted_min_replicas": 1,
        "capacity_adjusted_max_replicas": 8,
        "policy_state": {},
        "current_time": 5.0,
        "running_replicas": [replica],
    }
    count, state = policy(config.AutoscalingContext(**given))
    assert count == 3
    assert isinstance(state, dict)
