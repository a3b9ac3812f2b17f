"""The application that Ray Serve runs: `import_path: loraplex.app.cluster.app:build` of a RayService, whose `args` are
the fields of a `ClusterSpec`."""

from __future__ import annotations

from typing import Any

import msgspec
from ray import serve

from loraplex.app.cluster.autoscaling import autoscaling_config
from loraplex.app.cluster.replica import RayEngine
from loraplex.app.cluster.spec import ClusterSpec
from loraplex.app.settings import Settings, load_settings

DEPLOYMENT = "engine"
SHARE = 0.01
"""The part of a processor that a replica asks for, so that Ray spreads replicas over machines."""
GRACE_S = 15.0
"""Beyond the drain, for a replica to end by itself before Ray kills it."""


def build(args: dict[str, Any]) -> serve.Application:
    """The engines as a deployment. Raises msgspec.ValidationError, SettingsInvalid."""
    spec = msgspec.convert(args, ClusterSpec)
    settings = load_settings(spec.settings)
    counted: dict[str, Any] = {"num_replicas": spec.min_replicas}
    if spec.max_replicas > spec.min_replicas:
        bounds = autoscaling_config(spec.min_replicas, spec.max_replicas, spec.up_delay_s, spec.down_delay_s)
        counted = {"autoscaling_config": bounds}
    resources = actor_options(settings, spec.gpus)
    deployment = serve.deployment(
        name=DEPLOYMENT,
        ray_actor_options=resources,
        graceful_shutdown_timeout_s=settings.drain_timeout + GRACE_S,
        graceful_shutdown_wait_loop_s=0.1,
        health_check_period_s=3,
        health_check_timeout_s=9,
        max_surge_percent=0 if resources["num_gpus"] else 100,  # a GPU has no room for a second engine
        logging_config={"log_level": "WARNING", "enable_access_log": False},
        **counted,
    )(RayEngine)
    return deployment.bind(msgspec.to_builtins(spec))


def actor_options(settings: Settings, gpus: float | None) -> dict[str, Any]:
    """Resources of a replica. An engine's threads are its own setting: Ray does not count processors. One that spans
    several GPUs will name `placement_group_bundles` here instead."""
    if gpus is None:
        gpus = 1.0 if settings.device == "cuda" else 0.0
    # Ray puts an actor that needs nothing anywhere: onto a machine with many of them, or a head that is to have none.
    return {"num_cpus": SHARE, "num_gpus": gpus}
