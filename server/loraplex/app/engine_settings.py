"""The configuration of the engine process, from the server's settings."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from loraplex.app.base_model.source import kept_dir
from loraplex.app.setting_types import kv_disk
from loraplex.app.settings import Settings
from loraplex.app.storage.artifacts import artifact_dir
from loraplex.engine.config import EngineConfig
from loraplex.serving.text.processor import base_turn_ends

IMAGE_CACHE_BYTES = 2 << 30
"""Disk for laid-out copies of adapters, which load faster."""


def engine_config(settings: Settings, model_dir: Path, served_name: str, number: int = 0) -> EngineConfig:
    """The configuration of an engine on this machine. Fields that both have by the same name are copied; the others are
    named here. `number`: its own among the engines of this machine."""
    disk = kv_disk(settings.kv_disk) if settings.kv_disk else None
    return EngineConfig(
        **shared_values(settings, EngineConfig)
        | {
            "model_path": str(model_dir),
            "model_name": served_name,
            "artifact_dir": str(artifact_dir(settings)),
            "artifact_cache_bytes": settings.artifact_cache_size,
            "num_threads": settings.threads,
            "cache_dir": str(settings.data_dir.resolve()),
            "plan_dir": str(kept_dir("plans", settings.data_dir.resolve())),
            "image_dir": str(image_dir(settings)),
            "adapter_image_cache": IMAGE_CACHE_BYTES,
            "num_sharing": max(1, settings.replicas),
            "turn_ends": base_turn_ends(model_dir),
            "kv_disk_dir": disk and str(Path(disk.directory).resolve()),
            "kv_disk_number": number,
            "kv_disk_bytes": 0 if disk is None else disk.num_bytes,
            "kv_disk_key_file": disk and disk.key_file and str(Path(disk.key_file).resolve()),
        }
    )


def shared_values(settings: Settings, kind: type) -> dict[str, Any]:
    """The settings that a dataclass has by the same name."""
    shared = {field.name for field in fields(kind)} & Settings.model_fields.keys()
    return {name: getattr(settings, name) for name in shared}


def image_dir(settings: Settings) -> Path:
    """The folder of laid-out adapters, which the engines of this machine share."""
    return settings.data_dir.resolve() / "images"
