"""The choice of what starts a server's engines: Ray, or the server itself."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path

from loraplex.app.cluster.spec import ClusterSpec
from loraplex.app.engines.port import engine_token_path
from loraplex.app.engines.tls import CA
from loraplex.app.setting_groups import ENGINE_SETTINGS
from loraplex.app.setting_types import ANY_ADDRESS
from loraplex.app.settings import Settings, SettingsInvalid
from loraplex.serving.supervision.engine_supervisor import ENGINE_COMMAND

RAY = "2.60"
"""The minor version that is used: Ray's private parts and defaults change with each."""
INSTALL = "pip install 'loraplex[cluster]'"


def ray_version() -> str | None:
    """The installed version of Ray, without importing it; None where there is none."""
    try:
        return importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        return None


def uses_ray(settings: Settings, version: Callable[[], str | None] = ray_version) -> tuple[bool, str]:
    """Whether Ray starts the engines, and why. Raises SettingsInvalid where it is asked for and cannot."""
    host, port = settings.engine_address
    if settings.ray_address == "none":
        if settings.max_replicas > settings.replicas:
            raise SettingsInvalid("--max-replicas needs Ray: leave --ray-address none out.")
        return False, "--ray-address none"
    is_wanted = bool(settings.ray_address)
    if not settings.replicas:
        if is_wanted or settings.max_replicas:
            raise SettingsInvalid("--replicas 0 starts no engine, and so needs no Ray.")
        return False, "--replicas 0"
    if 0 < settings.max_replicas < settings.replicas:
        raise SettingsInvalid(
            f"--max-replicas {settings.max_replicas} is below --replicas {settings.replicas}: raise it or leave it out."
        )
    if settings.ray_cluster and not port:
        raise SettingsInvalid("--ray-address needs --engine-port: its engines dial it again after a restart.")
    if settings.ray_cluster and host in ANY_ADDRESS:
        raise SettingsInvalid(
            f"--engine-port {settings.engine_port}: with --ray-address, name an address that its machines reach."
        )
    if not is_wanted and max(settings.replicas, settings.max_replicas) == 1:
        return False, "one engine needs no Ray"
    found = version()
    is_needed = is_wanted or settings.max_replicas > settings.replicas
    if found is None:
        missing = f"Ray is not installed: {INSTALL}"
    elif not found.startswith(f"{RAY}."):
        missing = f"Ray {found} is installed, and {RAY} is needed: {INSTALL}"
    else:
        return True, f"Ray {found}"
    if is_needed:
        raise SettingsInvalid(f"{missing}.")
    return False, missing


def cluster_spec(settings: Settings, address: str, command: tuple[str, ...] = ENGINE_COMMAND) -> ClusterSpec:
    """The spec of a server's engines, which dial `address` (HOST:PORT). Raises SettingsInvalid."""
    given = settings.model_dump(mode="json", include=set(ENGINE_SETTINGS), exclude_defaults=True)
    given |= {
        "data_dir": str(settings.data_dir.resolve()),
        "engine_token_file": str(engine_token_path(settings).resolve()),
    }
    if settings.engine_tls:
        folder = Path(settings.engine_tls).resolve()
        if not (folder / CA).is_file():
            raise SettingsInvalid(
                f"--engine-tls {settings.engine_tls} needs {CA} too: the engines that Ray starts trust it."
            )
        given["engine_tls"] = str(folder)
    most = settings.max_replicas or settings.replicas
    if not settings.ray_cluster:
        given["replicas"] = most  # they share this machine
    return ClusterSpec(
        join=address,
        settings=given,
        min_replicas=settings.replicas,
        max_replicas=most,
        address=settings.ray_cluster,
        engine_command=command,
    )
