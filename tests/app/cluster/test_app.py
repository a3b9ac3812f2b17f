"""What each engine asks of Ray, and in which order a rolling update replaces engines."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from loraplex.app.cluster.spec import ClusterSpec

app = pytest.importorskip("loraplex.app.cluster.app", reason="loraplex[cluster] is not installed")
CPU, CUDA = {"device": "cpu"}, {"device": "cuda"}


def deployment(**given: Any) -> Any:
    spec = ClusterSpec(join="127.0.0.1:1", **given)
    return app.build(msgspec.to_builtins(spec))._bound_deployment


@pytest.mark.parametrize(
    ("given", "gpus"),
    [
        ({"settings": CPU}, 0.0),
        ({"settings": CUDA}, 1.0),
        ({"settings": CUDA, "gpus": 4.0}, 4.0),
        ({"settings": CPU, "gpus": 0.0}, 0.0),
        ({"settings": {}, "gpus": 1.0}, 1.0),  # `auto`, where the manager has found GPUs
    ],
)
def test_an_engine_asks_for_its_gpus_and_is_replaced_before_or_after_it_has_ended(
    given: dict[str, Any], gpus: float
) -> None:
    found = deployment(**given)
    assert found.ray_actor_options["num_gpus"] == gpus
    assert found.ray_actor_options["num_cpus"] > 0  # Ray would put it anywhere else
    assert found._deployment_config.max_surge_percent == (0 if gpus else 100)


def test_the_number_is_ours_where_it_is_fixed_and_the_policys_where_it_is_not() -> None:
    assert deployment(min_replicas=2, max_replicas=2).num_replicas == 2
    bounds = deployment(min_replicas=2, max_replicas=5)._deployment_config.autoscaling_config
    assert (bounds.min_replicas, bounds.max_replicas) == (2, 5)
