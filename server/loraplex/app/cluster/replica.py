"""A replica of Ray Serve: the supervisor of one engine process, and the relay between it and the server.

Requests do not come through Ray. The constructor returns when the server has welcomed the engine, so that a rolling
update never counts one that does not serve yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Any

import msgspec
import ray.serve._private.replica as serve_replica
from ray import serve

from loraplex.app.cluster.policy import engine_pressure
from loraplex.app.cluster.spec import ClusterSpec
from loraplex.app.engines.process import make_relay
from loraplex.app.logs import configure_logging
from loraplex.app.settings import load_settings
from loraplex.serving.errors import EngineUnavailable


class RayEngine:
    """One engine. `spec` is a `ClusterSpec` as plain data."""

    # Serve awaits it, so that a replica counts when its engine serves; Python's types know no such constructor.
    async def __init__(self, spec: dict[str, Any]) -> None:  # type: ignore[misc]
        keep_off_the_network()
        # Ray sets it by an actor's CPUs; an engine has its own setting.
        os.environ.pop("OMP_NUM_THREADS", None)
        given = msgspec.convert(spec, ClusterSpec)
        settings = load_settings(given.settings)
        configure_logging(settings.log_level)
        name = f"{given.prefix}{serve.get_replica_context().replica_id.unique_id}"
        # It may fetch the model.
        self._relay = await asyncio.to_thread(make_relay, settings, given.join, name, given.engine_command)
        self._drain_s = settings.drain_timeout
        self._running = asyncio.create_task(self._relay.run())
        joined = asyncio.create_task(self._relay.joined.wait())
        await asyncio.wait({self._running, joined}, return_when=asyncio.FIRST_COMPLETED)
        joined.cancel()
        if self._running.done():
            await self._relay.close()
            self._running.result()

    async def check_health(self) -> None:
        """Raises where the engine stays down: Ray then replaces this replica."""
        if self._running.done():
            self._running.result()
            raise RuntimeError("the engine has been drained")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Figures for `autoscaling.EngineScaling`; none while the engine is being restarted."""
        with contextlib.suppress(EngineUnavailable):
            return engine_pressure(await self._relay.stats(), self._relay.places)
        return {}

    async def __del__(self) -> None:
        """Called by Ray Serve when it takes the replica away, unless its constructor has failed."""
        await self._relay.drain(self._drain_s)
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        await self._relay.close()


def keep_off_the_network() -> None:
    """Have the replica's port for other replicas listen on loopback. It takes pickles, and nothing here calls it.

    Private: `ray.serve._private.replica` binds it to all interfaces right after the constructor."""
    bind = serve_replica.add_port_to_grpc_server
    serve_replica.add_port_to_grpc_server = lambda server, address: bind(server, "127.0.0.1:0")
